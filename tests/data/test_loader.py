"""The loader on real shards and real worker processes, against reading the tars with tarfile."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data._utils import pin_memory as torch_pinning

from data.ahead import Ahead
from data.cursor import Batches, Cursor, Tail
from data.loader import Batch, Loader, Part, WorkerError
from data.order import Order
from data.shard_set import RawSample, ShardSet
from data.shards import write_index
from tests import distributed
from tests.processes import children

assert distributed  # its fork server has torch already, which workers then need not import
ROOT = Path(__file__).parents[2]


def write_tars(folder: Path, sizes: Sequence[int]) -> Path:
    """One tar for each size, zero included; sample i holds its own number."""
    folder.mkdir()
    number = 0
    for shard, size in enumerate(sizes):
        tar = folder / f"shard-{shard:03d}.tar"
        with tarfile.open(tar, "w") as archive:
            for _ in range(size):
                path = folder / f"s{number:05d}.txt"
                path.write_text(str(number))
                archive.add(path, arcname=path.name)
                path.unlink()
                number += 1
        write_index(tar)
    return folder


def slow_keys(folder: Path) -> list[str]:
    """The slow twin: every sample, read front to back."""
    keys = []
    for tar in sorted(folder.glob("*.tar")):
        with tarfile.open(tar) as archive:
            keys += [name.partition(".")[0] for name in archive.getnames()]
    return keys


def number(sample: RawSample) -> int:
    return int(sample.members["txt"])


def order(num: int, *, seed: int = 0) -> Order:
    return Order(num, "f", seed, chunk=4, window=12)


def rows(batches: Sequence[Batch[int]]) -> list[tuple[int, list[str], list[int | None], list[float]]]:
    return [(b.n, b.keys, b.items, b.weights.tolist()) for b in batches]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of one sample, empty ones and larger ones: 29 samples in 7 tars."""
    return write_tars(tmp_path_factory.mktemp("shards") / "data", [1, 0, 9, 1, 0, 17, 1])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(),
    tail=st.sampled_from(["wrap", "pad", "drop"]),
    size=st.sampled_from([2, 4, 6, 12]),
    parts=st.sampled_from([1, 2]),
    start=st.integers(0, 20),
)
def test_any_ranks_see_together_what_the_order_says_from_any_cursor(
    folder: Path, seed: int, tail: Tail, size: int, parts: int, start: int
):
    batches, keys = Batches(order(29, seed=seed), size, tail), slow_keys(folder)
    loaders = [
        Loader(
            functools.partial(ShardSet, folder), batches, decode=number, cursor=batches.consumed(start),
            part=Part(i, parts), stop=start + 4,
        )
        for i in range(parts)
    ]  # fmt: skip
    count = 0
    for n, several in enumerate(zip(*loaders, strict=True), start=start):
        slots = batches.at(n)
        assert [key for b in several for key in b.keys] == [keys[i] for i in slots.positions]
        assert [item for b in several for item in b.items] == slots.positions.tolist()
        assert [w for b in several for w in b.weights] == slots.weights.tolist()
        assert all(b.n == n and b.after == batches.consumed(n + 1) for b in several)
        count += 1
    assert count == 4


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_change_nothing(folder: Path):
    """One worker, and more of them than there are shards with more than one sample."""
    batches = Batches(order(29), 6)
    inline = rows(list(Loader(functools.partial(ShardSet, folder), batches, decode=number, stop=15)))
    assert len(inline) == 15
    for workers in (1, 5):
        loader = Loader(
            functools.partial(ShardSet, folder), batches, decode=number, stop=15, num_workers=workers,
            cursor=batches.consumed(2),
        )  # fmt: skip
        assert rows(list(loader)) == inline[2:]


class Broken(ShardSet):
    """Positions that raise, that end the process, and that are bad samples."""

    def read(self, positions: Sequence[int]) -> list[RawSample]:
        if 7 in positions:
            raise OSError("no route to the file system")
        if 8 in positions:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(positions)


