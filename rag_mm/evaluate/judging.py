"""Answers judged: from predictions to rows of the result table, and to files.

A row holds fractions of 1; what does not apply is null. ``hit@k`` counts any right document among the first
k. ``em_unseen_answers`` is exact match on questions none of whose accepted answers is accepted for any
training question, of whatever field: these cannot be remembered, only read.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.dataset import Dataset, Sample
from rag_mm.evaluate import baselines, row_scores
from rag_mm.evaluate.answer import DEPTH, Answerer, Prediction
from rag_mm.evaluate.bootstrap import bootstrap, paired_bootstrap
from rag_mm.evaluate.finished import Finished
from rag_mm.evaluate.questions import words_of
from rag_mm.evaluate.rows import COMPARISONS, ROWS
from rag_mm.evaluate.scoring import squad

KINDS = ("name", "picture")
HITS = (1, 4)
SEED = 0  # of the bootstrap: the same predictions give the same intervals


@dataclass(frozen=True)
class Scored:
    """A prediction beside its question, judged.

    Attributes:
        sample: what it says; of a split's questions (`questions.Questions.words`) without its picture.
        em, f1: None where there is no answer to judge.
        hit: k -> whether a right document is among the first k; empty where nothing was retrieved.
        unseen: no accepted answer of it is one of a training question.
    """

    sample: Sample
    prediction: Prediction
    em: float | None
    f1: float | None
    hit: dict[int, float]
    unseen: bool

    def value(self, metric: str) -> float | None:
        """``em``, ``f1`` or ``hit@<k>``."""
        if metric.startswith("hit@"):
            return self.hit.get(int(metric[4:]))
        return self.em if metric == "em" else self.f1

    def record(self, row: str) -> dict[str, Any]:
        """One line of the predictions file."""
        sample, prediction = self.sample, self.prediction
        return {
            "row": row,
            "id": sample.id,
            "question": sample.question,
            "kind": sample.kind,
            "field": sample.field,
            "subject": sample.subject,
            "gold_answers": list(sample.answers),
            "answer": prediction.answer,
            "em": self.em,
            "f1": self.f1,
            "gold_documents": list(sample.gold),
            "documents": list(prediction.document_ids),
            "scores": [round(score, 6) for score in prediction.scores],
            "num_read": prediction.num_read,
            "hit": {f"hit@{k}": value for k, value in self.hit.items()},
            "unseen_answers": self.unseen,
        }


def seen_answers(dataset: Dataset) -> frozenset[str]:
    """Every normalised accepted answer of a training question."""
    return frozenset(
        squad.normalise_answer(answer)
        for sample in dataset.questions("train").scan()
        if sample.weight
        for answer in sample.answers
    )


def score(samples: Sequence[Sample], predictions: Sequence[Prediction], seen: frozenset[str]) -> list[Scored]:
    """Judge predictions.

    Raises:
        ValueError: if predictions and samples are not in the same order.
    """
    scored = []
    for sample, prediction in zip(words_of(samples), predictions, strict=True):
        if sample.id != prediction.id:
            raise ValueError(f"prediction {prediction.id!r} stands where one for {sample.id!r} belongs")
        em = f1 = None
        if prediction.answer is not None:
            em = squad.maximum_over(squad.exact_match, prediction.answer, sample.answers)
            f1 = squad.maximum_over(squad.f1, prediction.answer, sample.answers)
        ids = prediction.document_ids
        hit = {k: float(bool(set(sample.gold) & set(ids[:k]))) for k in HITS if len(ids) >= k}
        unseen = not seen.intersection(map(squad.normalise_answer, sample.answers))
        scored.append(Scored(sample, prediction, em, f1, hit, unseen))
    return scored


def predict(
    name: str,
    dataset: Dataset,
    answerer: Answerer | None,
    samples: Sequence[Sample],
    *,
    progress: Callable[[int], None] | None = None,
    finished: Finished | None = None,
    interrupt: Callable[[], bool] | None = None,
    depth: int = DEPTH,
) -> list[Prediction]:
    """The predictions of one row; ``answerer`` has the weights that the row uses (None: a baseline, to ``depth``)."""
    row = ROWS[name]
    if row.weights_of:
        assert answerer is not None, f"{name} needs weights"
        return answerer.answer(
            samples, row.documents, progress=progress, row=name, finished=finished, interrupt=interrupt
        )
    if name == "most_frequent":
        predictions = baselines.most_frequent(dataset, samples)
    else:
        predictions = {"pixels": baselines.pixels, "bm25": baselines.bm25}[name](dataset, samples, depth=depth)
    if progress is not None:
        progress(len(samples))
    return predictions


def make_row(name: str, scored: Sequence[Scored]) -> dict[str, Any]:
    """A row of the table, folds pooled or not; intervals resample subjects.

    ``figures`` has every figure with interval and number of questions (`rag_mm.evaluate.row_scores`).
    """
    given = ROWS[name].documents == "gold"  # it was given the right document, which is no merit
    kinds = {kind: [s for s in scored if s.sample.kind == kind] for kind in KINDS}
    fields: defaultdict[str, list[Scored]] = defaultdict(list)
    for item in scored:
        fields[item.sample.field].append(item)
    row: dict[str, Any] = {
        "name": name,
        "em": _mean(scored, "em"),
        "f1": _mean(scored, "f1"),
        "em_interval": _interval(scored, "em"),
        "em_by_kind": {kind: _mean(items, "em") for kind, items in kinds.items()},
        "em_by_field": {field: _mean(items, "em") for field, items in fields.items()},
    }
    for k in HITS:
        metric = f"hit@{k}"
        row[metric] = {kind: None if given else _mean(items, metric) for kind, items in kinds.items()}
    row["hit@1_interval"] = {kind: None if given else _interval(items, "hit@1") for kind, items in kinds.items()}
    row["em_unseen_answers"] = _mean([s for s in scored if s.unseen], "em")
    figures = row_scores.figures(row_scores.scores_of([s.record(name) for s in scored]), seed=SEED)
    row["figures"] = {metric: figure for metric, figure in figures.items() if not (given and metric[:4] == "hit@")}
    return row


def compare(scored: Mapping[str, Sequence[Scored]]) -> list[dict[str, Any]]:
    """The paired comparisons of COMPARISONS whose rows are there."""
    found = []
    for name, other, metric, kind in COMPARISONS:
        if name in scored and other in scored:
            a, b = (_by_subject(_of_kind(scored[row], kind), metric) for row in (name, other))
            if not (a or b):
                continue  # no question of this kind
            difference, low, high = paired_bootstrap(a, b, seed=SEED)
            found.append(
                {"row": name, "minus": other, "metric": metric, "kind": kind,
                 "difference": difference, "low": low, "high": high}
            )  # fmt: skip
    return found


def write(directory: Path, stem: str, result: dict[str, Any], scored: Mapping[str, Sequence[Scored]]) -> Path:
    """Write ``<stem>.json`` and, if there are rows, ``<stem>.predictions.jsonl``; gives the former's path."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(s.record(row), ensure_ascii=False) for row, items in scored.items() for s in items]
    if lines:
        _replace(directory / f"{stem}.predictions.jsonl", "".join(f"{line}\n" for line in lines))
    path = directory / f"{stem}.json"
    _replace(path, json.dumps(result, ensure_ascii=False, indent=2) + "\n")
    return path


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _of_kind(scored: Iterable[Scored], kind: str) -> list[Scored]:
    return [s for s in scored if kind in ("all", s.sample.kind)]


def _by_subject(scored: Iterable[Scored], metric: str) -> dict[str, list[float]]:
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for item in scored:
        value = item.value(metric)
        if value is not None:
            groups[item.sample.subject or item.sample.id].append(value)
    return dict(groups)


def _mean(scored: Iterable[Scored], metric: str) -> float | None:
    values = [value for s in scored if (value := s.value(metric)) is not None]
    return sum(values) / len(values) if values else None


def _interval(scored: Iterable[Scored], metric: str) -> list[float] | None:
    groups = _by_subject(scored, metric)
    return list(bootstrap(groups, seed=SEED)[1:]) if groups else None
