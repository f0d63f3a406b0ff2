"""Who died: after a step has failed, ranks look at each other's processes and say whom they miss.

A lost connection names a port, not a rank. Every rank therefore learns at the start on which host and under
which process id the others run. When a connection fails, it looks which processes of its own host are gone,
and leaves what it found in the store of the process group, where the others read it. That finds a killed
rank at once. A rank that hangs is found by the timeout of the process group: those that waited for it sign
within seconds of each other, it does not. The price: a store on a host that is gone answers nothing, and
the error says just that.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist


class LostRankError(RuntimeError):
    """Another rank died or is silent; the message names it."""


WAIT_S = 5.0  # for other hosts to say something
EXIT_S = 2.0  # a process closes its connections before it is seen to have ended


@dataclass(frozen=True)
class _Member:
    rank: int  # in its group
    group: str
    global_rank: int
    host: str
    pid: int

    @property
    def name(self) -> str:
        return (
            f"rank {self.rank} of the {self.group} (global rank {self.global_rank}, process {self.pid} on {self.host})"
        )

    def is_gone(self) -> bool:
        """Whether the process has ended; only asked on its own host."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        return state in "ZX"


class RollCall:
    """The members of a group; made by all of them together (a small collective).

    Args:
        what: what the group is, for messages.
    """

    def __init__(self, group: dist.ProcessGroup, *, what: str = "pipeline") -> None:
        self._group = group
        mine = _Member(dist.get_rank(group), what, dist.get_rank(), socket.gethostname(), os.getpid())
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, mine, group=group)
        self._members: list[_Member] = gathered
        self._mine = mine
        self._key = f"roll call {group.group_name}"

    @contextmanager
    def names_the_dead(self) -> Iterator[None]:
        """Turn the error of a lost peer into one that names it; any other error passes.

        Raises:
            LostRankError: naming who died, or who is silent.
        """
        try:
            yield
        except LostRankError:
            raise
        except Exception as error:
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            if not (isinstance(error, RuntimeError) and _is_of_transport(error)):
                self._sign([f"{self._mine.name} failed: {type(error).__name__}: {text}"])
                raise
            found = self._missing()
            if not found:
                raise
            raise LostRankError(f"{found}. What this rank saw: {text}") from error

    def _missing(self) -> str:
        """Who is gone, failed or silent, as far as this host and the others know; empty if nobody is missed."""
        here = [m for m in self._members if m.host == self._mine.host and m != self._mine]
        end = time.monotonic() + EXIT_S
        while not (gone := [m for m in here if m.is_gone()]) and time.monotonic() < end:
            time.sleep(0.02)
        said = [f"{m.name} died" for m in gone]
        self._sign(said)
        if said:
            return " and ".join(said)
        silent = []
        end = time.monotonic() + WAIT_S
        for member in self._members:
            statement = None if member == self._mine else self._statement(member, end - time.monotonic())
            if member != self._mine and statement is None:
                silent.append(member.name)
            said += [line for line in (statement or "").split("\n") if line]
        if said:
            return " and ".join(dict.fromkeys(said))
        return f"no sign of life within {WAIT_S:g} s from {' and '.join(silent)}" if silent else ""

    def _store(self) -> dist.Store:
        return dist.PrefixStore(self._key, dist.distributed_c10d._get_default_store())

    def _sign(self, said: list[str]) -> None:
        """Leave word for the others; an empty word means that this rank lives and misses nobody it can see."""
        with contextlib.suppress(RuntimeError):  # the store is gone as well
            self._store().set(str(self._mine.rank), "\n".join(said))

    def _statement(self, member: _Member, seconds: float) -> str | None:
        try:
            store = self._store()
            store.wait([str(member.rank)], timedelta(seconds=max(0.05, seconds)))
            return store.get(str(member.rank)).decode()
        except RuntimeError:
            return None


def _is_of_transport(error: RuntimeError) -> bool:
    """Whether an error comes from sending and receiving, not from a block."""
    text = str(error).lower()
    return any(word in text for word in ("gloo", "nccl", "connection", "timed out", "timeout"))
