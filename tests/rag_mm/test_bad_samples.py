"""Bad samples in a run: said at the end of an epoch, and too many of them stop it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from data import shards
from data.bad_data import BadData
from data.dataset import Dataset
from data.shard_set import ShardSet
from rag_mm import checkpoint
from rag_mm.bad_samples import BadSamples
from rag_mm.entry import main

ROOT = Path(__file__).parents[2]
A = Path("a.tar")


def counted(name: str, *, bad: int, total: int) -> BadData:
    counts = BadData(name, total=total)
    for i in range(total):
        counts.record(i, "not an image" if i < bad else None, key=f"s{i}", shard=A)
    return counts


def test_an_epoch_that_ends_is_said_and_counted_anew():
    said: list[str] = []
    questions, pairs = counted("questions/train", bad=1, total=10), counted("pairs/train", bad=0, total=10)
    documents = counted("documents", bad=1, total=10)
    bad_samples = BadSamples(
        [questions, pairs], max_share=0.1, epochs=[2, 0], documents=documents, say=said.append
    )  # fmt: skip
    assert bad_samples.after_step([2, 0]) is None and said == []
    assert bad_samples.after_step([3, 0]) is None
    assert said == [
        f"epoch 3: {name}: 1 of 10 samples kept their place with weight 0: not an image (s0)"
        for name in ("documents", "questions/train")
    ]
    assert (questions.num_read, pairs.num_read, documents.num_read) == (0, 10, 10)  # documents have no epochs
    assert bad_samples.after_step([3, 1]) is None and len(said) == 2 and pairs.num_read == 0


def test_a_share_beyond_what_is_allowed_is_a_complaint():
    good, bad = counted("a", bad=1, total=10), counted("b", bad=2, total=10)
    for sequence, documents in ((bad, good), (good, bad)):
        bad_samples = BadSamples([sequence], max_share=0.1, epochs=[0], documents=documents, say=print)
        assert "b: 2 of 10 samples read are bad" in (bad_samples.after_step([0]) or "")


def test_an_epoch_is_judged_however_few_of_its_samples_were_usable():
    counts = BadData("pairs/train", total=100)
    for i in range(5):
        counts.record(i, "not an image", key=f"s{i}", shard=A)
    good = counted("documents", bad=0, total=10)
    bad_samples = BadSamples([counts], max_share=0.1, epochs=[0], documents=good, say=lambda line: None)
    assert bad_samples.after_step([0]) is None
    assert bad_samples.after_step([1]) is not None


@pytest.fixture(scope="module")
def damaged(factbook_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A copy in which the picture of every 20th training question is broken, and how many those are."""
    folder = tmp_path_factory.mktemp("damaged") / "data"
    shutil.copytree(factbook_dir, folder)
    pictured = [sample.id for sample in Dataset(folder).questions("train") if sample.image is not None][::20]
    part = folder / "questions"
    samples = ShardSet(part).read(range(len(ShardSet(part))))
    for old in (*part.glob("*.tar"), *part.glob("*.index.*")):
        old.unlink()
    broken = {"png": b"broken"}
    shards.write_shards(part, ((s.key, s.members | (broken if s.key in pictured else {})) for s in samples))
    return folder, len(pictured)


def flags(data: Path, run_dir: Path, *others: str, steps: int = 7) -> list[str]:
    return [
        "--data.dir", str(data), "--run-dir", str(run_dir), "--reader.width", "16", "--reader.heads", "2",
        "--reader.ffn_width", "24", "--reader.encoder_layers", "1", "--train.retriever_share", "0",
        "--objectives.contrastive", "0", "--train.documents", "none", "--train.batch_size", "64",
        "--checkpoint.every_n_steps", "0", "--train.steps", str(steps), "--parallel.verify", "off", *others,
    ]  # fmt: skip


def test_too_many_stop_after_a_step_and_the_run_can_go_on(
    damaged: tuple[Path, int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    data, num_bad = damaged
    run_dir = tmp_path / "run"
    num = len(Dataset(data).questions("train"))
    last = num // 64 + 1  # the epoch ends in it
    assert num % 64, "and the next begins in it"
    one_rank = flags(data, run_dir, "--parallel.pipeline_stages", "1", steps=2 * last)
    assert main(one_rank) == 1
    said = f"training stops after step {last}, which is safe: questions/train: {num_bad} of {num} samples read are bad"
    assert said in capfd.readouterr().err
    assert checkpoint.list_steps(run_dir) == [last]
    assert main([*one_rank, "--data.max_bad_share", "0.5"]) == 0
    every = f"questions/train: {num_bad} of {num} samples kept their place with weight 0: not an image"
    assert f"epoch 2: {every}" in capfd.readouterr().err, "though it began before the run was gone on with"
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 2 * last + 1))
    assert (
        main([*flags(data, tmp_path / "other", "--parallel.pipeline_stages", "1"), "--data.max_bad_share", "0.5"]) == 0
    )
    assert f"epoch 1: {every}" in capfd.readouterr().err


@pytest.mark.slow
def test_too_many_stop_all_ranks_after_the_same_step(damaged: tuple[Path, int], tmp_path: Path):
    """Of which each rank has looked at a part."""
    data, num_bad = damaged
    command = [sys.executable, "-W", "ignore", str(ROOT / "train.py")]
    command += flags(data, tmp_path / "run", "--parallel.pipeline_stages", "2")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 1, done.stderr
    assert f"questions/train: {num_bad} of " in done.stderr and "not an image" in done.stderr
    assert f"the most, {num_bad}, are in {data / 'questions' / 'shard-000000.tar'}" in done.stderr
    assert "Traceback" not in done.stderr and checkpoint.list_steps(tmp_path / "run") != []
