"""Parity with pycocoevalcap on equal tokens, and values by hand."""

import contextlib
import io
import math
import random

import numpy
import pytest
from pycocoevalcap.bleu.bleu import Bleu
from pycocoevalcap.cider.cider import Cider
from pycocoevalcap.rouge.rouge import Rouge

from rag_mm.evaluate.scoring.captions import (
    BLEU_COLUMNS,
    bleu_counts,
    bleu_of_sums,
    cider_d,
    longest_common_subsequence,
    rouge_l,
)
from tests.rag_mm.evaluate.scoring.nasty import sentence

Corpus = tuple[list[list[str]], list[list[list[str]]]]


def corpus(seed: int, *, size: int = 60) -> Corpus:
    """Candidates and references: random, copies of a reference, empty ones, duplicate references, one to six each."""
    generator = random.Random(seed)
    candidates, references = [], []
    for _ in range(size):
        image = [sentence(generator, most=14).split() or ["x"] for _ in range(generator.randint(1, 5))]
        image += [image[0]] * generator.randint(0, 1)
        candidates.append(generator.choice([image[0], sentence(generator).split(), [], ["x"], image[-1][:3]]))
        references.append(image)
    return candidates, references


def as_coco(candidates: list[list[str]], references: list[list[list[str]]]) -> tuple[dict, dict]:
    gts = {i: [" ".join(caption) for caption in image] for i, image in enumerate(references)}
    return gts, {i: [" ".join(candidate)] for i, candidate in enumerate(candidates)}


@pytest.mark.parametrize("seed", range(4))
def test_parity_with_pycocoevalcap(seed: int) -> None:
    candidates, references = corpus(seed)
    gts, res = as_coco(candidates, references)
    _, theirs = Cider().compute_score(gts, res)
    assert cider_d(candidates, references) == pytest.approx(theirs.tolist(), abs=1e-9)
    _, theirs = Rouge().compute_score(gts, res)
    ours = [rouge_l(c, r) for c, r in zip(candidates, references, strict=True)]
    assert ours == pytest.approx(theirs.tolist(), abs=1e-12)
    with contextlib.redirect_stdout(io.StringIO()):
        bleu, _ = Bleu(4).compute_score(gts, res)
    assert corpus_bleu(candidates, references) == pytest.approx(bleu[3], rel=1e-9)


def words(text: str) -> list[str]:
    return text.split()


def corpus_bleu(candidates: list[list[str]], references: list[list[list[str]]]) -> float:
    rows = [bleu_counts(c, r) for c, r in zip(candidates, references, strict=True)]
    sums = numpy.array([[sum(row[name] for row in rows) for name in BLEU_COLUMNS]], dtype=numpy.float64)
    return float(bleu_of_sums(sums)[0])


def test_cider_of_copies_by_hand() -> None:
    """Two images with nothing in common, each caption copied: every cosine is 1, no length penalty: 10 for each n.

    A caption of three words has no 4-gram, so n = 4 gives 0 and the mean over n is 7.5.
    """
    candidates = [["a", "b", "c", "d"], ["x", "y", "z"]]
    assert cider_d(candidates, [[candidates[0]], [candidates[1]]]) == pytest.approx([10.0, 7.5])


def test_cider_length_penalty_by_hand() -> None:
    """One word repeated: counts are clipped, and a difference of 2 in length costs exp(-4 / 72).

    Candidate w w w (counts 3), reference w (1), idf log 2: cosine 3 clipped to 1: 1*1 / (3*1) = 1/3, for n = 1 only.
    """
    candidates = [["w", "w", "w"], ["q"]]
    references = [[["w"]], [["q"]]]
    assert cider_d(candidates, references)[0] == pytest.approx(10 / 4 * (1 / 3) * math.exp(-(2**2) / 72))


def test_cider_ignores_what_every_image_has() -> None:
    """idf of an n-gram in every image is log(N/N) = 0: nothing is left of "a", and no norm."""
    assert cider_d([["a"], ["a"]], [[["a"]], [["a"]]]) == [0.0, 0.0]


def test_bleu_by_hand() -> None:
    """the cat sat on the mat / the cat is on the mat: 5/6, 3/5, 1/4, 0/3: the last makes it (nearly) 0."""
    counts = bleu_counts(words("the cat sat on the mat"), [words("the cat is on the mat")])
    assert [counts[f"correct_{n}"] for n in range(1, 5)] == [5, 3, 1, 0]
    assert [counts[f"guess_{n}"] for n in range(1, 5)] == [6, 5, 4, 3]
    copy = words("a b c d e")
    assert corpus_bleu([copy], [[copy]]) == pytest.approx(1.0, abs=1e-6)
    # brevity: 4 of 5 words, all n-grams right: exp(1 - 5/4)
    assert corpus_bleu([copy[:4]], [[copy]]) == pytest.approx(math.exp(-0.25), abs=1e-6)
    assert bleu_counts(["a"], [["a"] * 3, []])["reference_length"] == 0  # as far from 1 as... 0 is nearer than 3
    assert bleu_counts(["a"] * 2, [["a"] * 3, ["a"]])["reference_length"] == 1  # as near: the shorter one
    assert corpus_bleu([[]], [[copy]]) == pytest.approx(0.0, abs=1e-6)


def test_rouge_by_hand() -> None:
    # lcs(a b c, a c d) = 2: P = R = 2/3, F = 2/3
    assert rouge_l(list("abc"), [list("acd")]) == pytest.approx(2 / 3)
    # precision and recall come from different references: P = 1 (ab), R = 1 (a): F = 1
    assert rouge_l(list("ab"), [list("abzzzz"), list("a")]) == pytest.approx(1.0)
    assert rouge_l([], [list("a")]) == 0.0


def test_longest_common_subsequence() -> None:
    assert longest_common_subsequence(list("abcbdab"), list("bdcaba")) == 4  # bcba
    assert longest_common_subsequence([], list("a")) == 0
