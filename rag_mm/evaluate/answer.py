"""Answering questions with the weights of a run, on one process, whatever layout trained them.

Queries and documents are embedded exactly as in training, but for augmentation. Documents are found in an
index of these very weights (any other is refused), and embedded anew for the reader, which weighs them by
their scores. Decoding is greedy. More documents than the reader reads are searched for, so that hit@4 can be
reported; the reader sees the first ``retriever.k``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from torch import Tensor

from data.command_line import parse
from data.dataset import Dataset, Sample
from data.document_store import Document
from pipeline import Pipeline, Plan
from rag_mm import checkpoint
from rag_mm.config import Config
from rag_mm.model import Model, build_model
from rag_mm.reader.fusion import answering_program
from rag_mm.reader.generate import decode
from retriever.build import build_index
from retriever.embed import document_features, make_manifest
from retriever.index import Index

Documents = Literal["retrieved", "gold", "none"]
DEPTH = 4  # hit@4 is the deepest that is reported


@dataclass(frozen=True)
class Prediction:
    """What came out for one question.

    Attributes:
        id: of the question.
        answer: text, or None from a baseline that only retrieves.
        document_ids: best first; empty where nothing was retrieved.
        scores: of these documents, query.document.
        num_read: how many of them the reader read.
    """

    id: str
    answer: str | None
    document_ids: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    num_read: int = 0


@dataclass(frozen=True)
class Run:
    """A run's folder, opened: its configuration, data and weights.

    Attributes:
        step: of the checkpoint that the weights come from.
    """

    directory: Path
    config: Config
    dataset: Dataset
    model: Model
    step: int

    def index(self, *, directory: Path | None = None, console: Console | None = None) -> Index:
        """An index of these weights and of the store as it is now; only what changed is embedded again."""
        return build_index(
            self.model.encoder,
            self.dataset,
            directory=directory or self.directory / "index-eval",
            image_size=self.config.data.image_size,
            batch_size=self.config.index.batch_size,
            keep=self.config.index.keep_versions,
            console=console,
        )


def load_run(run_dir: str | Path, step: int | None = None, *, data_dir: str | Path | None = None) -> Run:
    """Open a run.

    Args:
        step: of the checkpoint; the latest by default.
        data_dir: the data set, where it is not the one that the run's configuration names.

    Raises:
        FileNotFoundError: if there is no such run, checkpoint or data set; says what makes one.
    """
    directory = Path(run_dir)
    command = f"python train.py --config configs/quickstart.yaml --run-dir {directory}"
    if not (directory / "config.yaml").exists():
        raise FileNotFoundError(f"no run at {directory}; train one with `{command}`")
    config = read_config(directory)
    steps = checkpoint.list_steps(directory)
    if not steps:
        raise FileNotFoundError(f"the run at {directory} has no checkpoint yet; go on training with `{command}`")
    if step is not None and step not in steps:
        known = ", ".join(map(str, steps))
        raise FileNotFoundError(f"--step is {step}, but the run at {directory} keeps checkpoints of step {known}")
    dataset = Dataset(data_dir or config.data.dir, fold=config.data.fold)
    model = build_model(config, dataset)
    chosen = steps[-1] if step is None else step
    checkpoint.load(directory, chosen, weights(model))
    model.reader.eval()
    model.encoder.eval()
    return Run(directory, config, dataset, model, chosen)


def read_config(run_dir: Path) -> Config:
    """The resolved configuration that a run wrote; its ``run_dir`` is where it lies now."""
    config = parse(Config, ["--config", str(run_dir / "config.yaml")], prog="config.yaml", description="")
    return dataclasses.replace(config, run_dir=str(run_dir))


def weights(model: Model) -> dict[str, Tensor]:
    """All weights under the names they have in checkpoints; writing to them changes the model."""
    reader = {f"reader.{name}": p.detach() for name, p in model.reader.named_parameters_global().items()}
    return reader | {f"retriever.{name}": t for name, t in model.encoder.state_dict().items()}


class Answerer:
    """Answers questions.

    Args:
        index: of this model's weights; None if nothing will be retrieved.

    Raises:
        ValueError: if the index was made by other weights, or k exceeds the memory.
    """

    def __init__(
        self, config: Config, dataset: Dataset, model: Model, index: Index | None, *, batch_size: int = 64
    ) -> None:
        self.config, self.dataset, self.model, self.index = config, dataset, model, index
        self.batch_size = batch_size
        if index is not None:
            needed = make_manifest(model.encoder, dataset.store, image_size=config.data.image_size)
            index.manifest.check(needed, where="hand")
            if config.retriever.k > len(index.ids):
                raise ValueError(
                    f"retriever.k is {config.retriever.k}; the memory holds only {len(index.ids)} documents"
                )

    def answer(
        self,
        samples: Sequence[Sample],
        documents: Documents = "retrieved",
        *,
        progress: Callable[[int], None] | None = None,
    ) -> list[Prediction]:
        """One prediction a sample, in order.

        Args:
            documents: what the reader reads: what is retrieved, the document the question was made from, or
                nothing (an empty document, as in training without documents).
            progress: called with the number of questions answered after each batch.
        """
        # Answers of one field are about as long as each other, and a batch decodes until its longest is done.
        order = sorted(range(len(samples)), key=lambda i: (samples[i].field, samples[i].kind))
        predictions: dict[int, Prediction] = {}
        for start in range(0, len(samples), self.batch_size):
            chosen = order[start : start + self.batch_size]
            answered = self._answer([samples[i] for i in chosen], documents)
            predictions.update(zip(chosen, answered, strict=True))
            if progress is not None:
                progress(len(chosen))
        return [predictions[i] for i in range(len(samples))]

    @torch.no_grad()
    def _answer(self, samples: Sequence[Sample], documents: Documents) -> list[Prediction]:
        encoder, collator = self.model.encoder, self.model.collator
        questions = [s.question for s in samples]
        image, has_image = collator.images([s.image for s in samples])
        query = encoder(encoder.features(questions, image, has_image))
        found, scores = self._search(samples, query, documents)
        if documents == "none":
            read = [[Document("", "", {})] for _ in samples]
            document_image = (torch.ones_like(image), torch.zeros(len(samples)))
            embedding = torch.zeros_like(query)
        else:
            names = [row[: self.config.retriever.k] for row in found]
            unique = sorted({name for row in names for name in row})
            fetched = dict(zip(unique, self.dataset.store.fetch(unique), strict=True))
            place = {name: i for i, name in enumerate(unique)}
            features = document_features(encoder, list(fetched.values()), image_size=self.config.data.image_size)
            rows = torch.tensor([place[name] for row in names for name in row])
            read = [[fetched[name] for name in row] for row in names]
            document_image = (features["image"][rows], features["has_image"][rows])
            embedding = encoder(features)[rows]
            if documents == "gold":
                scores = (query * embedding).sum(1, keepdim=True)
        context = collator.context(questions, read, (image, has_image), document_image)
        context |= {"query_embedding": query, "document_embedding": embedding}
        program = answering_program(self.model.reader)
        tokens = decode(
            Pipeline(program, Plan.from_cuts(program, [])),
            context,
            num_samples=len(samples),
            bos=collator.bos,
            end=collator.end,
            max_tokens=self.config.data.max_answer_tokens,
        )
        num_read = 0 if documents == "none" else len(read[0])
        return [
            Prediction(sample.id, self._text(row), tuple(ids), tuple(score), num_read)
            for sample, row, ids, score in zip(samples, tokens.tolist(), found, scores.tolist(), strict=True)
        ]

    def _search(self, samples: Sequence[Sample], query: Tensor, documents: Documents) -> tuple[list[list[str]], Tensor]:
        """Document ids, best first, and their scores."""
        if documents == "retrieved":
            if self.index is None:
                raise ValueError("nothing can be retrieved without an index")
            depth = min(max(self.config.retriever.k, DEPTH), len(self.index.ids))
            return self.index.search(query, k=depth)
        ids = [[sample.subject] for sample in samples] if documents == "gold" else [[] for _ in samples]
        return ids, torch.zeros(len(samples), 0)

    def _text(self, tokens: list[int]) -> str:
        collator = self.model.collator
        kept = tokens[: tokens.index(collator.end)] if collator.end in tokens else tokens
        return collator.tokenizer.decode(kept, skip_special_tokens=True).strip()
