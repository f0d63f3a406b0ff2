"""The build job: killed anywhere and started again, on several ranks, updated, estimated; the same index each time."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from rich.console import Console

from data.dataset import Dataset
from data.document_store import Document
from rag_mm.evaluate.fact_edit import copy_dataset
from retriever import index_build, versions
from retriever.build import fresh_encoder, main, update_index
from retriever.build_job import BuildJob
from retriever.config import IndexConfig, RetrieverConfig
from retriever.embedding_shards import EmbeddingShards
from retriever.encoder import DualEncoder
from retriever.estimate import estimate
from retriever.faiss_import import faiss
from retriever.index import load
from retriever.list_files import merge_parts, write_part
from retriever.manifest import read_manifest
from retriever.recall import Exact, merge_exact, search_hard_enough
from retriever.sizing import choose_factory, misfit, size_of

ROOT = Path(__file__).parents[2]
LISTS = "IVF4,Flat"
SMALL = RetrieverConfig(text_buckets=256, text_dim=32, image_dim=8, image_width=8, image_patch=8)
FLAGS = [f"--retriever.{name}={getattr(SMALL, name)}" for name in
         ("text_buckets", "text_dim", "image_dim", "image_width", "image_patch")]  # fmt: skip


def make(dataset: Dataset, folder: Path, *, factory: str = LISTS, shard_size: int = 7, **options: object) -> BuildJob:
    config = IndexConfig(
        dir=str(folder), factory=factory, shard_size=shard_size, batch_size=5, recall_queries=20, **options
    )  # type: ignore[arg-type]
    encoder = fresh_encoder(SMALL, dataset, image_size=24, seed=0)
    return BuildJob(encoder, dataset, config, image_size=24, console=Console(file=open(os.devnull, "w")))


def files(folder: Path, version: int = 0) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "versions" / str(version)).iterdir()}


# A process that sends itself SIGKILL before or after the n-th call of a function: a real death at a known place.
VICTIM = """
import os, signal, sys
import retriever.{module} as module
from retriever.build import main
owner = module
*path, name = {function!r}.split(".")
for part in path: owner = getattr(owner, part)
original, calls = getattr(owner, name), [0]
def dying(*arguments, **options):
    calls[0] += 1
    if calls[0] == {call} and not {after}: os.kill(os.getpid(), signal.SIGKILL)
    result = original(*arguments, **options)
    if calls[0] == {call} and {after}: os.kill(os.getpid(), signal.SIGKILL)
    return result
