"""Who died: after a step has failed, ranks look at each other's processes and say whom they miss.

A lost connection names a port, not a rank. Every rank therefore learns at the start on which host and under
which process id the others run. When a step fails, it looks which processes of its own host are gone, and
leaves what it found in the store of the process group, where ranks of other hosts read it. That finds a
killed rank at once; a rank that hangs is found by the timeout of the process group, and is then among the
silent ones. The price: a store on a host that is gone answers nothing, and the error says just that.
"""

from __future__ import annotations

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
        except RuntimeError as error:
            found = self._missing()
            if not found:
                raise
            raise LostRankError(f"{found}. What this rank saw: {str(error).splitlines()[0]}") from error

    def _missing(self) -> str:
        """Who is gone, as far as this host and the others know; empty if nobody is missed."""
        here = [m for m in self._members if m.host == self._mine.host and m != self._mine]
        elsewhere = sorted({m.host for m in self._members} - {self._mine.host})
        end = time.monotonic() + EXIT_S
        while not (gone := [m.name for m in here if m.is_gone()]) and time.monotonic() < end:
            time.sleep(0.02)
        silent: list[str] = []
        if elsewhere:
            said, silent = self._exchange(gone, elsewhere)
            gone += said
        if gone:
            return f"{' and '.join(dict.fromkeys(gone))} died"
        if silent:
            ranks = {host: [m.global_rank for m in self._members if m.host == host] for host in silent}
            names = ", ".join(f"{host} (global ranks {', '.join(map(str, ranks[host]))})" for host in silent)
            return f"no sign of life from {names} within {WAIT_S:g} s"
        return ""

    def _exchange(self, gone: list[str], hosts: list[str]) -> tuple[list[str], list[str]]:
        """What other hosts miss, and which hosts say nothing."""
        said: list[str] = []
        silent: list[str] = []
        try:
            store = dist.PrefixStore(self._key, dist.distributed_c10d._get_default_store())
            store.set(self._mine.host, "\n".join(gone))
            end = time.monotonic() + WAIT_S
            for host in hosts:
                left = max(0.1, end - time.monotonic())
                try:
                    store.wait([host], timedelta(seconds=left))
                    said += [line for line in store.get(host).decode().split("\n") if line]
                except RuntimeError:
                    silent.append(host)
        except RuntimeError:
            return said, hosts
        return said, silent
