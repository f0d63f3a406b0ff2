"""Telling the file system what will be read next: the windows of an order, each before it begins.

A window is read in a shuffled order, but it consists of a few long runs. Announced one window ahead, the disk or the
parallel file system reads these runs front to back while the window before is consumed, and the shuffled reads find
their bytes in the page cache. Two windows of samples should therefore fit into memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from data.cursor import Batches


class Announcer:
    """Announces the windows of a stream as its batches are read, in any worker.

    Args:
        will_need: called with each run of positions that is about to be read.
        first: the batch that reading begins with.
    """

    def __init__(self, batches: Batches, will_need: Callable[[range], None], *, first: int) -> None:
        self.batches, self.will_need, self.first = batches, will_need, first

    def before(self, n: int) -> None:
        """Announce the next window if one begins in batch ``n``; at the start the present one, too."""
        stream, place = self.batches.source, self.batches.place(n)
        if n == self.first:
            self._announce(stream.runs(place))
        begins = place == 0 or stream.window_end(place - 1) <= place  # at its first place, or further on in it
        end = stream.window_end(place)
        while end < place + self.batches.batch_size:
            begins, end = True, stream.window_end(end)
        if begins or n == self.first:
            self._announce(stream.runs(end))

    def _announce(self, runs: Sequence[range]) -> None:
        for run in runs:
            self.will_need(run)
