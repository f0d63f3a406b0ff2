"""The values of a pure function, computed ahead in worker processes and given out in order.

``function(n)`` for n = start, start + 1, ...: since nothing but n decides a value, it makes no difference which
worker computes it, how many there are or how far ahead they are, and without workers it is computed when it is asked
for. torch's DataLoader does the work (processes, shared memory, pinning); here it is only asked for numbers.

Workers are started by a fork server, not forked from the training process, whose threads (gloo, OpenMP, tokenizers)
may hold locks at that moment. The price is an import of torch in each, some seconds once and 200 MB, so a function is
given as the means to *open* it: every worker opens files of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader

Value = TypeVar("Value")
Function = Callable[[int], Value]


class WorkerError(RuntimeError):
    """A value could not be computed, or the worker that computed it died; says which and why."""


@dataclass(frozen=True)
class _Failure:
    text: str


class _Function(Generic[Value]):
    """What a worker runs: opens the function once, and reports an error in its turn instead of at once."""

    def __init__(self, open_function: Callable[[], Function[Value]]) -> None:
        self.open_function = open_function
        self.function: Function[Value] | None = None

    def __getitem__(self, n: int) -> Value | _Failure:
        try:
            if self.function is None:
                self.function = self.open_function()
            return self.function(n)
        except Exception:
            return _Failure(traceback.format_exc())

    def __getstate__(self) -> dict[str, Any]:
        return {"open_function": self.open_function, "function": None}


def _as_it_is(value: Any) -> Any:
    return value


def _end_with_the_parent() -> None:
    """End this worker when the process that asked for it is gone, however that ended.

    The fork server lives as long as a worker does, so torch's own watch over the server sees nothing.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"
    parent.join()
    os._exit(1)


def _start_worker(worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the training process's to answer
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    torch.set_num_threads(1)


class Ahead(Generic[Value]):
    """Values in order, from ``start`` on.

    Args:
        open_function: makes the function; it is called once in each worker, or once here. With workers it has to be
            picklable (a function of a module, a `functools.partial` of one).
        start: first n.
        stop: n after the last one, or None for ever.
        num_workers: processes that compute; 0: this one, when a value is asked for.
        depth: values that a worker has under way or ready.

    Raises:
        WorkerError: from the iterator, in place of the value that could not be computed, with the traceback; or when
            a worker dies, at once.
    """

    def __init__(
        self,
        open_function: Callable[[], Function[Value]],
        *,
        start: int = 0,
        stop: int | None = None,
        num_workers: int = 0,
        depth: int = 2,
    ) -> None:
        if num_workers < 0 or depth < 1:
            raise ValueError(f"num_workers is {num_workers} and depth {depth}; they must be at least 0 and 1")
        self.num_workers, self.stop = num_workers, stop
        self.next = start
        self._function = _Function(open_function)
        self._values: Iterator[Any] | None = None
        self._depth = depth

    def __iter__(self) -> Iterator[Value]:
        return self

    def __next__(self) -> Value:
        if self.stop is not None and self.next >= self.stop:
            self.close()
            raise StopIteration
        n = self.next
        if self.num_workers == 0:
            value = self._function[n]
        else:
            if self._values is None:
                self._values = iter(self._loader())
            try:
                value = next(self._values)
            except (
                RuntimeError,
                OSError,
                EOFError,
            ) as error:  # torch's, or of a connection that ends: a worker is gone
                self.close()
                raise WorkerError(
                    f"a worker died while value {n} was awaited ({error}); was it ended, or short of memory?"
                ) from error
        if isinstance(value, _Failure):
            self.close()
            raise WorkerError(f"value {n} could not be computed:\n{value.text}")
        self.next = n + 1
        return value

    def _loader(self) -> DataLoader[Any]:
        return DataLoader(
            self._function,  # type: ignore[arg-type]  # it has no length and needs none
            batch_size=None,
            sampler=_Numbers(self.next, self.stop),
            num_workers=self.num_workers,
            collate_fn=_as_it_is,
            prefetch_factor=self._depth,
            pin_memory=torch.cuda.is_available(),
            multiprocessing_context="forkserver",
            worker_init_fn=_start_worker,
        )

    def close(self) -> None:
        """End the workers."""
        if self._values is not None:
            shut_down = getattr(self._values, "_shutdown_workers", None)
            self._values = None
            if shut_down is not None:
                shut_down()


class _Numbers:
    """start, start + 1, ... in the order the values are wanted."""

    def __init__(self, start: int, stop: int | None) -> None:
        self.start, self.stop = start, stop

    def __iter__(self) -> Iterator[int]:
        n = self.start
        while self.stop is None or n < self.stop:
            yield n
            n += 1
