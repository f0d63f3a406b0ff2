import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import webdataset

from data import shards
from data.indexing import index_tar
from data.shard_set import ShardSet

ROOT = Path(__file__).parents[2]
SAMPLES = [(f"s{i:03d}", {"json": b'{"n": %d}' % i, "png": bytes([i]) * (i * 37 + 1)}) for i in range(20)]


def test_same_samples_same_bytes(tmp_path: Path):
    for name in ("a", "b"):
        shards.write_shards(tmp_path / name, iter(SAMPLES), samples_per_shard=8)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert [n for n in names if n.endswith(".tar")] == [f"shard-00000{i}.tar" for i in range(3)]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_every_sample_reads_back_by_one_read(tmp_path: Path):
    shards.write_shards(tmp_path, SAMPLES, samples_per_shard=8)
    samples = ShardSet(tmp_path)
    read = [samples.read([i])[0] for i in range(len(samples))]
    assert [(sample.key, sample.members) for sample in read] == SAMPLES
    assert samples.reads.num_reads == len(SAMPLES)


def test_webdataset_reads_what_we_write(tmp_path: Path):
    shards.write_shards(tmp_path, SAMPLES)
    read = webdataset.WebDataset(str(tmp_path / "shard-000000.tar"), shardshuffle=False)
    assert [(s["__key__"], s["png"]) for s in read] == [(key, members["png"]) for key, members in SAMPLES]


def add(archive: tarfile.TarFile, name: str, data: bytes = b"x", **attributes: object) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for attribute, value in attributes.items():
        setattr(info, attribute, value)
    archive.addfile(info, io.BytesIO(data))


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_foreign_tar_with_links_unsafe_paths_and_long_names(tmp_path: Path, tar_format: int):
    tar = tmp_path / "foreign.tar"
    long_name = "d" * 90 + "/" + "é" * 20 + ("n" * 60 if tar_format != tarfile.USTAR_FORMAT else "")
    with tarfile.open(tar, "w", format=tar_format) as archive:
        add(archive, "./00001.JPG", b"picture")
        add(archive, "./00001.txt", b"caption")
        add(archive, f"{long_name}.cls.txt", b"long")
        add(archive, "../evil.txt")
        add(archive, "/etc/evil.txt")
        add(archive, "README")
        add(archive, "link.txt", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        add(archive, "hard.txt", b"", type=tarfile.LNKTYPE, linkname="00001.txt")
    index = shards.write_index(tar)
    # What can be no sample is ignored; what cannot be read keeps its place.
    assert list(index.samples) == ["00001", long_name, "..%2Fevil", "%2Fetc%2Fevil", "link", "hard"]
    assert [index.problem(row) for row in range(6)] == [
        None, None, "unsafe path", "unsafe path", "link instead of a file", "link instead of a file",
    ]  # fmt: skip
    assert index.ignored == {"no extension": 1}
    first, second = ShardSet(tmp_path).read([0, 1])
    assert (first.key, first.members) == ("00001", {"jpg": b"picture", "txt": b"caption"})
    assert (second.key, second.members) == (long_name, {"cls.txt": b"long"})


def test_tar_that_no_longer_matches_its_index_is_refused(tmp_path: Path):
    shards.write_shards(tmp_path, SAMPLES)
    tar = tmp_path / "shard-000000.tar"
    os.utime(tar)  # copied, not changed: the checksum says so
    assert len(shards.load_index(tar).samples) == len(SAMPLES)
    with tar.open("r+b") as file:
        file.seek(512)
        file.write(b"!")
    with pytest.raises(ValueError, match=r"checksums differ.*python -m data\.shards index"):
        shards.load_index(tar)
    with tar.open("ab") as file:
        file.write(bytes(512))
    with pytest.raises(ValueError, match=r"bytes but its index was made for"):
        shards.load_index(tar)


def test_another_tar_of_the_same_size_is_noticed_though_all_times_are_kept(tmp_path: Path):
    """Tars are padded, so many have the same size; copies and archives keep times."""
    for name in "ab":
        shards.write_shards(tmp_path / name, [(key, {"txt": f"{name}{key}".encode()}) for key in "012"])
    ours, theirs = (tmp_path / name / "shard-000000.tar" for name in "ab")
    assert ours.stat().st_size == theirs.stat().st_size
    shutil.copy2(theirs, ours)
    assert not shards.is_current(ours)
    with pytest.raises(ValueError, match=r"checksums differ.*python -m data\.shards index"):
        ShardSet(tmp_path / "a")
    assert index_tar(ours).is_new and ShardSet(tmp_path / "a").read([1])[0].members == {"txt": b"b1"}


def test_of_a_longer_data_set_nothing_stays(tmp_path: Path):
    shards.write_shards(tmp_path, SAMPLES, samples_per_shard=2)
    (tmp_path / "others.tar").write_bytes((tmp_path / "shard-000000.tar").read_bytes())
    shards.write_shards(tmp_path, SAMPLES[:3], samples_per_shard=2)
    kept = [
        f"{name}{end}" for name in ("others", "shard-000000", "shard-000001") for end in (".index.safetensors", ".tar")
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept


_KILLED = """
import os, signal
from data import shards
from pathlib import Path
build = shards.build_index
def killed(tar):
    if tar.name == "shard-000001.tar":
        os.kill(os.getpid(), signal.SIGKILL)
    return build(tar)
shards.build_index = killed
shards.write_shards(Path(__import__("sys").argv[1]), [(f"{i}", {"txt": b"new"}) for i in range(6)], samples_per_shard=2)
"""


def test_killed_between_shards_and_indices_the_folder_is_refused(tmp_path: Path):
    shards.write_shards(tmp_path, [(f"{i}", {"txt": b"old"}) for i in range(6)], samples_per_shard=2)
    child = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], cwd=ROOT, check=False)
    assert child.returncode == -signal.SIGKILL and len(list(tmp_path.glob("*.tar"))) == 3
    with pytest.raises(ValueError, match=r"shard-000001\.tar has no index"):
        ShardSet(tmp_path)