def meets_first(position: int, other: int) -> tuple[Batches, int]:
    """Batches that hold ``position`` before ``other``, and in which one it is."""
    for seed in range(100):
        batches = Batches(order(29, seed=seed), 2)
        first, later = (next(n for n in range(15) if p in batches.at(n).positions) for p in (position, other))
        if 2 < first < later:
            return batches, first
    raise AssertionError("no such seed")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_worker_that_raises_is_named_in_its_turn(folder: Path, workers: int):
    batches, bad = meets_first(7, 8)
    loader = iter(Loader(functools.partial(Broken, folder), batches, decode=number, num_workers=workers, depth=1))
    for n in range(bad):
        assert next(loader).n == n
    with pytest.raises(WorkerError, match=rf"(?s)value {bad} .*no route to the file system"):
        next(loader)


def test_a_worker_that_dies_is_named_at_once(folder: Path):
    batches, deadly = meets_first(8, 7)
    loader = iter(Loader(functools.partial(Broken, folder), batches, decode=number, num_workers=2, depth=1))
    said = r"a worker died while value \d+ was awaited \(.*(killed by signal|exited unexpectedly)"
    with pytest.raises(WorkerError, match=said):
        started = time.monotonic()
        for _ in range(deadly + 1):
            next(loader)
    assert time.monotonic() - started < 60  # nobody waits for it; the limit is for a crowded machine


def test_bad_samples_keep_their_slot_with_weight_0(folder: Path):
    def odd_only(sample: RawSample) -> int:
        if number(sample) % 2 == 0:
            raise ValueError("even")
        return number(sample)

    batches = Batches(order(29), 4, "pad")
    for batch in Loader(functools.partial(ShardSet, folder), batches, decode=odd_only, stop=8):
        slots = batches.at(batch.n)
        for row, position in enumerate(slots.positions.tolist()):
            good = position % 2 == 1
            assert batch.items[row] == (position if good else None)
            assert batch.weights[row] == (slots.weights[row] if good else 0)
            assert batch.problems.get(row) == (None if good else "even")


def test_tensors_of_items_are_pinned_when_torch_asks(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """As torch's loader does where there is a GPU; whether a tensor could be pinned is not asked here."""
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, *_: pinned.append(tensor) or tensor)
    loader = Loader(
        functools.partial(ShardSet, folder), Batches(order(29), 4),
        decode=lambda s: {"number": torch.tensor(number(s)), "key": s.key},
    )  # fmt: skip
    batch = next(iter(loader))
    again = torch_pinning.pin_memory(batch)
    assert [int(t) for t in pinned] == [item["number"] for item in batch.items]
    assert again.keys == batch.keys and again.after == batch.after and again.items == batch.items


def test_a_mistake_of_the_program_is_no_bad_sample(folder: Path):
    with pytest.raises(WorkerError, match="KeyError: 'jpg'"):
        next(
            iter(Loader(functools.partial(ShardSet, folder), Batches(order(29), 4), decode=lambda s: s.members["jpg"]))
        )


class Recorded:
    """What was announced and read, in order."""

    def __init__(self) -> None:
        self.log: list[tuple[str, list[int]]] = []

    def read(self, positions: Sequence[int]) -> list[RawSample]:
        self.log.append(("read", list(positions)))
        return [RawSample(str(i), {"txt": str(i).encode()}, Path("x.tar")) for i in positions]

    def will_need(self, positions: range) -> None:
        self.log.append(("will_need", list(positions)))