setattr(owner, name, dying)
raise SystemExit(main(sys.argv[1:]))
"""

STAGES = {  # module, function, call, after
    "embedding": ("build_job", "BuildJob.embed_shard", 3, False),
    "sealing": ("embedding_shards", "replace_text", 3, False),
    "training": ("index_build", "IndexBuild._train", 1, False),
    "trained": ("index_build", "IndexBuild._train", 1, True),
    "filling": ("index_build", "IndexBuild.fill_part", 3, False),
    "merging": ("index_build", "merge_parts", 1, True),
    "measuring": ("index_build", "search_hard_enough", 1, False),
    "naming": ("versions", "put_folder", 1, False),
    "pointing": ("versions", "put_folder", 1, True),
}


@pytest.fixture(scope="module")
def right(factbook_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "index"
    make(Dataset(factbook_dir), folder).run()
    return folder


def command(factbook_dir: Path, folder: Path) -> list[str]:
    return [
        "--data.dir", str(factbook_dir), "--index.dir", str(folder), "--index.factory", LISTS,
        "--index.shard_size", "7", "--index.batch_size", "5", "--index.recall_queries", "20", *FLAGS,
    ]  # fmt: skip


def run(program: list[str], arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *program, *arguments], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_killed_in_any_stage_it_goes_on_to_the_same_index(stage: str, factbook_dir: Path, right: Path, tmp_path: Path):
    module, function, call, after = STAGES[stage]
    program = VICTIM.format(module=module, function=function, call=call, after=after)
    killed = run(["-c", program], command(factbook_dir, tmp_path))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "CURRENT").exists()
    done = {path: path.stat().st_mtime_ns for path in tmp_path.glob(".build-*/shard-*.f16")}
    sealed = {path for path in done if path.with_suffix(".json").exists()}
    again = make(Dataset(factbook_dir), tmp_path)
    written: list[int] = []
    whole = again.embed_shard
    again.embed_shard = lambda shard, advance: (written.append(shard), whole(shard, advance))[1]  # type: ignore[method-assign,assignment,misc]
    version = again.run()
    assert files(tmp_path, version) == files(right)
    assert len(written) == again.shards.num_shards - (0 if stage == "pointing" and not done else len(sealed))
    assert not list(tmp_path.glob(".build-*")) and not list(tmp_path.glob("versions/.*"))


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_torchrun_makes_the_bytes_that_one_process_makes(
    num_ranks: int, factbook_dir: Path, right: Path, tmp_path: Path
):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), "-m", "--"]
    done = run([*launcher, "retriever.build"], command(factbook_dir, tmp_path))
    assert done.returncode == 0, done.stderr
    assert files(tmp_path) == files(right)


@pytest.mark.parametrize("factory", ["Flat", "HNSW8,Flat", LISTS, "IVF4,SQfp16"])
def test_what_is_built_finds_what_an_index_in_memory_finds(factory: str, factbook: Dataset, tmp_path: Path):
    job = make(factbook, tmp_path, factory=factory, recall=1.0)
    job.run()
    index = load(tmp_path)
    assert index.ids == list(factbook.store.ids) and index.manifest.factory == factory
    assert index.manifest.recall_at_10 >= (1.0 if factory == "Flat" else 0.95)
    vectors = numpy.concatenate([embed(job, list(index.ids)[i : i + 5]) for i in range(0, len(index), 5)])
    query = vectors[:20]
    right = numpy.argsort(-(query @ vectors.T), axis=1, kind="stable")[:, 0]
    _, scores = index.search(torch.from_numpy(query), k=1)
    best = (query @ vectors.T)[numpy.arange(20), right]
    numpy.testing.assert_allclose(scores[:, 0].numpy(), best, rtol=2e-3)  # half precision


def embed(job: BuildJob, ids: list[str]) -> numpy.ndarray:
    from retriever.embed import stored_features

    with torch.no_grad():
        return job.encoder(stored_features(job.encoder, job.store, ids, image_size=24)).numpy()


def test_a_shard_that_changed_is_found_and_made_anew(factbook: Dataset, tmp_path: Path):
    job = make(factbook, tmp_path)
    job.folder.mkdir(parents=True)
    for shard in range(job.shards.num_shards):
        job.embed_shard(shard)
    path = job.folder / "shard-000001.f16"
    text = bytearray(path.read_bytes())
    text[3] ^= 1
    path.write_bytes(text)
    with pytest.raises(ValueError, match=r"shard-000001\.f16 has changed since it was written"):
        job.run()
    assert not (tmp_path / "CURRENT").exists()
    job.run()
    assert load(tmp_path).manifest.count == len(factbook.store)


@pytest.mark.parametrize("name", ["trained.faiss", "part-000001.lists", "part-000002.lists"])
@pytest.mark.parametrize("place", [5, -3])
def test_a_flipped_byte_of_lists_or_centroids_is_made_anew(
    name: str, place: int, factbook: Dataset, right: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What flips before a job is started again is made anew; what flips while it runs is never used."""

    def flip() -> None:
        path = make(factbook, tmp_path).folder / name
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)

    merge, assemble = index_build.merge_parts, BuildJob.assemble
    with monkeypatch.context() as patched:
        patched.setattr(BuildJob, "assemble", lambda *_: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception):
            make(factbook, tmp_path).run()
    flip()
    if name == "trained.faiss":
        monkeypatch.setattr(BuildJob, "assemble", lambda *arguments: (flip(), assemble(*arguments)))
    else:
        monkeypatch.setattr(index_build, "merge_parts", lambda *arguments: (flip(), merge(*arguments)))
    with pytest.raises(ValueError, match=rf"{name} has changed since it was written; run the same command again"):
        make(factbook, tmp_path).run()
    assert not (tmp_path / "CURRENT").exists()
    monkeypatch.undo()
    make(factbook, tmp_path).run()
    assert files(tmp_path) == files(right)