def test_missing_and_broken_index(tmp_path: Path):
    shards.write_shards(tmp_path, SAMPLES)
    index = tmp_path / "shard-000000.index.safetensors"
    for broken in (b"", b'{"samples": []}', index.read_bytes()[:-1]):
        index.write_bytes(broken)
        with pytest.raises(ValueError, match=r"not a shard index.*python -m data\.shards index"):
            ShardSet(tmp_path)
    index.unlink()
    with pytest.raises(ValueError, match="has no index"):
        ShardSet(tmp_path)


def test_compressed_tar_is_refused(tmp_path: Path):
    tar = tmp_path / "t.tar"
    with tarfile.open(tar, "w:gz") as archive:
        add(archive, "a.txt")
    with pytest.raises(ValueError, match="not a readable uncompressed tar"):
        shards.build_index(tar)


def test_a_key_that_comes_twice_is_refused_when_writing(tmp_path: Path):
    with pytest.raises(ValueError, match="'a': duplicate key"):
        shards.write_shards(tmp_path, [("a", {"txt": b""}), ("a", {"txt": b""})])


@pytest.mark.parametrize("key", ["a.b", "../a", "/a", ""])
def test_unusable_keys_are_refused_when_writing(tmp_path: Path, key: str):
    with pytest.raises(ValueError, match="is not allowed"):
        shards.write_shards(tmp_path, [(key, {"txt": b""})])


def test_index_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with tarfile.open(tmp_path / "t.tar", "w") as archive:
        add(archive, "a.txt")
        add(archive, "README")
    assert shards.main(["index", str(tmp_path)]) == 0
    assert "1 samples; ignored: 1 x no extension" in capsys.readouterr().out
    assert shards.load_index(tmp_path / "t.tar").samples["a"]["txt"] == (512, 1)
    assert shards.main(["index", str(tmp_path / "none")]) == 2
