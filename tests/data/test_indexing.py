"""The index command on folders as others leave them, and killed at any moment."""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import webdataset

from data import shards
from data.indexing import index_tar, main
from data.shard_index import ShardIndex
from data.shard_set import ShardSet

ROOT = Path(__file__).parents[2]
INDEX = [sys.executable, "-m", "data.shards", "index"]


def write_tar(path: Path, num_samples: int, *, first: int = 0) -> None:
    with tarfile.open(path, "w") as archive:
        for i in range(first, first + num_samples):
            for extension, data in (("jpg", b"j" * (i % 700)), ("txt", b"a caption"), ("json", b"{}")):
                info = tarfile.TarInfo(f"{i:09d}.{extension}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))


def index_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.index.safetensors"))


def test_a_folder_of_img2dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Shards of jpg, txt, json; beside each a parquet file and statistics, as img2dataset 1.45 writes them."""
    for shard in range(2):
        write_tar(tmp_path / f"{shard:05d}.tar", 5, first=shard * 10_000)
        table = pyarrow.table({"key": [f"{shard * 10_000 + i:09d}" for i in range(5)], "status": ["success"] * 5})
        pyarrow.parquet.write_table(table, tmp_path / f"{shard:05d}.parquet")
        (tmp_path / f"{shard:05d}_stats.json").write_text(json.dumps({"count": 5, "successes": 5}))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert main(["index", str(tmp_path), "--workers", "1"]) == 0
    assert capsys.readouterr().out == "2 tars indexed, 0 already were; 10 samples\n"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path not in index_files(tmp_path)} == before
    samples = ShardSet(tmp_path)
    theirs = webdataset.WebDataset([str(path) for path in shards.shard_paths(tmp_path)], shardshuffle=False)
    expected = [(s["__key__"], {e: s[e] for e in ("jpg", "txt", "json")}) for s in theirs]
    assert [(s.key, s.members) for s in samples.read(range(10))] == expected


def test_several_processes_write_what_one_writes_and_only_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for shard in range(3):
        (tmp_path / "sub").mkdir(exist_ok=True)
        write_tar(tmp_path / "sub" / f"{shard}.tar", 4)
    assert main(["index", str(tmp_path), "--workers", "2"]) == 0
    assert capsys.readouterr().out == "3 tars indexed, 0 already were; 12 samples\n"
    written = {path: path.read_bytes() for path in index_files(tmp_path)}
    for tar in (tmp_path / "sub").glob("*.tar"):
        assert shards.write_index(tar).to_bytes() == written[shards.index_path(tar)]
    changed, touched, broken = (tmp_path / "sub" / f"{i}.tar" for i in range(3))
    write_tar(changed, 5)
    os.utime(touched, (1, 1))
    shards.index_path(broken).write_bytes(b"torn")
    assert main(["index", str(tmp_path), "--workers", "1"]) == 0
    assert capsys.readouterr().out == "3 tars indexed, 0 already were; 13 samples\n"
    assert main(["index", str(tmp_path), "--workers", "1"]) == 0
    assert capsys.readouterr().out == "0 tars indexed, 3 already were; 13 samples\n"


def test_what_is_bad_is_said_and_the_others_are_indexed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_tar(tmp_path / "good.tar", 2)
    write_tar(tmp_path / "cut.tar", 3)
    with (tmp_path / "cut.tar").open("r+b") as file:
        file.truncate(3 * 1024 + 1536 + 100)
    with tarfile.open(tmp_path / "gz.tar", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"))
    for _ in range(2):  # the second time nothing is read again, and the same is said
        assert main(["index", str(tmp_path), "--workers", "1"]) == 2
        out, err = capsys.readouterr()
        assert (
            "cut.tar: 2 samples; it ends inside a header; 100 bytes are not read; "
            "bad samples: 1 x cut off at the end of the tar\n"
        ) in out
        assert "4 samples, 1 of them bad: 1 x cut off at the end of the tar\n" in out
        assert "gz.tar is not a readable uncompressed tar: it is compressed (gzip)" in err
        assert "1 of 3 tars could not be indexed; " in err and "mend them or move them out" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["nowhere"], "nowhere is not a folder that holds"), ([".", "--workers", "0"], "--workers is 0")],
)
def test_wrong_input_is_a_sentence(arguments: list[str], message: str, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tar(tmp_path / "a.tar", 1)
    assert main(["index", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_tar_that_is_written_to_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tar = tmp_path / "t.tar"
    write_tar(tar, 1)
    from data import shard_index

    walk = shard_index.TarWalk.__iter__

    def and_someone_writes(self: shard_index.TarWalk):
        yield from walk(self)
        with tar.open("ab") as file:
            file.write(b"more")

    monkeypatch.setattr(shard_index.TarWalk, "__iter__", and_someone_writes)
    assert "changed while it was indexed" in index_tar(tar).error


_KILLED = """
import os, signal, sys
from pathlib import Path
from data import shards
setattr(os, sys.argv[2], lambda *arguments: os.kill(os.getpid(), signal.SIGKILL))
shards.write_index(Path(sys.argv[1]))
"""


@pytest.mark.parametrize("moment", ["fsync", "replace"])
@pytest.mark.parametrize("had_index", [False, True])
def test_killed_while_writing_the_old_index_or_none_is_there(moment: str, had_index: bool, tmp_path: Path):
    tar = tmp_path / "t.tar"
    write_tar(tar, 3)
    old = shards.write_index(tar).to_bytes() if had_index else None
    write_tar(tar, 4)
    child = subprocess.run([sys.executable, "-c", _KILLED, str(tar), moment], cwd=ROOT, check=False)
    assert child.returncode == -signal.SIGKILL
    assert (shards.index_path(tar).read_bytes() if had_index else None) == old
    with pytest.raises(ValueError, match=r"index was made for|has no index"):
        shards.load_index(tar)
    (left,) = tmp_path.glob("*.tmp-*")
    assert len(shards.write_index(tar)) == 4
    assert left.exists()  # another process may be writing it
    os.utime(left, (1, 1))
    shards.write_index(tar)
    assert not left.exists()


def _start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*INDEX, str(folder), *arguments], cwd=ROOT, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def _wait_for_index(folder: Path, process: subprocess.Popen[str]) -> None:
    while not index_files(folder) and process.poll() is None:
        time.sleep(0.001)


@pytest.fixture
def many_tars(tmp_path: Path) -> Path:
    for shard in range(60):
        write_tar(tmp_path / f"{shard:05d}.tar", 40)
    return tmp_path


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_command_killed_in_the_middle_goes_on_where_it_was(workers: str, many_tars: Path):
    process = _start(many_tars, "--workers", workers)
    _wait_for_index(many_tars, process)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.communicate()
    done = index_files(many_tars)
    assert 0 < len(done) < 60
    for path in done:
        assert len(ShardIndex.from_bytes(path.read_bytes(), path)) == 40
    assert main(["index", str(many_tars), "--workers", "1"]) == 0
    assert len(ShardSet(many_tars)) == 60 * 40


def test_an_interrupted_command_ends_with_75_and_says_how_to_go_on(many_tars: Path):
    process = _start(many_tars, "--workers", "2")
    _wait_for_index(many_tars, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "the same command goes on" in err and "Traceback" not in err
    assert 0 < len(index_files(many_tars)) < 60


def test_a_worker_that_is_killed_ends_the_command_with_1_and_a_sentence(many_tars: Path):
    process = _start(many_tars, "--workers", "2")
    _wait_for_index(many_tars, process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    workers = [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(int(workers[0]), signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "a worker was killed" in err and "Traceback" not in err
