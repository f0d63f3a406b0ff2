import hashlib
import io
import os
import subprocess
import tarfile
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import shards
from data.shard_index import ShardIndex, build_index, key_hash, split_key
from data.shard_set import ShardSet


def add(archive: tarfile.TarFile, name: str, data: bytes = b"x", **attributes: object) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for attribute, value in attributes.items():
        setattr(info, attribute, value)
    archive.addfile(info, io.BytesIO(data))


def tar_with(path: Path, *names: str) -> Path:
    with tarfile.open(path, "w") as archive:
        for name in names:
            add(archive, name, name.encode(errors="surrogateescape"))
    return path


def rows(index: ShardIndex) -> dict[str, str | None]:
    return {key: index.problem(row) for row, key in enumerate(index.keys())}


@pytest.mark.parametrize(
    ("name", "key", "extension"),
    [  # as webdataset splits them (tariterators.base_plus_ext), but for the leading ./
        ("00000.jpg", "00000", "jpg"),
        ("./00000.JPG", "00000", "jpg"),
        ("a/b/00000.seg.png", "a/b/00000", "seg.png"),
        ("a.b/c.tar.gz", "a.b/c", "tar.gz"),
        ("train//x.txt", "train//x", "txt"),
        ("x y é.txt", "x y é", "txt"),
    ],
)
def test_keys_and_extensions(name: str, key: str, extension: str, tmp_path: Path):
    assert split_key(name) == (key, extension)
    index = build_index(tar_with(tmp_path / "t.tar", name))
    assert list(index.samples) == [key]
    assert {ext: size for ext, (_, size) in index.samples[key].items()} == {extension: len(name.encode())}


@pytest.mark.parametrize("name", ["README", "a/README", ".hidden", "a/.hidden.txt", "dot."])
def test_what_has_no_key_and_extension_is_ignored(name: str, tmp_path: Path):
    index = build_index(tar_with(tmp_path / "t.tar", name, "a.txt"))
    assert (list(index.samples), index.ignored) == (["a"], {"no extension": 1})


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a.txt", "a.txt", "b.txt"], {"a": "duplicate key", "b": None}),
        (["a.txt", "a.TXT"], {"a": "duplicate key"}),
        (["a.txt", "b.txt", "a.png", "c.txt"], {"a": "members are not adjacent", "b": None, "c": None}),
        (["a.txt", "b.txt", "a.txt", "b.txt"], {"a": "members are not adjacent", "b": "members are not adjacent"}),
        (["a.txt", "README", "a.png"], {"a": None}),
        (["../a.txt", "../a.png", "b.txt"], {"..%2Fa": "unsafe path", "b": None}),
        (["/a.txt"], {"%2Fa": "unsafe path"}),
        (["x/../../a.txt"], {"x%2F..%2F..%2Fa": "unsafe path"}),
        (["a\\b.txt"], {"a%5Cb": "unsafe path"}),
        (["a\nb.txt"], {"a%0Ab": "unsafe path"}),
        (["caf\udce9.txt", "b.txt"], {"caf%E9": "name is not UTF-8", "b": None}),
    ],
)
def test_a_bad_sample_keeps_its_row(names: list[str], expected: dict[str, str | None], tmp_path: Path):
    tar_with(tmp_path / "t.tar", *names)
    index = shards.write_index(tmp_path / "t.tar")
    assert rows(index) == expected
    for sample in ShardSet(tmp_path).read(range(len(index))):
        assert sample.problem == expected[sample.key] and bool(sample.members) == (sample.problem is None)
        sample.key.encode()  # wherever it is printed or hashed
        assert index.samples[sample.key].keys() == sample.members.keys()


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (tarfile.SYMTYPE, "link instead of a file"),
        (tarfile.LNKTYPE, "link instead of a file"),
        (tarfile.CHRTYPE, "device instead of a file"),
        (tarfile.FIFOTYPE, "device instead of a file"),
    ],
)
def test_a_member_that_is_no_file_spoils_its_sample_only(kind: bytes, problem: str, tmp_path: Path):
    (tmp_path / "secret").write_text("s")
    with tarfile.open(tmp_path / "t.tar", "w") as archive:
        add(archive, "a.json", b"{}")
        add(archive, "a.jpg", b"", type=kind, linkname=str(tmp_path / "secret"))
        add(archive, "b.json", b"{}")
        add(archive, "b.txt", b"")
    assert rows(shards.write_index(tmp_path / "t.tar")) == {"a": problem, "b": None}
    bad, good = ShardSet(tmp_path).read([0, 1])
    assert bad.members == {} and good.members == {"json": b"{}", "txt": b""}  # of length zero is a member, too


