"""Rows worked by hand from four questions."""

import json
from pathlib import Path

import numpy
import pytest

from data.dataset import Dataset, Sample
from rag_mm.evaluate.answer import Prediction
from rag_mm.evaluate.judging import compare, make_row, score, seen_answers, write
from rag_mm.evaluate.row_scores import INTERVAL

SAMPLES = [
    Sample("np-capital-name", "?", ("Kathmandu",), "name", "capital", "np", ("np",)),
    Sample("np-capital-picture", "?", ("Kathmandu",), "picture", "capital", "np", ("np",)),
    Sample("no-climate-picture", "?", ("temperate",), "picture", "climate", "no", ("no", "sj", "bv")),
    Sample("pe-climate-name", "?", ("varied", "tropical, dry"), "name", "climate", "pe", ("pe",)),
]
PREDICTIONS = [
    Prediction("np-capital-name", "kathmandu", ("np", "in", "cn", "pk"), (0.9, 0.5, 0.4, 0.3), 2),
    Prediction("np-capital-picture", "New Delhi", ("in", "cn", "np", "pk"), (0.9, 0.5, 0.4, 0.3), 2),
    Prediction("no-climate-picture", "Temperate.", ("bv", "no", "sj", "se"), (0.9, 0.5, 0.4, 0.3), 2),
    Prediction("pe-climate-name", "dry", ("cl", "bo", "br", "ar"), (0.9, 0.5, 0.4, 0.3), 2),
]
SEEN = frozenset({"temperate", "tropical dry"})


def test_row() -> None:
    row = make_row("joint", score(SAMPLES, PREDICTIONS, SEEN))
    assert row["em"] == 0.5
    assert row["f1"] == pytest.approx((1 + 0 + 1 + 2 / 3) / 4)  # "dry" against "tropical dry": 2 * 1 / 3
    assert row["em_by_kind"] == {"name": 0.5, "picture": 0.5}
    assert row["em_by_field"] == {"capital": 0.5, "climate": 0.5}
    assert row["hit@1"] == {"name": 0.5, "picture": 0.5}  # bv counts for Norway: the same flag
    assert row["hit@4"] == {"name": 0.5, "picture": 1.0}
    assert row["em_unseen_answers"] == 0.5  # the two about Kathmandu; Peru's second answer was seen
    low, high = row["em_interval"]
    assert 0.0 <= low < 0.5 < high <= 1.0
    assert set(row["hit@1_interval"]) == {"name", "picture"}


def test_what_does_not_apply_is_null() -> None:
    retrieves_only = [Prediction(p.id, None, p.document_ids, p.scores) for p in PREDICTIONS]
    row = make_row("pixels", score(SAMPLES, retrieves_only, SEEN))
    assert (row["em"], row["f1"], row["em_interval"], row["em_unseen_answers"]) == (None, None, None, None)
    assert row["hit@1"]["picture"] == 0.5
    answers_only = [Prediction(p.id, p.answer) for p in PREDICTIONS]
    row = make_row("closed_book", score(SAMPLES, answers_only, SEEN))
    assert row["em"] == 0.5 and row["hit@1"] == row["hit@4"] == {"name": None, "picture": None}
    given = [Prediction(p.id, p.answer, (s.subject,), (1.0,), 1) for p, s in zip(PREDICTIONS, SAMPLES, strict=True)]
    row = make_row("gold_document", score(SAMPLES, given, SEEN))
    assert row["hit@1"] == row["hit@1_interval"] == {"name": None, "picture": None}


def test_predictions_of_other_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="belongs"):
        score(SAMPLES, PREDICTIONS[::-1], SEEN)


