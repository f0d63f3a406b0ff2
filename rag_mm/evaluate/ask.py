"""One question to a run: the answer, what it was read from, and exactly which weights, index and documents those were.

    run = load_run("runs/mine")
    asked = Asker(run).ask("what is the capital of this country?", image=Path("flag.png").read_bytes())
    asked.answer, [(d.title, d.score) for d in asked.documents], asked.record()

The code that answers is evaluation's (`rag_mm.evaluate.answer.Answerer`), so a question of the data set gets the answer
here that it gets there. `Asked.record` is what `python -m rag_mm.evaluate --ask ... --json -` prints. A document's
version is the number of the last edit that touched it and the hashes of the text and the picture that were read.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from data import images
from data.dataset import Sample
from rag_mm.evaluate import contribution
from rag_mm.evaluate.answer import Answerer, Documents, Run
from rag_mm.evaluate.decoding import DecodingConfig
from rag_mm.evaluate.evaluation import describe_decoding, describe_index
from rag_mm.evaluate.rows import ROWS, row_of
from retriever.embed import combined_hash, tensor_hashes
from retriever.index import Index


@dataclass(frozen=True)
class AskedDocument:
    """A document that was retrieved.

    Attributes:
        score: query.document.
        read: whether the reader read it.
        log_likelihood, share: what it contributed (`rag_mm.evaluate.contribution`); None where it was not read.
        last_edit: number of the store's last edit that touched it; 0: it is as the shards have it.
        text_sha256, image_sha256: of what the models were given, before anything was cut off.
    """

    id: str
    title: str
    fields: dict[str, str]
    passage: str
    score: float
    read: bool
    log_likelihood: float | None
    share: float | None
    last_edit: int
    text_sha256: str
    image_sha256: str | None


@dataclass(frozen=True)
class Asked:
    """An answer.

    Attributes:
        image_sha256: of the picture that was asked about, or None.
        documents: all that were retrieved, best first.
        truncated: a word for each text that was cut off.
        answered_by: run, checkpoint, hash of all weights, k and decoding.
        index: which index was searched, None without retrieval.
        store: which documents, as of which edit.
    """

    question: str
    image_sha256: str | None
    answer: str
    documents: tuple[AskedDocument, ...]
    truncated: tuple[str, ...]
    answered_by: dict[str, Any]
    index: dict[str, Any] | None
    store: dict[str, Any]

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**asdict(self), "contribution": contribution.NAME}


class Asker:
    """Answers free questions with a run's weights; with several ranks, all of them make the same calls.

    Args:
        decoding: by default the run's own.
        console: told about the index, if it has to be made.
        built: folder of an index that a build job made; by default an exact one is made.

    Raises:
        ValueError: as `Answerer`.
    """

    def __init__(
        self,
        run: Run,
        *,
        decoding: DecodingConfig | None = None,
        console: Console | None = None,
        built: Path | None = None,
    ) -> None:
        self.run, self.decoding = run, decoding or run.config.evaluate
        self.documents: Documents = ROWS[row_of(run.config)].documents
        index: Index | None = None
        if built is not None:
            if self.documents != "retrieved":
                raise ValueError(f"--index is {built}, but {run.directory} is a run that retrieves nothing")
            index = run.built_index(built, console=console)
        elif self.documents == "retrieved":
            index = run.index(console=console)
        self._answerer = Answerer(
            run.config, run.dataset, run.model, index, layout=run.layout, decoding=self.decoding
        )  # fmt: skip
        # Ranks that do not search hold no index; the first one, whose record counts, does.
        self._index = describe_index(run, index, built)
        here = tensor_hashes(run.layout.tensors_here())
        everywhere = {name: digest for theirs in run.layout.mesh.gather(here) for name, digest in theirs.items()}
        self._weights = combined_hash(everywhere)

    def ask(self, question: str, *, image: bytes | None = None) -> Asked:
        """Answer a question, about a picture if there is one (PNG, JPEG, ...).

        Raises:
            ValueError: if the question is empty or the picture cannot be read.
        """
        if not question.strip():
            raise ValueError("the question is empty; it must have some words")
        if image is not None:
            images.load_rgba(image)
        sample = Sample("asked", question, ("",), "picture" if image else "name", "", "", (), image)
        (prediction,) = self._answerer.answer([sample], self.documents)
        (parts,) = contribution.contributions(self._answerer, [sample], [prediction])
        store = self.run.dataset.store
        documents = []
        for i, document in enumerate(store.read(prediction.document_ids)):
            part = parts[i] if i < len(parts) else None
            documents.append(
                AskedDocument(
                    id=document.id,
                    title=document.title,
                    fields=dict(document.fields),
                    passage=document.passage,
                    score=prediction.scores[i],
                    read=part is not None,
                    log_likelihood=None if part is None else part.log_likelihood,
                    share=None if part is None else part.share,
                    last_edit=store.last_edit_of(document.id),
                    text_sha256=_sha256(document.text.encode()),
                    image_sha256=None if document.image is None else _sha256(document.image),
                )
            )
        return Asked(
            question, _sha256(image) if image else None, prediction.answer or "", tuple(documents),
            prediction.truncated, self._answered_by(), self._index,
            {"directory": str(store.folder), "version": store.version, "num_documents": len(store)},
        )  # fmt: skip

    def _answered_by(self) -> dict[str, Any]:
        run = self.run
        return {
            "run_dir": str(run.directory),
            "step": run.step,
            "steps": run.config.train.steps,
            "weights": self._weights,
            "row": row_of(run.config),
            "k": run.config.retriever.k,
            "decoding": describe_decoding(self.decoding),
        }


def asked_table(asked: Asked) -> RenderableType:
    """The same for people."""
    table = Table(
        title=Text(asked.answer or "(no answer)", "bold green"), box=box.SIMPLE_HEAD, title_justify="left"
    )  # fmt: skip
    for column in ("document", "score", "read", "share", "text"):
        table.add_column(column, justify="right" if column in ("score", "share") else "left")
    for d in asked.documents:
        text = "; ".join(
            [*(f"{label}: {value}" for label, value in d.fields.items()), *([d.passage] if d.passage else [])]
        )
        share = "" if d.share is None else f"{d.share:.2f}"
        table.add_row(Text(d.title), f"{d.score:.2f}", "yes" if d.read else "", share, Text(text))
    by, parts = asked.answered_by, [f"store {asked.store['version']}"]
    if asked.index is not None:
        parts.append(f"index version {asked.index['version']}")
    said = f"step {by['step']} of {by['run_dir']}, weights {by['weights'][:12]}, {', '.join(parts)}"
    cut = [Text(f"cut off: {', '.join(asked.truncated)}", "dim")] if asked.truncated else []
    return Group(Text(asked.question), table, Text(said, "dim"), *cut)


def _sha256(contents: bytes) -> str:
    return hashlib.sha256(contents).hexdigest()