def test_two_jobs_do_not_build_in_one_folder(factbook: Dataset, tmp_path: Path):
    with versions.only_writer(tmp_path), pytest.raises(ValueError, match=r"index\.dir is .*another job builds"):
        make(factbook, tmp_path).run()


@pytest.mark.parametrize("factory", [LISTS, "HNSW8,Flat"])
def test_documents_come_and_go_without_a_rebuild(factory: str, factbook_dir: Path, tmp_path: Path):
    copy_dataset(factbook_dir, tmp_path / "copy")
    dataset = Dataset(tmp_path / "copy")
    job = make(dataset, tmp_path / "index", factory=factory, max_overhead=0.05)
    job.run()
    before = (tmp_path / "index/versions/0/index.faiss").stat().st_ino
    image = dataset.store.fetch(["np"])[0].image
    dataset.store.add(Document("atlantis", "Atlantis", {"capital": "Poseidonia"}, image))
    dataset.store.delete("jp")
    job = make(dataset, tmp_path / "index", factory=factory, max_overhead=0.9)
    assert update_index(job, load(tmp_path / "index")) == 1
    assert (tmp_path / "index/versions/1/index.faiss").stat().st_ino == before  # the same file
    updated = load(tmp_path / "index")
    assert (updated.manifest.num_added, updated.manifest.num_dead, len(updated)) == (1, 1, len(dataset.store))
    assert sorted(updated.ids) == sorted(dataset.store.ids)
    query = torch.from_numpy(embed(job, ["atlantis", "br"]))
    found = updated.search(query, k=len(updated))[0]
    assert [row[0] for row in found] == ["atlantis", "br"] and all("jp" not in row for row in found)
    assert all(sorted(row) == sorted(dataset.store.ids) for row in found)
    dataset.store.delete("ke")
    job = make(dataset, tmp_path / "index", factory=factory, max_overhead=0.01)
    update_index(job, updated)
    compacted = load(tmp_path / "index")
    assert compacted.overhead == 0 and compacted.vectors.ntotal == len(dataset.store)
    assert sorted(compacted.ids) == sorted(dataset.store.ids)
    right = [[name for name in row if name != "ke"] for row in found]
    assert compacted.search(query, k=len(compacted))[0] == right
    assert update_index(job, compacted) == 2  # nothing to do


@pytest.mark.parametrize("factory", ["IVF16,Flat", "IVF16,SQfp16", "IVF64,PQ4x4", "PCA8,IVF16_HNSW8,PQ4x4"])
def test_parts_merge_into_the_file_that_faiss_writes(factory: str, tmp_path: Path):
    vectors = numpy.random.default_rng(0).standard_normal((600, 16), dtype=numpy.float32)
    trained = faiss.index_factory(16, factory, faiss.METRIC_INNER_PRODUCT)
    trained.train(vectors)
    whole = faiss.clone_index(trained)
    whole.add(vectors[:30] if factory == "IVF64,PQ4x4" else vectors)  # less than half of the lists in use
    faiss.write_index(whole, str(tmp_path / "right"))
    parts = []
    for first in range(0, whole.ntotal, 170):
        parts.append(tmp_path / f"part{first}")
        write_part(parts[-1], trained, vectors[first : min(first + 170, whole.ntotal)], first=first)
    assert merge_parts(tmp_path / "merged", trained, parts) == whole.ntotal
    assert (tmp_path / "merged").read_bytes() == (tmp_path / "right").read_bytes()


def test_the_estimate_is_about_right_and_writes_nothing(factbook: Dataset, tmp_path: Path):
    job = make(factbook, tmp_path / "index")
    said = estimate(job)
    assert not (tmp_path / "index").exists() and "nothing was written" in said.text(job)
    job.run()
    size = sum(map(len, files(tmp_path / "index").values()))
    assert said.index_bytes == pytest.approx(size, rel=0.5)
    assert 0 < said.embed_s < 120 and said.folder_bytes > 2 * job.manifest.count * job.manifest.dim


