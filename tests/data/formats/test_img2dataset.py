"""img2dataset folders as crawls leave them: what is whole is converted, the rest counted by reason and named."""

from __future__ import annotations

import io
import json
import random
import tarfile
from collections import Counter
from pathlib import Path

import pytest

from data import prepare
from data.dataset import Dataset
from tests.data.formats import examples

BEHIND = "sample lost in a damaged tar"
CUT = "cut off at the end of the tar"


def write(
    folder: Path, number: int, samples: list[tuple[str, list[tuple[str, bytes]]]], *, parquet: bool = True
) -> Path:
    import pyarrow
    import pyarrow.parquet

    folder.mkdir(parents=True, exist_ok=True)
    tar = folder / f"{number:05d}.tar"
    with tarfile.open(tar, "w") as archive:
        for key, members in samples:
            for extension, data in members:
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    if parquet:
        table = pyarrow.table(
            {"key": [key for key, _ in samples] + ["x"], "status": ["success"] * len(samples) + ["failed"]}
        )
        pyarrow.parquet.write_table(table, tar.with_suffix(".parquet"))
    return tar


def sample(key: str, *changed: tuple[str, bytes]) -> tuple[str, list[tuple[str, bytes]]]:
    meta = json.dumps({"url": f"https://example.org/{key}", "caption": f"flag {key}"}).encode()
    members = {"jpg": examples.picture(int(key) % 7), "json": meta, "txt": f"flag {key}".encode(), **dict(changed)}
    return key, list(members.items())


def convert(folder: Path, out: Path, *options: str) -> int:
    argv = ["img2dataset", "--folder", str(folder), "--out", str(out), "--workers", "1", "--vocabulary", "0"]
    return prepare.main([*argv, *options])


def counts(out: Path) -> Counter[str]:
    return Counter({reason: entry["count"] for reason, entry in Dataset(out).info["left_out"].items()})


def whole_samples(tar: Path, size: int) -> list[str]:
    """The slow twin: samples of which a reader of the first ``size`` bytes knows that they are whole."""
    with tarfile.open(tar) as archive:
        members = [(member.name.partition(".")[0], member.offset) for member in archive]
        end = archive.offset  # where the end mark begins
    first = {key: offset for key, offset in reversed(members)}
    if size >= end + 512:
        return list(dict.fromkeys(key for key, _ in members))
    begun = [key for key in dict.fromkeys(key for key, _ in members) if first[key] + 512 <= size]
    return begun[:-1]


@pytest.mark.parametrize("parquet", [True, False])
def test_a_tar_that_is_cut_anywhere_gives_what_is_whole(tmp_path: Path, parquet: bool):
    keys = [f"{i:09d}" for i in range(5)]
    tar = write(tmp_path / "in", 0, [sample(key) for key in keys], parquet=parquet)
    write(tmp_path / "in", 1, [sample("000010000")])
    data, draw = tar.read_bytes(), random.Random(0)
    (tmp_path / "twin.tar").write_bytes(data)
    cuts = [0, 1, 511, 512, len(data), *(draw.randrange(len(data)) for _ in range(10))]
    for size in cuts:
        tar.write_bytes(data[:size])
        out = tmp_path / f"out{size}"
        expected = whole_samples(tmp_path / "twin.tar", size)
        assert convert(tmp_path / "in", out, "--max-bad-share", "1") == 0
        dataset = Dataset(out)
        assert list(dataset.store.ids) == [*expected, "000010000"]
        assert [pair.id for pair in dataset.pairs("train")] == [*expected, "000010000"]
        left_out = counts(out)
        if parquet:
            assert left_out[BEHIND] + left_out[CUT] == len(keys) - len(expected)
        else:
            assert (left_out[BEHIND] + left_out[CUT] == 1) == (len(expected) < len(keys))
        first = [entry["first"] for reason, entry in dataset.info["left_out"].items()]
        assert all(str(tar) in place for place in first)


def test_too_many_lost_stop_it_and_name_the_tar(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tar = write(tmp_path / "in", 0, [sample(f"{i:09d}") for i in range(5)])
    write(tmp_path / "in", 1, [sample(f"{i:09d}") for i in range(10, 20)])
    tar.write_bytes(tar.read_bytes()[:2500])
    assert convert(tmp_path / "in", tmp_path / "out", "--max-bad-share", "0.3") == 2
    said = capsys.readouterr().err
    assert "5 of 15 items cannot be used, more than --max-bad-share 0.3 allows" in said
    assert f"4 x {BEHIND}, first {tar}: it ends " in said and said.count("\n") == 1
    assert convert(tmp_path / "in", tmp_path / "out", "--max-bad-share", "0.4") == 0


HOSTILE = {
    "caption not UTF-8": (sample("000000001", ("txt", b"\xff")), "json or txt that cannot be read"),
    "json not UTF-8": (sample("000000001", ("json", b'{"a": "\xff"}')), "json or txt that cannot be read"),
    "json cut off": (sample("000000001", ("json", b'{"a"')), "json or txt that cannot be read"),
    "json too deep": (sample("000000001", ("json", b'{"a":' * 100_000)), "json or txt that cannot be read"),
    "no object": (sample("000000001", ("json", b"[1]")), "json or txt that cannot be read"),
    "broken jpeg": (sample("000000001", ("jpg", examples.picture(1)[:200])), "broken picture"),
    "no picture": (sample("000000001", ("jpg", b"<html>")), "not a picture"),
    "missing picture": (("000000001", sample("000000001")[1][1:]), "missing picture"),
    "key twice": (("000000000", sample("000000000")[1]), "duplicate key"),
    "unsafe name": (("../000000001", sample("000000001")[1]), "unsafe path"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_a_crawl_leaves_is_counted(tmp_path: Path, what: str):
    bad, reason = HOSTILE[what]
    write(tmp_path / "in", 0, [sample("000000000"), bad, sample("000000002")])
    if what == "key twice":  # three rows of the table, two of the tar
        (tmp_path / "in" / "00000.parquet").unlink()
    assert convert(tmp_path / "in", tmp_path / "out", "--max-bad-share", "1") == 0
    dataset = Dataset(tmp_path / "out")
    kept = ["000000002"] if what == "key twice" else ["000000000", "000000002"]
    assert list(dataset.store.ids) == kept and [pair.id for pair in dataset.pairs("train")] == kept
    assert counts(tmp_path / "out")[reason] == 1
    assert not [path for path in tmp_path.rglob("*") if "000000001" in path.name]


def test_sparse_and_linked_members_are_not_followed(tmp_path: Path):
    folder = tmp_path / "in"
    folder.mkdir()
    (tmp_path / "secret.jpg").write_bytes(examples.picture(3))
    with tarfile.open(folder / "00000.tar", "w") as archive:
        for kind, target in ((tarfile.SYMTYPE, "../../secret.jpg"), (tarfile.LNKTYPE, "/etc/passwd")):
            info = tarfile.TarInfo(f"{ord(kind):09d}.jpg")
            info.type, info.linkname = kind, target
            archive.addfile(info)
        key, members = sample("000000009")
        for extension, data in members:
            info = tarfile.TarInfo(f"{key}.{extension}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    assert convert(folder, tmp_path / "out", "--max-bad-share", "1") == 0
    assert list(Dataset(tmp_path / "out").store.ids) == ["000000009"]
    assert counts(tmp_path / "out")["link instead of a file"] == 2
