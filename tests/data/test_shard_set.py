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
    assert samples.fingerprint == shards.contents_fingerprint(shards.open_shards(folder))
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
