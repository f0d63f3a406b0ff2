"""Changing a fact without training: edit one document, update its index entry, ask again.

The same weights answer before and after, so what changes can only have come from the document. The edit
goes to the store's append-only log; a copy of the data set keeps the original as it is.
"""

from __future__ import annotations

import difflib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from data.dataset import Dataset, Sample
from data.document_store import EDITS, DocumentStore
from rag_mm.evaluate.answer import Answerer, Prediction, Run
from retriever.index import list_versions


@dataclass(frozen=True)
class Fact:
    """``value`` is what the document is to say under ``field``."""

    document_id: str
    field: str
    value: str


@dataclass(frozen=True)
class FactChange:
    """What an edit did.

    Attributes:
        before, after: predictions for the same questions.
        store, index: versions before and after.
    """

    fact: Fact
    title: str
    old_value: str
    samples: list[Sample]
    before: list[Prediction]
    after: list[Prediction]
    store: tuple[str, str]
    index: tuple[int, int]


def parse_fact(text: str, store: DocumentStore) -> Fact:
    """``np.capital=Pokhara``, or ``Nepal.capital=Pokhara``.

    Raises:
        ValueError: says what is wrong and the nearest thing that exists.
    """
    left, equals, value = text.partition("=")
    subject, dot, field = left.strip().rpartition(".")
    subject, field, value = subject.strip(), field.strip(), value.strip()
    if not (equals and dot and subject and field and value):
        raise ValueError(f'--set-fact is {text!r}; write document.field=value, such as "np.capital=Pokhara"')
    titles = {d.id: d.title for d in store.fetch(store.ids)}
    if subject not in titles:
        ids = {title.casefold(): document_id for document_id, title in titles.items()}
        if subject.casefold() not in ids:
            near = difflib.get_close_matches(subject.casefold(), [*titles, *ids], n=1)
            best = ids.get(near[0], near[0]) if near else next(iter(titles))
            hint = "did you mean" if near else "documents are named such as"
            raise ValueError(
                f"--set-fact names document {subject!r}, which does not exist; {hint} {best} ({titles[best]})"
            )
        subject = ids[subject.casefold()]
    fields = store.fetch([subject])[0].fields
    if field not in fields:
        near = difflib.get_close_matches(field, fields, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(fields)}"
        raise ValueError(f"--set-fact names field {field!r}, which {titles[subject]} does not have; {hint}")
    return Fact(subject, field, value)


def copy_dataset(source: Path, target: Path) -> None:
    """Copy a data set folder, files linked where the disk can, for edits that leave the original alone.

    What is written in place (the log of edits) is copied, never linked. A copy that is there already is used.

    Raises:
        ValueError: if something else lies at ``target``.
    """
    if target.exists():
        info = target / "dataset.json"
        if info.exists() and info.read_bytes() == (source / "dataset.json").read_bytes():
            return
        raise ValueError(f"--store-copy is {target}, which holds something else; name a new folder or remove that one")
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, temporary, copy_function=_link)
    temporary.rename(target)


def _link(source: str, target: str) -> None:
    if Path(source).name == EDITS:
        shutil.copy2(source, target)
        return
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without links
        shutil.copy2(source, target)


def questions_about(dataset: Dataset, fact: Fact) -> list[Sample]:
    """All questions, of whichever split, that this document's field answers.

    Raises:
        ValueError: if nothing asks for it.
    """
    own = [s for s in dataset.questions(dataset.split_of(fact.document_id)) if s.subject == fact.document_id]
    found = [sample for sample in own if sample.field == fact.field]
    if not found:
        asked = ", ".join(dict.fromkeys(sample.field for sample in own))
        hint = f"asked are {asked}" if asked else "no question is about this document; use --ask"
        raise ValueError(f"--set-fact changes {fact.field!r}, but no question asks for it; {hint}")
    return found


def change_fact(run: Run, fact: Fact, *, index_dir: Path, console: Console) -> FactChange:
    """Answer the questions about a fact, edit it in the store of ``run``, update the index, answer again."""
    store = run.dataset.store
    samples = questions_about(run.dataset, fact)
    index = run.index(directory=index_dir, console=console)
    before = Answerer(run.config, run.dataset, run.model, index).answer(samples)
    versions, stores = [list_versions(index_dir)[-1]], [store.version]
    document = store.fetch([fact.document_id])[0]
    store.edit(fact.document_id, fact.field, fact.value)
    index = run.index(directory=index_dir, console=console)
    after = Answerer(run.config, run.dataset, run.model, index).answer(samples)
    versions.append(list_versions(index_dir)[-1])
    stores.append(store.version)
    return FactChange(
        fact, document.title, document.fields[fact.field], samples, before, after,
        (stores[0], stores[1]), (versions[0], versions[1]),
    )  # fmt: skip


def change_table(change: FactChange, dataset: Dataset) -> Table:
    """Question, answer before and after, and the document that was retrieved."""
    fact = change.fact
    split = dataset.split_of(fact.document_id)
    held_out = "training never saw a question about it" if split != "train" else "training asked about it"
    table = Table(
        title=Text(f"{change.title}: {fact.field} is now {fact.value!r}, was {change.old_value!r}", "bold"),
        caption=f"{change.title} is in the {split} split ({held_out}). Same weights before and after.\n"
        f"Store {' -> '.join(change.store)}, index version {' -> '.join(map(str, change.index))}.",
        box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left",
    )  # fmt: skip
    for name in ("question", "before", "after", "retrieved"):
        table.add_column(name)
    for sample, before, after in zip(change.samples, change.before, change.after, strict=True):
        seen = " (picture)" if sample.kind == "picture" else ""
        right = after.answer is not None and after.answer.casefold() == fact.value.casefold()
        table.add_row(
            Text(sample.question + seen),
            Text(before.answer or ""),
            Text(after.answer or "", "green" if right else "red"),
            Text(documents_text(after, dataset.store)),
        )
    return table


def documents_text(prediction: Prediction, store: DocumentStore) -> str:
    """Titles and scores of the documents that were read, one a line."""
    ids = prediction.document_ids[: prediction.num_read]
    titles = [document.title for document in store.fetch(ids)]
    return "\n".join(f"{t} {s:.2f}" for t, s in zip(titles, prediction.scores, strict=False))
