"""The rows of the result table: what each one is, how its run differs from `joint`, whose weights it uses.

This is the one place that says so: the quickstart, the long experiment and the evaluation of a single run
all read it. A row's overrides are fields of the run's configuration, so any row can also be trained by hand.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rag_mm.config import Config
from rag_mm.evaluate.answer import Documents
from rag_mm.evaluate.overrides import Overrides, get
from rag_mm.objectives import TEACH_RETRIEVER


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        name: as in tables and JSON.
        about: one line for people.
        overrides: from the configuration of `joint`, the fields that differ; None: the row trains nothing.
        weights_of: row whose weights it uses; empty: a baseline without weights.
        documents: what its reader reads.
        on_request: only where ``--rows`` names it.
    """

    name: str
    about: str
    overrides: Callable[[Config], Overrides] | None = None
    weights_of: str = ""
    documents: Documents = "retrieved"
    on_request: bool = False


FROZEN = {"train.joint_retriever_scale": 0.0}
WITHOUT_LABELS = {"objectives.contrastive_on": "pairs", "train.pairs": "unasked"}


def _closed_book(config: Config) -> Overrides:
    """As many steps of the reader as `joint` has, and nothing to retrieve, rename or learn to retrieve."""
    return {
        "train.documents": "none",
        "train.rename": 0.0,
        "train.steps": config.train.steps - config.train.retriever_steps,
        "train.retriever_share": 0.0,
        "objectives.contrastive": 0.0,
        **{f"objectives.{name}": 0.0 for name in TEACH_RETRIEVER},
    }


ROWS: dict[str, Row] = {
    row.name: row
    for row in (
        Row("most_frequent", "commonest training answer of each field"),
        Row("closed_book", "the same reader, no documents", _closed_book, "closed_book", "none"),
        Row("pixels", "most similar 12 x 12 pixels, retrieval only"),
        Row("bm25", "BM25 of the question's words, retrieval only", on_request=True),
        Row("no_documents", "joint's reader, nothing to read", None, "joint", "none", on_request=True),
        Row("bm25_documents", "joint's reader reads what BM25 finds", None, "joint", "bm25", on_request=True),
        Row("gold_document", "joint's reader, right document given", None, "joint", "gold"),
        Row(
            "frozen_retriever",
            "retriever from image-text pairs only, never moved",
            lambda config: {**WITHOUT_LABELS, **FROZEN},
            "frozen_retriever",
        ),
        Row(
            "joint_answers_only",
            "starts there, learns retrieval from answers alone",
            lambda config: {**WITHOUT_LABELS, "objectives.pdist": max(config.objectives.pdist, 1.0)},
            "joint_answers_only",
        ),
        Row(
            "supervised_frozen",
            "retriever from question-document labels, then frozen",
            lambda config: FROZEN,
            "supervised_frozen",
        ),
        Row("joint", "everything together", lambda config: {}, "joint"),
    )
}

USUAL_ROWS = tuple(name for name, row in ROWS.items() if not row.on_request)

# What is compared question by question: row, other row, metric, kind of question.
COMPARISONS: tuple[tuple[str, str, str, str], ...] = (
    ("joint_answers_only", "frozen_retriever", "hit@1", "picture"),
    ("joint", "pixels", "hit@1", "picture"),
    ("joint", "supervised_frozen", "hit@1", "name"),
    ("joint", "supervised_frozen", "hit@1", "picture"),
    ("joint", "supervised_frozen", "em", "all"),
    ("joint", "closed_book", "em", "all"),
    ("joint", "most_frequent", "em", "all"),
)


def check_rows(names: Iterable[str], *, where: str) -> list[str]:
    """The named rows in the table's order.

    Raises:
        ValueError: names a row that does not exist, and the nearest one that does.
    """
    names = list(names)
    for name in names:
        if name not in ROWS:
            near = difflib.get_close_matches(name, ROWS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"allowed are {', '.join(ROWS)}"
            raise ValueError(f"{where} names {name!r}, which is no row; {hint}")
    return [name for name in ROWS if name in names]


def runs_needed(names: Iterable[str]) -> list[str]:
    """Rows that have to be trained for ``names``, in the table's order, `joint` first."""
    needed = {ROWS[name].weights_of for name in names} - {""}
    return sorted((name for name in ROWS if name in needed), key=lambda name: name != "joint")


def row_of(config: Config) -> str:
    """The row that a run's configuration trains: the most particular one whose overrides it has."""
    fitting = []
    for row in ROWS.values():
        if row.overrides is not None:
            wanted = dict(row.overrides(config))
            if row.documents == "none":
                wanted = {"train.documents": "none"}
            elif wanted and config.train.documents == "none":
                continue
            if all(get(config, name) == value for name, value in wanted.items()):
                fitting.append((len(wanted) + 10 * (row.documents == "none"), row.name))
    return max(fitting)[1]
