import hashlib
import os
import pickle
import threading
from pathlib import Path

import pytest

from data import shards
from data.shard_set import RawSample, ShardSet

SAMPLES = [(f"s{i:03d}", {"json": b'{"n": %d}' % i, "png": bytes([i]) * (i * 37 + 1)}) for i in range(20)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shards.write_shards(tmp_path, SAMPLES, samples_per_shard=8)
    return tmp_path


def test_positions_run_through_the_shards_in_sorted_order(folder: Path):
    samples = ShardSet(folder)
    assert (len(samples), samples.shard_sizes) == (20, [8, 8, 4])
    assert list(samples.keys()) == [samples.key(i) for i in range(20)] == [key for key, _ in SAMPLES]
    tars = sorted(folder.glob("*.tar"))
    checksums = b"".join(hashlib.sha256(tar.read_bytes()).digest() for tar in tars)
    assert samples.fingerprint == hashlib.sha256(checksums).hexdigest()
    order = [19, 0, 7, 8, 7, 15]
    expected = [RawSample(*SAMPLES[i], folder / f"shard-{i // 8:06d}.tar") for i in order]
    assert samples.read(order) == expected
    assert samples.read([]) == []
    for position in (20, -1):
        with pytest.raises(IndexError, match=f"position {position} does not exist; .* holds 20 samples"):
            samples.read([0, position])


def test_neighbours_are_one_read_and_few_files_stay_open(folder: Path):
    samples = ShardSet(folder, max_open_files=1)
    samples.read(range(20))
    assert (samples.reads.num_reads, samples.reads.num_open) == (3, 1)


def test_threads_and_children_of_fork_read_the_same(folder: Path):
    samples = ShardSet(folder, max_open_files=2)
    expected = samples.read(range(20))
    found: list[list[RawSample]] = []

    def read() -> None:
        for _ in range(20):
            found.append(samples.read(range(20)))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    child = os.fork()
    if child == 0:
        os._exit(0 if samples.read(range(20)) == expected else 1)
    assert os.waitpid(child, 0)[1] == 0
    for thread in threads:
        thread.join()
    assert len(found) == 80 and all(one == expected for one in found)
    assert pickle.loads(pickle.dumps(samples)).read([3]) == expected[3:4]  # to a worker that was spawned


@pytest.mark.parametrize(
    ("max_open_files", "lost", "problem"),
    [
        (3, range(11, 16), "the shard has become shorter"),
        (1, range(8, 16), "unreadable shard: changed since it was opened first"),
    ],
)
def test_a_shard_that_is_damaged_while_it_is_read_costs_its_own_samples_only(
    max_open_files: int, lost: range, problem: str, folder: Path
):
    """Those that it lost where it stayed open, all of them where it had to be opened again."""
    samples = ShardSet(folder, max_open_files=max_open_files)
    whole = samples.read(range(20))
    middle = folder / "shard-000001.tar"
    with middle.open("r+b") as file:
        file.truncate(samples.indices[1].offsets[samples.indices[1].member_ends[2]])  # within its fourth sample
    found = samples.read(range(20))
    assert [s.problem for s in found] == [problem if i in lost else None for i in range(20)]
    assert [s.key for s in found] == [s.key for s in whole]
    assert all(found[i] == whole[i] for i in range(20) if i not in lost)
    samples.close()
    middle.unlink()
    assert {s.problem for s in samples.read(range(8, 16))} == {"unreadable shard: No such file or directory"}
    with pytest.raises(ValueError, match="bytes but its index was made for"):
        middle.write_bytes(b"")
        ShardSet(folder)


def test_a_sample_that_is_too_large_is_not_read(folder: Path):
    samples = ShardSet(folder, max_sample_bytes=400)
    found = samples.read(range(20))
    assert [i for i, s in enumerate(found) if s.problem is None] == list(range(11))  # 9 + 37 * 10 + 1 bytes
    assert found[11].members == {} and found[11].problem == "more than 400 bytes"


def test_no_shards_is_said(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="holds no shards"):
        ShardSet(tmp_path)
