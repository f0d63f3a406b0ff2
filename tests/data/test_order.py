import hashlib
import time
import tracemalloc

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.order import Order, Sequential, epoch_order, permutation


def order(num_samples: int, *, seed: int = 0, chunk: int = 4, window: int = 16, fingerprint: str = "f") -> Order:
    return Order(num_samples, fingerprint, seed, chunk=chunk, window=window)


def slow_epoch(o: Order, epoch: int) -> numpy.ndarray:
    """The slow twin: lay out the whole epoch from the words of the module's docstring."""
    key = f"{o.fingerprint}\n{o.seed}\n{epoch}"
    if o.num_samples <= o.window:
        return permutation(o.num_samples, key)
    chunks = [list(range(o.num_samples))[i : i + o.chunk] for i in range(0, o.num_samples, o.chunk)]
    chunks = [chunks[i] for i in permutation(len(chunks), f"{key}\nchunks")]
    windows = -(-len(chunks) // (o.window // o.chunk))
    bounds = [w * len(chunks) // windows for w in range(windows + 1)]
    result: list[int] = []
    for w in range(windows):
        samples = [sample for chunk in chunks[bounds[w] : bounds[w + 1]] for sample in chunk]
        result += [samples[i] for i in permutation(len(samples), f"{key}\nwindow {w}")]
    return numpy.array(result)


ORDERS = st.builds(
    lambda num, chunk, per_window, seed: order(num, chunk=chunk, window=chunk * per_window, seed=seed),
    st.integers(1, 200), st.integers(1, 9), st.integers(1, 6), st.integers(),
)  # fmt: skip


@given(o=ORDERS, start=st.integers(0, 500), length=st.integers(0, 300))
def test_any_stretch_of_the_stream_is_that_of_the_epochs_laid_out_whole(o: Order, start: int, length: int):
    whole = numpy.concatenate([slow_epoch(o, epoch) for epoch in range((start + length) // o.num_samples + 1)])
    assert o.stream(start, start + length).tolist() == whole[start : start + length].tolist()


@given(o=ORDERS, epochs=st.integers(1, 3))
def test_every_sample_exactly_once_in_each_epoch(o: Order, epochs: int):
    for epoch in range(epochs):
        part = o.stream(epoch * o.num_samples, (epoch + 1) * o.num_samples)
        assert sorted(part.tolist()) == list(range(o.num_samples))


@given(o=ORDERS, place=st.integers(0, 600))
def test_runs_are_what_the_window_reads(o: Order, place: int):
    end = o.window_end(place)
    runs = o.runs(place)
    assert place < end and set(o.stream(place, end).tolist()) <= {i for run in runs for i in run}
    assert sum(map(len, runs)) <= o.window and len(runs) <= max(1, o.window // o.chunk)
    assert [run.start for run in runs] == sorted(run.start for run in runs)
    start = next(p for p in range(place, -1, -1) if p == 0 or o.window_end(p - 1) <= place)
    assert sorted(i for run in runs for i in run) == sorted(o.stream(start, end).tolist())


def test_key_is_fingerprint_seed_and_epoch():
    keys = [("a", 0, 0), ("b", 0, 0), ("a", 1, 0), ("a", 0, 1), ("a1", 0, 0)]
    for num in (16, 50):  # a whole permutation, and windows
        orders = {tuple(order(num, fingerprint=f, seed=s).stream(e * num, (e + 1) * num).tolist()) for f, s, e in keys}
        assert len(orders) == 5


def test_golden_orders():
    """If one of these changes, every checkpoint resumes on other data, and docs/results.md is of another order."""
    whole = Order(1000, "f", 7).stream(0, 2880).astype("<i8")  # not larger than a window: full permutations
    assert hashlib.sha256(whole.tobytes()).hexdigest()[:16] == "22ec9863c335fd3a"
    first = epoch_order(1000, fingerprint="f", seed=7, epoch=0)
    assert (whole[:1000] == first).all()
    windows = Order(100_000, "golden", 7).stream(300_000, 400_000).astype("<i8")
    assert hashlib.sha256(windows.tobytes()).hexdigest()[:16] == "39ae69be935c1ec8"


def test_a_caller_cannot_disturb_the_cached_permutation():
    o = order(10)
    before = o.stream(0, 10).copy()
    o.stream(0, 10)[:] = 0
    assert (o.stream(0, 10) == before).all()


def test_neighbours_mix_almost_as_in_a_full_permutation_with_few_files_at_a_time():
    """100,000 samples in shards of 1,000, chunks of 256, windows of 64 chunks: what docs/data.md says."""
    o, num = Order(100_000, "mix", 0), 100_000
    two_level, full = o.stream(0, num), epoch_order(num, fingerprint="mix", seed=0, epoch=0)

    def together(sequence: numpy.ndarray) -> float:
        """Share of successive samples that come from within one chunk's length of each other."""
        return float((numpy.abs(numpy.diff(sequence)) < 256).mean())

    def in_batches(sequence: numpy.ndarray) -> float:
        """Largest number of samples of one shard in a batch of 256; 2.56 are its share."""
        shards = sequence[: num // 256 * 256].reshape(-1, 256) // 1000
        return max(int(numpy.bincount(batch).max()) for batch in shards)

    assert (numpy.abs(numpy.diff(two_level)) == 1).mean() < 2 * 2 / 10_000  # neighbours that stay neighbours
    assert abs(numpy.corrcoef(two_level[:-1], two_level[1:])[0, 1]) < 0.05
    assert together(two_level) < 1.5 / 58 and together(full) < 0.01  # 391 chunks in 7 windows of 55 or 56
    assert in_batches(two_level) <= 40 and in_batches(full) <= 16

    # Windows: how many files a window opens, and how many stretches of file it reads, against a full permutation.
    place, most_files, opened, stretches = 0, 0, 0, 0
    while place < num:
        runs = o.runs(place)
        files = {i // 1000 for run in runs for i in (run.start, run.stop - 1)}
        stretches += sum(1 + (run.stop - 1) // 1000 - run.start // 1000 for run in runs)
        most_files, opened, place = max(most_files, len(files)), opened + len(files), o.window_end(place)
    assert most_files <= 2 * 64 and opened <= 7 * 100 and stretches <= 500  # a full permutation jumps 100,000 times


def test_a_place_in_a_billion_samples_is_found_at_once_in_little_memory():
    tracemalloc.start()
    started = time.process_time()
    found = Order(10**9, "f", 0).stream(7 * 10**9 + 123_456_789, 7 * 10**9 + 123_456_789 + 512)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(found.tolist())) == 512 and found.min() >= 0 and found.max() < 10**9
    assert peak < 10**8  # a whole permutation takes 8e9 bytes
    assert time.process_time() - started < 10


@pytest.mark.parametrize(
    ("num", "chunk", "window", "said"),
    [(0, 4, 16, "num_samples is 0"), (9, 0, 16, "chunk is 0"), (9, 4, 18, "window 18"), (9, 4, 0, "window 0")],
)
def test_wrong_numbers_are_named(num: int, chunk: int, window: int, said: str):
    with pytest.raises(ValueError, match=said):
        order(num, chunk=chunk, window=window)
    with pytest.raises(ValueError, match="start is 3 and stop 2"):
        order(9).stream(3, 2)


@given(num=st.integers(1, 50), window=st.integers(1, 20), start=st.integers(0, 120), length=st.integers(0, 60))
def test_without_a_shuffle_samples_come_in_order(num: int, window: int, start: int, length: int):
    o = Sequential(num, "f", window=window)
    assert o.stream(start, start + length).tolist() == [i % num for i in range(start, start + length)]
    end = o.window_end(start)
    (run,) = o.runs(start)
    assert set(o.stream(start, end).tolist()) <= set(run) and len(run) <= window and start < end
    assert o.runs(end) != o.runs(start) or len(run) == num
