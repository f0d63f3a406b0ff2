"""Text as a bag of hashed character trigrams.

Names are what questions and titles share, and names of the world are open-ended: a vocabulary learned from
a few hundred of them overfits, while trigrams of an unseen name are mostly seen. Hashing needs no fitted
vocabulary, so the features are a pure function of the string; collisions (a few per cent at 4,096 buckets)
are the price.
"""

from __future__ import annotations

import functools
import math
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def trigrams(text: str) -> list[str]:
    """Trigrams of each word of ``text``, case and accents folded, word ends marked by a blank."""
    folded = "".join(c for c in unicodedata.normalize("NFKD", text.casefold()) if not unicodedata.combining(c))
    words = "".join(c if c.isalnum() else " " for c in folded).split()
    return [f" {word} "[i : i + 3] for word in words for i in range(len(word))]


@functools.lru_cache(maxsize=65536)
def _buckets(text: str, num_buckets: int) -> tuple[int, ...]:
    return tuple(zlib.crc32(t.encode()) % num_buckets for t in trigrams(text))


def hashed(texts: Sequence[str], *, num_buckets: int) -> tuple[Tensor, Tensor]:
    """Bucket numbers (N, L) int64 and their mask (N, L) bool; L is the longest text's, at least 1."""
    rows = [_buckets(text, num_buckets) for text in texts]
    width = max(1, max((len(r) for r in rows), default=1))
    ids_NL = torch.zeros(len(rows), width, dtype=torch.int64)
    mask_NL = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids_NL[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
        mask_NL[i, : len(row)] = True
    return ids_NL, mask_NL


def idf_weights(texts: Iterable[str], *, num_buckets: int) -> Tensor:
    """Weight of every bucket (num_buckets,) in (0, 1]: idf over ``texts``, 1 for a bucket in at most one text.

    ``log(N / n) / log(N)`` with n the number of texts that hold the bucket: what every question says
    ("what is the") weighs nothing, what only one says weighs 1.
    """
    count: Counter[int] = Counter()
    seen = 0
    for text in texts:
        count.update(set(_buckets(text, num_buckets)))
        seen += 1
    total = max(2, seen)
    weights = torch.ones(num_buckets)
    for bucket, n in count.items():
        weights[bucket] = math.log(total / n) / math.log(total)
    return weights.clamp(min=1e-3)
