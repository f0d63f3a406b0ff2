"""CIDEr-D, BLEU-4 and ROUGE-L of captions, on tokens, as COCO's evaluation computes them.

The tokeniser decides tenths of a point, so it belongs to a metric's name (`scoring.caption_tokens`); these functions
take tokens. They agree with `pycocoevalcap` on equal tokens to rounding; that package is a 100 MB download because of
the Java archives of metrics not offered here, and gives no per-image counts for resampling BLEU.

CIDEr-D (1411.5726): tf-idf vectors of n-grams, n from 1 to 4, candidate counts clipped to the reference's, cosine with
a Gaussian penalty on the difference in length (sigma 6), mean over references and n, times 10. Document frequencies
are those of the reference sets scored, one document an image, so the score of an image depends on which images are
scored along with it; intervals resample images with these frequencies fixed. COCO's "CIDEr 120" is 1.20 here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy

from rag_mm.evaluate.metric import Array

Tokens = Sequence[str]
NGram = tuple[str, ...]

MAX_N = 4
SIGMA = 6.0
BETA = 1.2  # of ROUGE-L: recall counts more
_TINY, _SMALL = 1e-15, 1e-9  # of BLEU: no division by zero, and 0 stays (nearly) 0

BLEU_COLUMNS = (
    *(f"correct_{n}" for n in range(1, MAX_N + 1)),
    *(f"guess_{n}" for n in range(1, MAX_N + 1)),
    "candidate_length",
    "reference_length",
)


def ngrams(tokens: Tokens, n: int) -> Counter[NGram]:
    """How often each run of n tokens occurs."""
    return Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


def cider_d(candidates: Sequence[Tokens], references: Sequence[Sequence[Tokens]]) -> list[float]:
    """CIDEr-D of every image.

    Args:
        candidates: one caption an image.
        references: the reference captions of each image, at least one each.
    """
    counted = [[[ngrams(r, n) for n in range(1, MAX_N + 1)] for r in image] for image in references]
    frequency: Counter[NGram] = Counter()
    for image in counted:
        frequency.update({gram for caption in image for counts in caption for gram in counts})
    log_images = math.log(len(references))

    def vector(counts: Counter[NGram]) -> dict[NGram, float]:
        return {gram: count * (log_images - math.log(max(1, frequency[gram]))) for gram, count in counts.items()}

    scores = []
    for candidate, image in zip(candidates, counted, strict=True):
        total = 0.0
        grams = [ngrams(candidate, n) for n in range(1, MAX_N + 1)]
        mine = [vector(counts) for counts in grams]
        for caption in image:
            delta = grams[0].total() - caption[0].total()
            penalty = math.exp(-(delta**2) / (2 * SIGMA**2))
            total += penalty * sum(_cosine(a, vector(counts)) for a, counts in zip(mine, caption, strict=True))
        scores.append(10 * total / MAX_N / len(image))
    return scores


def _cosine(candidate: dict[NGram, float], reference: dict[NGram, float]) -> float:
    """Cosine of two tf-idf vectors, the candidate's entries clipped to the reference's; 0 where a norm is 0."""
    norm = _norm(candidate) * _norm(reference)
    shared = candidate.keys() & reference.keys()
    return sum(min(candidate[g], reference[g]) * reference[g] for g in shared) / norm if norm else 0.0


def _norm(vector: dict[NGram, float]) -> float:
    return math.sqrt(sum(value * value for value in vector.values()))


def bleu_counts(candidate: Tokens, references: Sequence[Tokens]) -> dict[str, float]:
    """What BLEU sums over images (`BLEU_COLUMNS`): n-grams, those found in a reference (clipped), and lengths.

    The reference length is that of the closest reference, the shorter one of two as close.
    """
    counts: dict[str, float] = {}
    for n in range(1, MAX_N + 1):
        most: Counter[NGram] = Counter()
        for reference in references:
            most |= ngrams(reference, n)
        mine = ngrams(candidate, n)
        counts[f"correct_{n}"] = (mine & most).total()
        counts[f"guess_{n}"] = max(0, len(candidate) - n + 1)
    counts["candidate_length"] = len(candidate)
    counts["reference_length"] = min((abs(len(r) - len(candidate)), len(r)) for r in references)[1]
    return counts


def bleu_of_sums(sums_DS: Array) -> Array:
    """BLEU-4 of summed counts, columns in the order of `BLEU_COLUMNS`; shape (D,)."""
    correct, guess = sums_DS[:, :MAX_N], sums_DS[:, MAX_N : 2 * MAX_N]
    candidate, reference = sums_DS[:, 2 * MAX_N], sums_DS[:, 2 * MAX_N + 1]
    precision = ((correct + _TINY) / (guess + _SMALL)).prod(axis=1) ** (1 / MAX_N)
    length = (candidate + _TINY) / (reference + _SMALL)
    return precision * numpy.exp(numpy.minimum(0.0, 1 - 1 / length))


def rouge_l(candidate: Tokens, references: Sequence[Tokens]) -> float:
    """F-measure (beta 1.2) of the longest common subsequence; precision and recall each best over references."""
    mine = list(candidate) or [""]
    lengths = [(longest_common_subsequence(mine, list(r) or [""]), len(r) or 1) for r in references]
    precision = max(common / len(mine) for common, _ in lengths)
    recall = max(common / size for common, size in lengths)
    if not precision or not recall:
        return 0.0
    return (1 + BETA**2) * precision * recall / (recall + BETA**2 * precision)


def longest_common_subsequence(a: Tokens, b: Tokens) -> int:
    """Its length."""
    row = [0] * (len(b) + 1)
    for x in a:
        diagonal = 0
        for j, y in enumerate(b, start=1):
            above = row[j]
            row[j] = diagonal + 1 if x == y else max(above, row[j - 1])
            diagonal = above
    return row[len(b)]