@pytest.mark.parametrize("tar_format", ["gnu", "posix"])
def test_sparse_files_and_hard_links_as_gnu_tar_writes_them(tar_format: str, tmp_path: Path):
    files = tmp_path / "files"
    files.mkdir()
    with (files / "hole.bin").open("wb") as file:
        file.seek(3_000_000)
        file.write(b"data")
        file.truncate(5_000_000)
    (files / "a.txt").write_text("a")
    os.link(files / "a.txt", files / "b.txt")
    (files / f"{'n' * 150}.txt").write_text("n")
    command = ["tar", f"--format={tar_format}", "--sparse", "--sort=name", "-C", str(files), "-cf"]
    subprocess.run([*command, str(tmp_path / "t.tar"), "."], check=True)
    assert rows(shards.write_index(tmp_path / "t.tar")) == {
        "a": None, "b": "link instead of a file", "hole": "sparse file", "n" * 150: None,
    }  # fmt: skip
    assert [s.members for s in ShardSet(tmp_path).read([0, 3])] == [{"txt": b"a"}, {"txt": b"n"}]


def test_a_truncated_tar_is_good_up_to_its_last_sample(tmp_path: Path):
    tar = tar_with(tmp_path / "t.tar", "a.txt", "a.png", "b.txt", "b.png", "c.txt")
    whole = tar.read_bytes()
    for length, expected in [
        (4 * 1024, {"a": None, "b": "cut off at the end of the tar"}),  # b is whole, c is gone, who knows
        (4 * 1024 - 700, {"a": None, "b": "cut off at the end of the tar"}),
        (4 * 1024 + 512, {"a": None, "b": None, "c": "cut off at the end of the tar"}),  # only c's header is there
        (5 * 1024 + 512, {"a": None, "b": None, "c": None}),
    ]:
        tar.write_bytes(whole[:length])
        index = shards.write_index(tar)
        assert rows(index) == expected
        assert index.unread_bytes == {3396: 324, 4608: 512}.get(length, 0)
        assert bool(index.unread_reason) == (length < 5 * 1024 + 512)
        assert [sample.problem for sample in ShardSet(tmp_path).read(range(len(index)))] == list(expected.values())
    with tar.open("r+b") as file:  # and damage after indexing is refused
        file.truncate(4096)
    with pytest.raises(ValueError, match=r"has 4096 bytes but its index was made for 5632"):
        ShardSet(tmp_path)


def test_garbage_behind_good_members_is_not_read_and_said(tmp_path: Path):
    tar = tar_with(tmp_path / "t.tar", "a.txt", "b.txt")
    tar.write_bytes(tar.read_bytes()[:2048] + b"\xff" * 3000)
    index = build_index(tar)
    assert rows(index) == {"a": None, "b": "cut off at the end of the tar"}
    assert (index.unread_bytes, index.unread_reason) == (3000, "what follows is not a tar header")


def test_an_empty_tar_and_an_empty_file_hold_no_samples(tmp_path: Path):
    tar_with(tmp_path / "a.tar")
    (tmp_path / "b.tar").write_bytes(b"")
    tar_with(tmp_path / "c.tar", "x.txt")
    for name in "abc":
        shards.write_index(tmp_path / f"{name}.tar")
    samples = ShardSet(tmp_path)
    assert (samples.shard_sizes, samples.key(0)) == ([0, 0, 1], "x")
    assert samples.indices[1].unread_reason == "it ends without an end mark"
    assert samples.read([0])[0].members == {"txt": b"x.txt"}


def test_the_file_gives_back_the_index_and_the_same_bytes(tmp_path: Path):
    names = ["../a.txt", "b.txt", "b.seg.png", "é.txt", "README", "b.cls"]
    index = build_index(tar_with(tmp_path / "t.tar", *names))
    data = index.to_bytes()
    again = ShardIndex.from_bytes(data, index.tar)
    assert again.to_bytes() == data
    for name, value in vars(index).items():
        if isinstance(value, numpy.ndarray):
            assert numpy.array_equal(getattr(again, name), value), name
    assert rows(again) == rows(index) and again.ignored == {"no extension": 1}
    assert again.key_hashes.tolist() == [key_hash(key) for key in again.samples]