def test_sizes():
    assert [choose_factory(n, 768) for n in (999, 9_999, 1_000_000, 21_000_000)] == [
        "Flat", "HNSW32,Flat", "IVF4000,Flat", "OPQ192,IVF16384_HNSW32,PQ192",
    ]  # fmt: skip
    assert size_of("Flat", 21_000_000, 768).file_bytes == pytest.approx(64.5e9, rel=1e-3)  # DPR's Wikipedia
    assert size_of("IVF4000,Flat", 1_000_000, 128).file_bytes == pytest.approx(1e6 * (512 + 8) + 4000 * 512)


@pytest.mark.parametrize("wrong", ["IVF", "LSH", "IVF16,Flat;rm", "HNSW32", "auto,Flat"])
def test_a_factory_that_is_not_known_is_refused(wrong: str):
    with pytest.raises(ValueError, match=r"index\.factory is .*allowed are auto, Flat"):
        replace(IndexConfig(), factory=wrong)


@pytest.mark.parametrize("factory", ["IVF4096,Flat", "IVF4,PQ3", "IVF4,PQ4"])  # lists, width, entries of a code
@pytest.mark.parametrize("dry", [False, True])
def test_a_factory_that_does_not_fit_is_refused_before_anything_is_embedded(
    factory: str, dry: bool, factbook_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    monkeypatch.setattr(DualEncoder, "forward", lambda *inputs: pytest.fail("documents were embedded"))
    count = len(Dataset(factbook_dir).store)
    with pytest.raises(SystemExit) as ended:
        main([*command(factbook_dir, tmp_path / "index"), "--index.factory", factory, *["--dry_run=true"] * dry])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    assert f"index.factory is '{factory}', which does not fit {count} documents of width 40: " in said
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize(
    "factory",
    ["IVF64,Flat", "IVF65,Flat", "IVF4,PQ1", "IVF4,PQ4x4", "IVF4,PQ4x12", "IVF4,PQ3x4", "OPQ3,IVF4,Flat",
     "OPQ2,IVF4,PQ2x4", "OPQ4_12,IVF2,Flat", "OPQ4_10,IVF2,Flat", "PCA8,IVF4,Flat", "PCA8,IVF4,PQ3x4",
     "PCAR32,IVF4,SQ8", "PCA17,IVF4,Flat", "HNSW2,Flat", "HNSW4,SQfp16", "IVF4_HNSW2,Flat", "IVF4,PQ4x25",
     "HNSW99999999999,Flat"],
)  # fmt: skip
@pytest.mark.parametrize("count", [64, 300])
def test_what_is_said_not_to_fit_is_what_faiss_fails_at(factory: str, count: int):
    vectors = numpy.random.default_rng(0).standard_normal((count, 16), dtype=numpy.float32)
    sample = vectors[: size_of(factory, count, 16).train or count]
    try:
        index = faiss.index_factory(16, factory, faiss.METRIC_INNER_PRODUCT)
        index.train(sample)
        index.add(vectors)
        works = True
    except RuntimeError:
        works = False
    assert (misfit(factory, count, 16) == "") == works


@pytest.mark.parametrize(
    "factory", ["IVF0,Flat", "HNSW0,Flat", "HNSW1,Flat", "IVF4_HNSW1,Flat", "PCA0,IVF4,Flat", "IVF4,PQ4x0"]
)
def test_what_ends_the_process_in_faiss_does_not_reach_it(factory: str):
    assert misfit(factory, 300, 16) == "no number in it may be 0, and HNSW needs 2 links or more"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("stage", ["embedding", "training", "assembling", "publishing"])
def test_a_disk_that_fails_is_said_in_a_line_and_the_same_command_goes_on(
    number: int, stage: str, factbook_dir: Path, right: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    def broken(*arguments: object, **options: object) -> None:
        if stage == "assembling":
            raise RuntimeError(f"write error ({os.strerror(number)})")  # what faiss makes of it
        raise OSError(number, os.strerror(number))

    where = {
        "embedding": (EmbeddingShards, "write"),
        "training": (Path, "write_bytes"),
        "assembling": (index_build, "merge_parts"),
        "publishing": (versions, "sync"),
    }
    monkeypatch.setattr(*where[stage], broken)
    assert main(command(factbook_dir, tmp_path)) == 1
    said = capsys.readouterr().err.splitlines()
    assert f"the index at {tmp_path} could not be built: " in said[-1] and os.strerror(number) in said[-1]
    assert not any("Traceback" in line for line in said) and not (tmp_path / "CURRENT").exists()
    monkeypatch.undo()
    assert main(command(factbook_dir, tmp_path)) == 0
    assert files(tmp_path) == files(right)


def test_recall_is_of_queries_that_the_effort_was_not_chosen_on():
    rng = numpy.random.default_rng(1)
    vectors = rng.standard_normal((3000, 12), dtype=numpy.float32)
    query = rng.standard_normal((120, 12), dtype=numpy.float32)
    index = faiss.index_factory(12, "IVF40,Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.add(vectors)
    exact = merge_exact(query, [Exact.of(query, vectors[i : i + 700], first=i) for i in range(0, 3000, 700)])
    order = numpy.argsort(-(query @ vectors.T), axis=1)[:, :10]
    assert (numpy.sort(exact.rows) == numpy.sort(order)).all()
    effort, recall = search_hard_enough(index, exact, target=0.9)
    assert 1 < effort < 40
    index.nprobe = effort
    found = index.search(query[60:], 10)[1]
    right = numpy.mean([len(set(a) & set(b)) / 10 for a, b in zip(found.tolist(), order[60:].tolist(), strict=True)])
    assert recall == pytest.approx(right) and recall > 0.85


def test_embeddings_that_are_not_finite_are_named(tmp_path: Path):
    shards = EmbeddingShards(tmp_path, count=5, dim=2, shard_size=3)
    vectors = numpy.ones((2, 2), numpy.float32)
    vectors[1, 0] = 1e6
    with pytest.raises(ValueError, match="document 4 of the store"):
        shards.write(1, vectors, {})
    assert not shards.is_done(1)


def test_versions_that_checkpoints_name_are_kept(tmp_path: Path):
    (tmp_path / "checkpoints/step-5").mkdir(parents=True)
    (tmp_path / "checkpoints/step-5/state.json").write_text('{"index_version": 3}')
    (tmp_path / "checkpoints/step-6").mkdir()
    (tmp_path / "checkpoints/step-6/state.json").write_text("damaged")
    assert versions.named_by_checkpoints(tmp_path / "index") == {3}


def test_the_manifest_says_what_was_measured(right: Path):
    manifest = read_manifest(right / "versions/0/manifest.json")
    assert manifest.factory == LISTS and manifest.recall_queries == 10 and re.fullmatch("[0-9a-f]{64}", manifest.sha256)


BOUNDED = """
import sys, threading
from pathlib import Path
import numpy
from rich.console import Console
from retriever.config import IndexConfig
from retriever.index_build import IndexBuild
from retriever.manifest import Manifest

COUNT, DIM = 300_000, 32

class Numbers:
    def __len__(self): return COUNT
    def __iter__(self): return (f"document-{i}" for i in range(COUNT))

class Synthetic(IndexBuild):
    def embed_shard(self, shard, advance=lambda _: None):
        rows = self.shards.rows(shard)
        self.shards.write(shard, numpy.random.default_rng(shard).standard_normal((len(rows), DIM), numpy.float32), {})
    def queries(self): return numpy.random.default_rng(10**6).standard_normal((20, DIM), numpy.float32)
    def embedded(self): pass

def now():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

config = IndexConfig(dir=sys.argv[1], factory="IVF128,Flat", shard_size=10_000)
build = Synthetic(Manifest("e", "w", "s", 0, DIM, COUNT), Numbers(), config, console=Console(quiet=True))
before, peak, over = now(), [0], threading.Event()
def watch():
    while not over.wait(0.01):
        peak[0] = max(peak[0], now())
thread = threading.Thread(target=watch); thread.start()
build.run()
over.set(); thread.join()
print(peak[0] - before)
"""


@pytest.mark.slow
def test_memory_stays_below_the_index_that_is_built(tmp_path: Path):
    done = run(["-c", BOUNDED], [str(tmp_path)])
    assert done.returncode == 0, done.stderr
    index = (tmp_path / "versions/0/index.faiss").stat().st_size
    assert index > 300_000 * 32 * 4 and int(done.stdout) < index / 2
    manifest = read_manifest(tmp_path / "versions/0/manifest.json")
    assert manifest.count == 300_000 and manifest.recall_at_10 > 0.9
