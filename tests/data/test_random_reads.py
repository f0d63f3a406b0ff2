import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import random_reads
from data.random_reads import MAX_GAP, RandomReads, Range, coalesce

SIZES = (0, 1, 700, 5000, 40_000)


def content(file: int) -> bytes:
    return bytes((i * 31 + i // 251 + file * 7) % 256 for i in range(SIZES[file]))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("files")
    for i in range(len(SIZES)):
        (folder / str(i)).write_bytes(content(i))
    return [folder / str(i) for i in range(len(SIZES))]


def slow_twin(files: list[Path], ranges: list[Range]) -> list[bytes]:
    return [files[file].read_bytes()[start:stop] for file, start, stop in ranges]


@st.composite
def some_ranges(draw: st.DrawFn) -> list[Range]:
    one = st.sampled_from(range(len(SIZES))).flatmap(
        lambda f: st.tuples(st.just(f), st.integers(0, SIZES[f]), st.integers(0, SIZES[f]))
    )
    return [(f, min(a, b), max(a, b)) for f, a, b in draw(st.lists(one, max_size=40))]


@pytest.mark.parametrize("without", ["nothing", "nowait", "local"])
def test_reads_what_a_plain_read_gives(files: list[Path], without: str):
    filesystem = None
    if without == "local":
        filesystem = fsspec.filesystem("memory")
        for i, file in enumerate(files):
            filesystem.pipe_file(f"/random-reads/{i}", file.read_bytes())

    @settings(deadline=None, max_examples=60)
    @given(some_ranges(), st.integers(1, 6))
    def check(ranges: list[Range], limit: int) -> None:
        paths = files if filesystem is None else [f"/random-reads/{i}" for i in range(len(files))]
        reads = RandomReads(paths, filesystem=filesystem, max_open_files=limit, num_threads=3)
        if without == "nowait":
            reads._nowait = None  # as on a file system that does not know the flag
        for _ in range(2):  # files closed, files open
            assert reads.read(ranges) == slow_twin(files, ranges)
            assert reads.num_open <= limit
        reads.close()
        assert reads.num_open == 0

    check()


@given(some_ranges(), st.integers(0, 3000), st.integers(1, 50_000))
def test_runs_cover_each_range_once_in_order_and_join_near_neighbours_only(
    ranges: list[Range], max_gap: int, max_run: int
):
    runs = coalesce(ranges, max_gap=max_gap, max_run=max_run)
    assert sorted(i for *_, wanted in runs for i in wanted) == list(range(len(ranges)))
    assert [run[:2] for run in runs] == sorted(run[:2] for run in runs)
    for file, first, end, wanted in runs:
        inside = [ranges[i] for i in wanted]
        assert {one for one, _, _ in inside} == {file}
        assert first == min(start for _, start, _ in inside) and end == max(stop for *_, stop in inside)
        assert end - first <= max(max_run, max(stop - start for _, start, stop in inside))
        covered = first
        for _, start, stop in sorted(inside):
            assert start - covered <= max_gap
            covered = max(covered, stop)
    assert coalesce(numpy.array(ranges, dtype=numpy.int64).reshape(-1, 3), max_gap=max_gap, max_run=max_run) == runs


def test_neighbours_are_one_read():
    # 0-10 and 10-20 touch; 20 + MAX_GAP is the last start that still joins; one further does not
    near, far = 20 + MAX_GAP, 20 + MAX_GAP + 1
    assert len(coalesce([(0, 10, 20), (0, 0, 10), (0, near, near + 5)])) == 1
    assert len(coalesce([(0, 10, 20), (0, 0, 10), (0, far, far + 5)])) == 2


@pytest.mark.parametrize("nowait", [True, False])
def test_a_file_that_ends_too_early_is_named(files: list[Path], nowait: bool):
    reads = RandomReads(files)
    reads.read([(3, 0, 10)])
    if not nowait:
        reads._nowait = None
    with pytest.raises(ValueError, match=f"{files[3]} ends inside the range of bytes 4990 to 5001"):
        reads.read([(3, 4990, 5001), (4, 0, 10)])
    with pytest.raises(FileNotFoundError):
        RandomReads([files[0].with_name("none")]).read([(0, 0, 1)])


def test_a_short_remote_file_is_named():
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/short", b"abc")
    assert RandomReads(["/short"], filesystem=memory).read([(0, 1, 3), (0, 2, 2)]) == [b"bc", b""]
    with pytest.raises(ValueError, match="/short ends inside the range of bytes 1 to 4"):
        RandomReads(["/short"], filesystem=memory).read([(0, 1, 4)])


def test_threads_share_few_descriptors(files: list[Path]):
    reads = RandomReads(files, max_open_files=2, num_threads=4)
    ranges = [(f, a, min(a + 50, SIZES[f])) for f in (1, 2, 3, 4) for a in range(0, SIZES[f], 400)]
    right, wrong, most = slow_twin(files, ranges), [], []

    def work(shift: int) -> None:
        for _ in range(30):
            mine = ranges[shift:] + ranges[:shift]
            if reads.read(mine) != right[shift:] + right[:shift]:
                wrong.append(shift)
            most.append(reads.num_open)

    before = num_descriptors()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and max(most) <= 2 and num_descriptors() - before <= 2
    reads.close()
    assert num_descriptors() <= before  # something else of the process may have closed one


def test_a_replaced_file_is_read_from_its_copy(files: list[Path], tmp_path: Path):
    copy = tmp_path / "copy"
    copy.write_bytes(b"x" * SIZES[2])
    used: list[int] = []
    reads = RandomReads(files, on_first_use=used.append)
    assert reads.read([(2, 0, 5), (3, 0, 5)]) == slow_twin(files, [(2, 0, 5), (3, 0, 5)])
    reads.replace(2, copy)
    assert reads.read([(2, 0, 5), (3, 0, 5)]) == [b"xxxxx", content(3)[:5]]
    assert sorted(used) == [2, 3]


def test_a_file_replaced_while_it_is_read_is_closed_by_its_last_reader(files: list[Path], tmp_path: Path):
    copy = tmp_path / "copy"
    copy.write_bytes(b"x" * SIZES[2])
    reads, before = RandomReads(files, max_open_files=1), num_descriptors()
    entry = reads._open.take(2, str(files[2]))
    reads.replace(2, copy)
    assert os.pread(entry.fd, 5, 0) == content(2)[:5] and num_descriptors() == before + 1
    reads._open.give_back(2, entry)
    assert num_descriptors() == before and reads.read([(2, 0, 3)]) == [b"xxx"]


def test_a_copy_that_is_removed_is_read_from_its_source(files: list[Path], tmp_path: Path):
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/source", content(3))
    for reads in (RandomReads(files, max_open_files=1), RandomReads(["/", "/", "/", "/source"], filesystem=memory)):
        reads.replace(3, tmp_path / "gone")
        assert reads.read([(3, 7, 900), (3, 3000, 3100)]) == [content(3)[7:900], content(3)[3000:3100]]


def test_a_child_of_fork_reads_too(files: list[Path]):
    reads = RandomReads(files, max_open_files=2, num_threads=2)
    ranges = [(f, 0, SIZES[f]) for f in (1, 2, 3, 4)]
    assert reads.read(ranges) == slow_twin(files, ranges)  # starts threads and opens files
    reads._lock.acquire()  # as if another thread held it at the fork
    assert in_child(lambda: reads.read(ranges) == slow_twin(files, ranges))
    reads._lock.release()
    assert reads.read(ranges) == slow_twin(files, ranges)


def in_child(check: Callable[[], bool]) -> bool:
    """Whether ``check`` holds in a child of fork."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if check() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(("fast_s", "inline"), [(0.0, False), (1e9, True)])
def test_files_are_opened_by_the_caller_only_where_opens_are_fast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast_s: float, inline: bool
):
    """Whoever opens them, the bytes are the same, and the bound on open files holds."""
    files = [tmp_path / f"{i}" for i in range(40)]
    for i, file in enumerate(files):
        file.write_bytes(bytes([i]) * 100)
    opened: list[bool] = []
    whole = os.open

    def watched(*given: Any) -> int:
        opened.append(threading.current_thread() is threading.main_thread())
        return whole(*given)

    reads = RandomReads(files, max_open_files=4)
    if reads._nowait is None:
        pytest.skip("every read goes to the threads here")
    monkeypatch.setattr(random_reads, "FAST_OPEN_S", fast_s)
    monkeypatch.setattr(os, "open", watched)
    assert reads.read([(i, 0, 5) for i in range(20)]) == [bytes([i]) * 5 for i in range(20)]
    assert reads.read([(i, 3, 9) for i in range(20, 40)]) == [bytes([i]) * 6 for i in range(20, 40)]
    assert opened == [inline] * 40 and reads.num_open == 4


def test_opens_that_become_slow_go_to_the_threads_and_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = [tmp_path / f"{i}" for i in range(200)]
    for file in files:
        file.write_bytes(b"x" * 10)
    reads = RandomReads(files, max_open_files=1)
    clock, took = [0.0], [0.0]

    def perf_counter() -> float:  # each open takes what is said
        clock[0] += took[0] / 2
        return clock[0]

    monkeypatch.setattr(random_reads.time, "perf_counter", perf_counter)
    assert not reads._open.opens_fast  # unknown
    for took[0], expected in ((1e-6, True), (1e-2, False), (1e-6, True)):
        reads.read([(i, 0, 1) for i in range(200)])
        assert reads._open.opens_fast == expected


def test_a_file_that_was_replaced_is_refused_when_it_is_opened_again(tmp_path: Path):
    """Not where it is still open, nor where somebody appends to it."""
    files = [tmp_path / name for name in "abc"]
    for file in files:
        file.write_bytes(b"old")
    reads = RandomReads(files, max_open_files=1, may_grow=[2])
    assert reads.read([(0, 0, 3), (1, 0, 3), (2, 0, 3)]) == [b"old"] * 3  # the last is open now
    (tmp_path / "new").write_bytes(b"new")
    os.utime(tmp_path / "new", (1, 1))
    os.replace(tmp_path / "new", files[0])
    with files[2].open("ab") as log:
        log.write(b"er")
    for _ in range(2):
        with pytest.raises(OSError, match=r"changed since it was opened first.*/a"):
            reads.read([(0, 0, 3)])
        assert reads.read([(1, 0, 3), (2, 0, 5)]) == [b"old", b"older"]


def test_advice_does_not_wait_for_slow_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = [tmp_path / f"{i}" for i in range(5)]
    for file in files:
        file.write_bytes(b"x" * 10)
    may_open, opened, whole = threading.Event(), threading.Semaphore(0), os.open

    def slow(*given: Any) -> int:
        may_open.wait(60)
        opened.release()
        return whole(*given)

    monkeypatch.setattr(os, "open", slow)
    reads = RandomReads(files, max_open_files=8)
    for i in range(5):
        reads.will_need(i, 0, 10)  # would hang here
    may_open.set()
    assert all(opened.acquire(timeout=60) for _ in files)
    assert reads.read([(i, 0, 2) for i in range(5)]) == [b"xx"] * 5 and reads.num_open == 5
    reads.close()
