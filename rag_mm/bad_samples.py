"""What a run does about samples that cannot be read: says them at the end of each epoch, and stops beyond a share.

The counting is `data.bad_data`'s, for each sequence of samples on each rank. Here it is put to use after every step:
the trainer asks whether this rank wants to stop, and if one does, all stop after the same step, with a checkpoint, so
that the run goes on once the data set is mended or ``data.max_bad_share`` is larger.

Documents have no epochs: what is bad of them is said at the end of each epoch of the questions, and counted on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from data.bad_data import BadData


class BadSamples:
    """The sequences of samples that a run reads.

    Args:
        max_share: largest share of each that may be bad.
        epochs: of each sequence, the epochs that are over.
        documents: of the memory that is read.
        say: shows a line to the user.
    """

    def __init__(
        self,
        sequences: Sequence[BadData],
        *,
        max_share: float,
        epochs: Sequence[int],
        documents: BadData,
        say: Callable[[str], None],
    ) -> None:
        self._sequences, self._max_share, self._epochs, self._say = sequences, max_share, list(epochs), say
        self._documents = documents

    def after_step(self, epochs: Sequence[int], begun: Callable[[int], Iterable[int]] = lambda i: ()) -> str | None:
        """Say what was bad in epochs that have ended; why this rank wants to stop, or None.

        Args:
            epochs: of each sequence, the epochs that are over now.
            begun: what was taken already of a sequence's next epoch.
        """
        complaint = self._documents.complaint(self._max_share)
        if epochs[0] > self._epochs[0]:
            for line in self._documents.report():
                self._say(f"epoch {epochs[0]}: {line}")
        for i, bad in enumerate(self._sequences):
            ended = epochs[i] > self._epochs[i]
            complaint = complaint or bad.complaint(self._max_share, whole=ended)
            if ended:
                for line in bad.report():
                    self._say(f"epoch {epochs[i]}: {line}")
                bad.start_epoch(begun(i))
                self._epochs[i] = epochs[i]
        return complaint