@pytest.mark.parametrize("start", [0, 3])
def test_every_window_is_announced_before_it_begins_and_not_long_before(start: int):
    source, batches = Recorded(), Batches(order(29), 4)
    list(Loader(lambda: source, batches, decode=number, cursor=batches.consumed(start), stop=start + 20))
    announced: dict[int, int] = {}
    for place, (what, positions) in enumerate(source.log):
        for i in positions:
            if what == "will_need":
                announced[i] = place
            else:
                assert i in announced and place - announced[i] < 3 * 12  # events: a window, its neighbours
                assert len(positions) == 4
    hints = [positions for what, positions in source.log if what == "will_need"]
    assert len(hints) <= 3 * (80 // 12 + 4)  # three runs a window, each announced once


def test_announced_bytes_are_in_memory_soon(folder: Path):
    """Not before: they were dropped from the page cache."""
    shards = ShardSet(folder)
    tar = shards.indices[5].tar
    fd = os.open(tar, os.O_RDONLY)
    try:
        os.sync()
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        shards.will_need(range(12, 25))
        deadline = time.monotonic() + 30
        index = shards.indices[5]
        start, size = index.members(0)["txt"]
        while True:
            try:
                assert os.preadv(fd, [bytearray(size)], start, os.RWF_NOWAIT) == size
                break
            except BlockingIOError:
                assert time.monotonic() < deadline
    finally:
        os.close(fd)


READER = """
import functools, json, sys
from data.cursor import Batches
from data.loader import Loader
from data.shard_set import ShardSet
from tests.data.test_loader import number, order

if __name__ == "__main__":
    folder, workers = sys.argv[1], int(sys.argv[2])
    for batch in Loader(functools.partial(ShardSet, folder), Batches(order(29), 6), decode=number,
                        num_workers=workers):
        print(json.dumps([batch.n, batch.items, batch.after.to_json()]), flush=True)
"""


def read_until_killed(script: Path, folder: Path, *, workers: int, lines: int) -> list[list[object]]:
    """Lines of a reading process, which is then ended with SIGKILL while it reads on."""
    process = subprocess.Popen(
        [sys.executable, str(script), str(folder), str(workers)], cwd=ROOT, text=True, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stdout is not None
    found = [json.loads(process.stdout.readline()) for _ in range(lines)]
    below = children(process.pid)
    assert len(below) >= workers
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 100
    while any(Path(f"/proc/{pid}").exists() for pid in below):  # workers do not outlive it
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def test_killed_in_the_middle_of_reading_and_resumed_with_other_workers(folder: Path, tmp_path: Path):
    script = tmp_path / "reader.py"
    script.write_text(READER)
    first = read_until_killed(script, folder, workers=2, lines=7)
    batches = Batches(order(29), 6)
    cursor = Cursor.from_json(first[-1][2])  # type: ignore[arg-type]
    assert cursor == batches.consumed(7)  # what was read ahead is not in it
    second = list(Loader(functools.partial(ShardSet, folder), batches, decode=number, cursor=cursor, stop=15))
    read = [line[:2] for line in first] + [[batch.n, batch.items] for batch in second]
    assert read == [[n, batches.at(n).positions.tolist()] for n in range(15)]
    cursor = second[-1].after
    halves = [
        Loader(functools.partial(ShardSet, folder), batches, decode=number, cursor=cursor, part=Part(i, 2), stop=16)
        for i in range(2)
    ]
    assert [item for half in halves for b in half for item in b.items] == batches.at(15).positions.tolist()


def test_wrong_settings_are_named(folder: Path):
    batches = Batches(order(29), 6)
    for wrong, said in (
        (lambda: Part(2, 2), "part 2 of 2"),
        (lambda: Loader(Recorded, batches, decode=number, part=Part(0, 4)), "multiple of the 4 parts"),
        (lambda: Loader(Recorded, batches, decode=number, num_workers=-1), "num_workers is -1"),
        (lambda: Loader(Recorded, batches, decode=number, cursor=Cursor("other", 1, 6)), "another stream"),
        (lambda: Loader(Recorded, batches, decode=lambda s: s, num_workers=1), "decode is .* functools.partial of one"),
        (lambda: Loader(lambda: Recorded(), batches, decode=number, num_workers=1), "open_source is .*lambda"),
        (lambda: Ahead(Recorded, depth=0), "depth 0"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=said):
            wrong()