def test_the_hash_of_a_key_is_the_same_everywhere():
    assert key_hash("np-capital") == int.from_bytes(hashlib.blake2b(b"np-capital", digest_size=8).digest(), "little")
    assert key_hash("np-capital") == 3516386064382651020


def test_an_index_takes_few_bytes(tmp_path: Path):
    """Of 9-digit keys and three members: 3 x (8 + 8 + 4) for those, 9 + 8 + 8 + 8 + 1 for the sample."""
    with tarfile.open(tmp_path / "t.tar", "w") as archive:
        for i in range(500):
            for extension in ("jpg", "json", "txt"):
                add(archive, f"{i:09d}.{extension}")
    index = build_index(tmp_path / "t.tar")
    assert index.num_bytes == 500 * 94
    assert len(index.to_bytes()) < 500 * 94 + 2000


@settings(max_examples=200)
@given(place=st.integers(0, 10_000), value=st.integers(0, 255), cut=st.integers(0, 30))
def test_a_damaged_index_is_refused_or_reads_inside_the_tar(
    place: int, value: int, cut: int, tmp_path_factory: pytest.TempPathFactory
):
    index = _INDEX.setdefault("index", _small_index(tmp_path_factory))
    data = bytearray(index.to_bytes())
    data[place % len(data)] = value
    try:
        read = ShardIndex.from_bytes(bytes(data[: len(data) - cut]), index.tar)
    except ValueError as error:
        assert "not a shard index of format 2" in str(error)
        return
    for row in range(len(read)):
        assert all(start >= 0 and start + size <= read.size for start, size in read.members(row).values())
        read.problem(row)


_INDEX: dict[str, ShardIndex] = {}


def _small_index(factory: pytest.TempPathFactory) -> ShardIndex:
    return build_index(tar_with(factory.mktemp("index") / "t.tar", "a.txt", "a.png", "../b.txt", "c.txt"))


NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30) | st.sampled_from(
    ["a.txt", "a.png", "b.txt", "../a.txt", "a/../b.txt", "/etc/passwd", "a.pkl", "./a.txt", "..", "a\0b.txt", ".x.y"]
)


@settings(max_examples=150)
@given(
    names=st.lists(st.tuples(NAMES, st.binary(max_size=700)), max_size=6),
    tar_format=st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    flips=st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=10),
    cut=st.integers(0, 12_000) | st.just(0),
)
def test_any_names_and_any_damage_index_and_read_without_surprise(
    names: list[tuple[str, bytes]],
    tar_format: int,
    flips: list[tuple[int, int]],
    cut: int,
    tmp_path_factory: pytest.TempPathFactory,
):
    folder = tmp_path_factory.mktemp("fuzz")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tar_format) as archive:
        for name, data in names:
            add(archive, name, data)
    damaged = bytearray(buffer.getvalue())
    for place, value in flips:
        damaged[place % len(damaged)] = value
    (folder / "inside").mkdir()
    tar = folder / "inside" / "t.tar"
    tar.write_bytes(damaged[: max(0, len(damaged) - cut)])
    try:
        shards.write_index(tar)
    except ValueError as error:
        assert str(tar) in str(error)
    else:
        samples = ShardSet(tar.parent)
        for sample in samples.read(range(len(samples))):
            sample.key.encode()
            assert (sample.problem is None) == bool(sample.members)
        samples.close()
    assert sorted(os.listdir(folder)) == ["inside"]
    assert set(os.listdir(folder / "inside")) <= {"t.tar", "t.index.safetensors"}


def test_good_samples_are_what_tarfile_reads(tmp_path: Path):
    """The slow twin: member by member, grouped by key."""
    rng = numpy.random.default_rng(0)
    with tarfile.open(tmp_path / "t.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        for i in range(60):
            for extension in ("jpg", "seg.png", "json")[: 1 + i % 3]:
                add(archive, f"{'long/' * (i % 40)}{i:03d}.{extension}", rng.bytes(int(rng.integers(0, 2000))))
    shards.write_index(tmp_path / "t.tar")
    expected: dict[str, dict[str, bytes]] = {}
    with tarfile.open(tmp_path / "t.tar") as archive:
        for member in archive:
            folder, _, base = member.name.rpartition("/")
            stem, _, extension = base.partition(".")
            file = archive.extractfile(member)
            assert file is not None
            expected.setdefault(f"{folder}/{stem}" if folder else stem, {})[extension] = file.read()
    samples = ShardSet(tmp_path)
    assert {s.key: s.members for s in samples.read(range(60))} == expected