def test_comparisons_are_those_whose_rows_are_there() -> None:
    mine = score(SAMPLES, PREDICTIONS, SEEN)
    worse = score(SAMPLES, [Prediction(p.id, "x", ("x",), (1.0,), 1) for p in PREDICTIONS], SEEN)
    found = compare({"joint": mine, "closed_book": worse})
    assert [(c["row"], c["minus"], c["metric"], c["difference"]) for c in found] == [
        ("joint", "closed_book", "em", 0.5)
    ]
    (hit,) = [c for c in compare({"joint": mine, "pixels": worse})]
    assert (hit["metric"], hit["kind"], hit["difference"]) == ("hit@1", "picture", 0.5)


COUNTRIES = [f"c{i:02}" for i in range(40)]
MANY = [
    Sample(f"{c}-{j}", "?", (" ".join(f"w{n}" for n in range(j + i % 3 + 1)),), "picture", "capital", c, (c,))
    for i, c in enumerate(COUNTRIES)
    for j in range(1 + 7 * i % 11)
]


def drawn(values: list[float], *, seed: int) -> list[float]:
    """Ends of the interval as published: 10,000 picks of 40 countries, in order of their names, all their questions."""
    generator = numpy.random.Generator(numpy.random.Philox(seed))
    pick = generator.integers(len(COUNTRIES), size=(10000, len(COUNTRIES)))
    at = {country: [i for i, s in enumerate(MANY) if s.subject == country] for country in COUNTRIES}
    sums, counts = (numpy.array([sum(v[i] for i in at[c]) for c in COUNTRIES]) for v in (values, [1.0] * len(MANY)))
    ends = numpy.quantile(sums[pick].sum(1) / counts[pick].sum(1), [0.025, 0.975])
    return [float(end) for end in ends]


def test_intervals_are_those_of_the_seed_that_is_said() -> None:
    """Countries with one question to eleven: means then take so many values that another seed has other ends."""
    predictions = [Prediction(s.id, "w0", (s.subject if i % 3 else "x",), (1.0,), 1) for i, s in enumerate(MANY)]
    em = [float(s.answers == ("w0",)) for s in MANY]
    f1 = [2 / (1 + len(s.answers[0].split())) for s in MANY]  # one word of so many is said
    hit = [float(i % 3 > 0) for i in range(len(MANY))]
    right = {
        name: pytest.approx(drawn(values, seed=0), abs=1e-12)
        for name, values in (("em", em), ("f1", f1), ("hit@1", hit))
    }
    scored = score(MANY, predictions, SEEN)
    row = make_row("joint", scored)
    assert row["em_interval"] == right["em"] and row["hit@1_interval"]["picture"] == right["hit@1"]
    for name, ends in right.items():
        assert [row["figures"][name][end] for end in ("low", "high")] == ends
    nothing = score(MANY, [Prediction(s.id, "x", ("x",), (1.0,), 1) for s in MANY], SEEN)
    (paired,) = compare({"joint": scored, "closed_book": nothing})
    assert [paired["low"], paired["high"]] == right["em"]
    assert "10,000 draws, seed 0" in INTERVAL
    for values in (em, f1, hit):
        assert drawn(values, seed=1) != pytest.approx(drawn(values, seed=0), abs=1e-6), "it would be seen"


def test_files(tmp_path: Path) -> None:
    scored = score(SAMPLES, PREDICTIONS, SEEN)
    path = write(tmp_path / "eval", "test", {"rows": [make_row("joint", scored)]}, {"joint": scored})
    assert json.loads(path.read_text())["rows"][0]["name"] == "joint"
    lines = (tmp_path / "eval" / "test.predictions.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    assert len(lines) == 4
    assert (first["id"], first["answer"], first["em"]) == ("np-capital-name", "kathmandu", 1.0)
    assert first["documents"] == ["np", "in", "cn", "pk"] and first["hit"] == {"hit@1": 1.0, "hit@4": 1.0}


def test_every_answer_of_a_training_question_is_seen(factbook: Dataset) -> None:
    seen = seen_answers(factbook)
    assert all(s.answers[0].lower().strip(".") in seen for s in factbook.questions("train") if s.field == "domain")
