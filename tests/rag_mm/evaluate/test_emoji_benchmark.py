"""The emoji benchmark: who is held out with whom, its data set and run, ranks with ties, its baselines, its table."""

from __future__ import annotations

import io
from pathlib import Path

import numpy
import pytest
from PIL import Image

from benchmarks.evaluation.emoji import (
    TASKS,
    PixelsAndNames,
    Ranks,
    bm25,
    by_pixels,
    by_towers,
    load_encoder,
    put,
    train,
    trigram_tf_idf,
)
from benchmarks.evaluation.emoji_data import Drawn, families, split, write_dataset
from data.dataset import Dataset


def drawn(name: str, seed: int, *, like: int | None = None) -> Drawn:
    """An emoji whose two drawings are noise of its own, or OpenMoji's that of another."""

    def picture(number: int) -> bytes:
        noise = numpy.random.default_rng(number).integers(256, size=(24, 24, 3), dtype=numpy.uint8)
        buffer = io.BytesIO()
        Image.fromarray(noise).save(buffer, format="PNG")
        return buffer.getvalue()

    return Drawn(f"emoji-{seed}", name, picture(100 + seed), picture(seed if like is None else like))


EMOJI = [
    drawn("man running", 0), drawn("woman running", 1), drawn("red apple", 2), drawn("tomato", 3, like=2),
    drawn("person running", 4, like=5), drawn("fast", 5), drawn("sea", 6), drawn("wave", 7),
]  # fmt: skip


def test_families_are_held_out_whole() -> None:
    """By name without man and woman, by a picture that is the same, and by both in turn."""
    found = {frozenset(one.name for one in group) for group in families(EMOJI)}
    assert found == {
        frozenset({"man running", "woman running", "person running", "fast"}), frozenset({"red apple", "tomato"}),
        frozenset({"sea"}), frozenset({"wave"}),
    }  # fmt: skip
    known, held = split(families(EMOJI))
    assert len(held) == 1  # a fifth of four families
    (family,) = [group for group in families(EMOJI) if held[0] in group]
    assert len(known) == len(EMOJI) - len(family) and not set(known) & set(family)


def test_a_tie_counts_against_the_right_one() -> None:
    ranks = Ranks()
    ranks.add(EMOJI[:3], numpy.array([[0.5, 0.1, 0.2], [0.7, 0.7, 0.1], [0.9, 0.9, 0.1]]))
    assert ranks.rank == [1, 2, 3]
    assert ranks.scores().results() == {"hit@1": pytest.approx(1 / 3), "hit@5": 1.0, "hit@10": 1.0}
    ranks.add(EMOJI[:3], numpy.eye(3))  # a second draw of candidates has the same units
    assert len(ranks.scores().ids) == 6 and len(set(ranks.scores().units)) == 3


@pytest.mark.parametrize("matcher", [trigram_tf_idf, bm25])
def test_a_known_emoji_stands_between_drawing_and_name(matcher: object) -> None:
    """Asked with the known ones themselves, the way over a known one leads back."""
    assert callable(matcher)
    known = [EMOJI[i] for i in (0, 2, 5, 6, 7)]
    scores = PixelsAndNames(known, matcher([one.name for one in known])).scores(known)
    assert set(scores) == set(TASKS[1:])
    assert (scores[TASKS[1]].argmax(axis=1) == numpy.arange(5)).all()
    same = [drawn("x", 50, like=50), drawn("y", 51, like=51)]
    assert by_pixels([Drawn(one.id, one.name, one.openmoji, one.openmoji) for one in same])[TASKS[0]].argmax(
        axis=1
    ).tolist() == [0, 1]


def test_the_run_sees_what_is_trained_on_and_nothing_else(factbook_dir: Path, tmp_path: Path) -> None:
    """Documents are drawings without a word; names and the other drawing ask for them. `train.py` takes it so."""
    known = EMOJI[:5]
    write_dataset(known, tmp_path / "data", tokenizer=factbook_dir / "tokenizer")
    dataset = Dataset(tmp_path / "data")
    documents = dataset.store.fetch(dataset.store.ids)
    assert [(d.id, d.title, d.image) for d in documents] == [(one.id, "", one.openmoji) for one in known]
    pairs = {(pair.text, pair.image, pair.gold) for pair in dataset.pairs("train")}
    assert pairs == {(one.name, None, (one.id,)) for one in known} | {("", one.twemoji, (one.id,)) for one in known}
    train(tmp_path / "data", tmp_path / "run", steps=3, seed=0)
    scores = by_towers(*load_encoder(tmp_path / "run"), EMOJI)
    assert set(scores) == set(TASKS) and {score.shape for score in scores.values()} == {(8, 8)}
    numpy.testing.assert_allclose(scores[TASKS[1]].T, scores[TASKS[2]], atol=1e-6)
    assert abs(scores[TASKS[1]]).max() > 0.01, "a name has a score with a drawing"


def test_the_table_goes_between_its_marks() -> None:
    assert put("a\n<!-- emoji -->\nold\n<!-- /emoji -->\nb", "new") == "a\n<!-- emoji -->\nnew\n<!-- /emoji -->\nb"
    with pytest.raises(SystemExit, match="has no place for the table"):
        put("a", "new")
