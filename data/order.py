"""Which samples make up global batch n: a pure function, so that resume and any layout agree.

Nothing about order is stored in a checkpoint but n. Each epoch is a full shuffle whose key is a hash of
(data fingerprint, seed, epoch); epochs follow one another without a gap, and a batch that reaches the end of
one takes its rest from the next. Every sample is therefore seen exactly once in each epoch and no batch is
ever short; the price is that one batch can, at such a border, hold the same sample twice.
"""

from __future__ import annotations

import functools
import hashlib

import numpy


@functools.lru_cache(maxsize=2)
def epoch_order(num_samples: int, *, fingerprint: str, seed: int, epoch: int) -> numpy.ndarray:
    """The permutation (num_samples,) of one epoch, int64 and read-only."""
    key = hashlib.blake2b(f"{fingerprint}\n{seed}\n{epoch}".encode(), digest_size=16).digest()
    generator = numpy.random.Generator(numpy.random.Philox(key=int.from_bytes(key, "little")))
    order = generator.permutation(num_samples)
    order.setflags(write=False)
    return order


def global_batch(num_samples: int, *, fingerprint: str, seed: int, batch_size: int, n: int) -> numpy.ndarray:
    """Sample indices (batch_size,) of global batch ``n`` (from 0), the same in every process.

    Args:
        num_samples: size of the split, which is also the length of an epoch.
        fingerprint: of the data; other data, other order.
        seed: of the run.
        batch_size: samples in a global batch, over all replicas and micro-batches.
        n: which batch, counted from the start of training.
    """
    if num_samples < 1 or batch_size < 1 or n < 0:
        raise ValueError(
            f"num_samples {num_samples} and batch_size {batch_size} must be at least 1 and n {n} at least 0"
        )
    parts = []
    position, end = n * batch_size, (n + 1) * batch_size
    while position < end:
        epoch, offset = divmod(position, num_samples)
        order = epoch_order(num_samples, fingerprint=fingerprint, seed=seed, epoch=epoch)
        part = order[offset : offset + end - position]
        parts.append(part)
        position += len(part)
    return numpy.concatenate(parts)
