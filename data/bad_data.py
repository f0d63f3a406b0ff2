"""Counting samples that cannot be used: by reason, by shard, and as a share of what was read.

A bad sample keeps its place with weight 0, so nothing fails when one comes by, and nobody would notice if all did.
So each reader counts, the counts are shown at the end of every epoch, and beyond a share that the user sets
training stops and names the shard with the most. The share is of the samples read so far, each counted once an
epoch however often it is read, and not judged before `JUDGED_FROM` of them (or all, of a smaller data set): one bad
sample among the first ten is no tenth of the data. A batch that takes its rest from the next epoch counts in both.
What was counted as good and turns out to be bad later, when another rank has looked at its picture, counts as bad from
then on.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy

JUDGED_FROM = 1000
EXAMPLES = 3
RECENT = 1 << 16  # bad samples of which is known what they were; more than a batch has
_UNREAD, _GOOD, _BAD = 0, 1, 2


class BadDataError(RuntimeError):
    """More samples are bad than the user allows."""


class BadData:
    """What was read of one sequence of samples in this epoch, and what was wrong with it. Safe between threads.

    Attributes:
        name: of the sequence, for messages, such as "questions/train".
        fate: what becomes of bad ones, for messages.
        num_read: samples read, each once.
        reasons: bad samples by reason.
        shards: bad samples by the tar they lie in.
        examples: of each reason, the keys of the first few.
    """

    def __init__(self, name: str, *, total: int, fate: str = "samples kept their place with weight 0") -> None:
        """``total``: number of samples in the sequence."""
        self.name, self.fate = name, fate
        self._total = total
        self._lock = threading.Lock()
        self._state, self._recent = numpy.zeros(0, dtype=numpy.uint8), dict[int, tuple[str, str, Path]]()
        self.start_epoch()

    def start_epoch(self, begun: Iterable[int] = ()) -> None:
        """Count from zero.

        Args:
            begun: positions that the last batch took of the new epoch, and that were read in the old one, too.
        """
        before, found = self._state, self._recent
        self.num_read = 0
        self.reasons: Counter[str] = Counter()
        self.shards: Counter[Path] = Counter()
        self.examples: dict[str, list[str]] = {}
        self._state = numpy.zeros(self._total, dtype=numpy.uint8)
        self._recent = {}
        for position in begun:
            if before[position] != _UNREAD:
                problem, key, shard = found.get(position, (None, "", Path()))
                self.record(position, problem, key=key, shard=shard)

    def state(self) -> dict[str, Any]:
        """The counts, as JSON, to go on with."""
        with self._lock:
            return {
                "num_read": self.num_read,
                "reasons": dict(self.reasons),
                "shards": {str(shard): count for shard, count in self.shards.items()},
                "examples": {reason: list(keys) for reason, keys in self.examples.items()},
            }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on counting from a `state`: what it counted is not read again in its epoch."""
        self.start_epoch()
        with self._lock:
            self.num_read = state["num_read"]
            self.reasons, self.examples = Counter(state["reasons"]), dict(state["examples"])
            self.shards = Counter({Path(shard): count for shard, count in state["shards"].items()})

    def record(self, position: int, problem: str | None, *, key: str, shard: Path) -> None:
        """Count the sample at ``position``, bad if it has a ``problem``, unless it was counted so in this epoch."""
        with self._lock:
            before = self._state[position]
            if before >= (_GOOD if problem is None else _BAD):
                return
            self._state[position] = _GOOD if problem is None else _BAD
            self.num_read += int(before == _UNREAD)
            if problem is not None:
                self.reasons[problem] += 1
                self.shards[shard] += 1
                self._recent[position] = problem, key, shard
                if len(self._recent) > RECENT:
                    del self._recent[next(iter(self._recent))]
                examples = self.examples.setdefault(problem, [])
                if len(examples) < EXAMPLES:
                    examples.append(key)

    @property
    def num_bad(self) -> int:
        return sum(self.reasons.values())

    @property
    def share(self) -> float:
        """Bad samples among those read, 0 to 1."""
        return self.num_bad / self.num_read if self.num_read else 0.0

    def report(self) -> list[str]:
        """A line for each reason, the most frequent first."""
        return [
            f"{self.name}: {count} of {self.num_read} {self.fate}: {reason} "
            f"({', '.join(self.examples[reason])}{', ...' if count > EXAMPLES else ''})"
            for reason, count in self.reasons.most_common()
        ]

    def complaint(self, max_share: float, *, whole: bool = False) -> str | None:
        """Why training must not go on with a largest share of ``max_share``, or None.

        Args:
            whole: judge even if few were read, because the epoch is over.
        """
        enough = whole or self.num_read >= min(self._total, JUDGED_FROM)
        if not enough or self.share <= max_share:
            return None
        shard, worst = self.shards.most_common(1)[0]
        reason, count = self.reasons.most_common(1)[0]
        return (
            f"{self.name}: {self.num_bad} of {self.num_read} samples read are bad ({self.share:.2%}), more than "
            f"data.max_bad_share {max_share} allows; the most, {worst}, are in {shard}, and the first reason is "
            f"{reason!r} ({count} x). Mend or remove the shard, or allow a larger share"
        )
