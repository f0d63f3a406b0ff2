"""The figures of a row with all that has to stand beside them: what each means, of how many, how sure.

One table of lines (those of the predictions file) serves the result file, the report and the comparison of two runs, so
that the three cannot disagree. A figure's name says the part of the questions it is about: ``em``, ``em kind=picture``,
``em field=capital``, ``em unseen``, ``hit@1 kind=name``. Units of resampling
are subjects: what a question is about, such as a country.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from rag_mm.evaluate import bootstrap
from rag_mm.evaluate.metric import Array, OfSums, Scores, mean

DEFINITIONS = {
    "em": "exact match after SQuAD's normalisation (lower case; no ASCII punctuation, a, an, the), best answer",
    "f1": "F1 of the normalised words, best accepted answer",
    "hit@1": "a right document is the first of those retrieved (duplicates of it count)",
    "hit@4": "a right document is among the first four",
    "kind": "how it was asked: by name, or by picture",
    "unseen": "questions none of whose accepted answers is accepted for any training question",
}
INTERVAL = "95 % percentile bootstrap over subjects, 10,000 draws, seed 0"


def scores_of(lines: Sequence[Mapping[str, Any]]) -> Scores:
    """The table of a row's lines (`judging.Scored.record`), in their order."""
    values: dict[str, Array] = {}
    for name in ("em", "f1"):
        values[name] = _column([line[name] for line in lines])
    for name in ("hit@1", "hit@4"):
        values[name] = _column([line["hit"].get(name) for line in lines])
    columns, metrics = dict[str, Array](), list[OfSums]()

    def add(metric: str, part: str, inside: Sequence[bool]) -> None:
        column = numpy.where(numpy.array(inside, dtype=bool), values[metric], math.nan)
        if not numpy.isnan(column).all():
            name = f"{metric} {part}".strip()
            columns[name] = column
            metrics.append(mean(name, DEFINITIONS[metric]))

    for metric in values:
        add(metric, "", [True] * len(lines))
        for kind in dict.fromkeys(line["kind"] for line in lines):
            add(metric, f"kind={kind}", [line["kind"] == kind for line in lines])
    add("em", "unseen", [line["unseen_answers"] for line in lines])
    for field in dict.fromkeys(line["field"] for line in lines):
        add("em", f"field={field}", [line["field"] == field for line in lines])
    ids = tuple(line["id"] for line in lines)
    return Scores(ids, tuple(line["subject"] or line["id"] for line in lines), columns, tuple(metrics))


def figures(scores: Scores, *, seed: int = 0) -> dict[str, dict[str, Any]]:
    """Value, ends of the interval and number of questions of every figure."""
    ends, found = bootstrap.intervals(scores, seed=seed), scores.results()
    return {
        name: {
            "value": found[name],
            "low": ends[name][0],
            "high": ends[name][1],
            "num": int((~numpy.isnan(scores.columns[name])).sum()),
        }
        for name in found
    }


def _column(values: Sequence[float | None]) -> Array:
    return numpy.array([math.nan if value is None else value for value in values], dtype=numpy.float64)
