"""The walk over a tar against `tarfile`, and on tars that are cut off, damaged or hostile."""

import hashlib
import io
import tarfile
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import tar_members
from data.tar_members import BLOCK, CUT_OFF, DEVICE, FILE, FOLDER, LINK, SPARSE, UNKNOWN, Member, TarWalk

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
KINDS = {
    tarfile.REGTYPE: FILE, tarfile.AREGTYPE: FILE, tarfile.CONTTYPE: FILE, tarfile.DIRTYPE: FOLDER,
    tarfile.SYMTYPE: LINK, tarfile.LNKTYPE: LINK, tarfile.CHRTYPE: DEVICE, tarfile.BLKTYPE: DEVICE,
    tarfile.FIFOTYPE: DEVICE, tarfile.GNUTYPE_SPARSE: SPARSE, b"Z": UNKNOWN,
}  # fmt: skip


def add(archive: tarfile.TarFile, name: str, data: bytes = b"x", **attributes: object) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for attribute, value in attributes.items():
        setattr(info, attribute, value)
    archive.addfile(info, io.BytesIO(data))


def tar_of(members: Sequence[tuple[str, bytes]], tar_format: int = tarfile.GNU_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tar_format) as archive:
        for name, data in members:
            add(archive, name, data)
    return buffer.getvalue()


def walk(data: bytes) -> tuple[list[Member], TarWalk]:
    walked = TarWalk(io.BytesIO(data))
    return list(walked), walked


def by_tarfile(data: bytes) -> list[tuple[str, int, int, str]]:
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        return [
            (m.name + "/" * m.isdir(), m.offset_data, m.size if m.isreg() or m.type == b"Z" else 0, KINDS[m.type])
            for m in archive
        ]


# No NUL, which ends a name in a header, and no lone surrogates; long ones need GNU's or PAX's extra headers.
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0/"), min_size=1, max_size=60)
PATHS = st.lists(NAMES, min_size=1, max_size=8).map("/".join)


@given(
    members=st.lists(st.tuples(PATHS, st.integers(0, 3000), st.sampled_from(sorted(KINDS))), max_size=8),
    tar_format=st.sampled_from(FORMATS[1:]),
    chunk=st.sampled_from([512, 700, 4096, 1 << 20]),
)
def test_finds_what_tarfile_finds(members: list[tuple[str, int, bytes]], tar_format: int, chunk: int):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tar_format) as archive:
        for name, size, kind in members:
            if kind != tarfile.GNUTYPE_SPARSE:  # tarfile writes none; see below
                data = bytes(size) if KINDS[kind] in (FILE, UNKNOWN) else b""
                add(archive, name, data, type=kind, linkname="target" * 30 if KINDS[kind] == LINK else "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tar_members, "CHUNK_BYTES", chunk)  # headers lie across the borders of chunks
        checksum = hashlib.sha256()
        walked = TarWalk(io.BytesIO(buffer.getvalue()), update=checksum.update)
        found = [(m.name, m.offset, m.size, m.kind) for m in walked]
    expected = by_tarfile(buffer.getvalue())
    # tarfile takes the slashes off a folder's name
    assert [(n.rstrip("/"), o, s, k) for n, o, s, k in found] == [(n.rstrip("/"), o, s, k) for n, o, s, k in expected]
    assert (walked.reason, walked.lost, walked.end, walked.size) == ("", False, len(buffer.getvalue()), walked.end)
    assert checksum.digest() == hashlib.sha256(buffer.getvalue()).digest()


def test_ustar_joins_the_prefix_and_reads_bytes_that_are_not_utf8():
    name = "d" * 90 + "/" + "n" * 60 + ".txt"
    data = tar_of([(name, b"1"), ("caf\udce9.txt", b"2")], tarfile.USTAR_FORMAT)
    assert [m.name for m in walk(data)[0]] == [name, "caf\udce9.txt"]


def test_a_global_header_holds_for_all_and_a_local_one_for_the_next():
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "c"}) as archive:
        add(archive, "é" * 80, b"1")  # needs a local header for its path
        add(archive, "plain", b"22")
    assert [(m.name, m.size) for m in walk(buffer.getvalue())[0]] == [("é" * 80, 1), ("plain", 2)]


def test_old_sparse_files_of_gnu_are_told_apart_with_their_continued_maps():
    sparse = bytearray(tarfile.TarInfo("hole.bin").tobuf(tarfile.GNU_FORMAT))
    sparse[156:157] = b"S"
    sparse[124:136] = b"%011o\0" % 700  # stored bytes
    sparse[482] = 1  # the map goes on
    sparse[148:156] = b" " * 8
    sparse[148:156] = b"%06o\0 " % sum(sparse)
    maps = bytearray(BLOCK), bytearray(BLOCK)
    maps[0][504] = 1
    data = bytes(sparse) + b"".join(map(bytes, maps)) + bytes(1024) + tar_of([("a.txt", b"after")])
    members, walked = walk(data)
    assert [(m.name, m.offset, m.kind) for m in members] == [("hole.bin", 1536, SPARSE), ("a.txt", 3072, FILE)]
    assert walked.reason == ""


def test_sparse_files_in_pax_headers_are_told_apart_by_their_real_name():
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        fields = {"GNU.sparse.major": "1", "GNU.sparse.name": "hole.bin", "GNU.sparse.realsize": "99"}
        add(archive, "GNUSparseFile.0/hole.bin", b"map", pax_headers=fields)
    assert [(m.name, m.kind) for m in walk(buffer.getvalue())[0]] == [("hole.bin", SPARSE)]


class _Holes(io.RawIOBase):
    """A file of which only some stretches are not zero: the size of a large tar without its bytes."""

    def __init__(self, parts: dict[int, bytes], size: int) -> None:
        self.parts, self.size, self.position = parts, size, 0
        self.zeros = bytes(tar_members.CHUNK_BYTES)

    def read(self, size: int = -1) -> bytes:
        start, stop = self.position, min(self.size, self.position + size)
        self.position = stop
        if not any(start < offset + len(part) and offset < stop for offset, part in self.parts.items()):
            return self.zeros[: stop - start]
        data = bytearray(stop - start)
        for offset, part in self.parts.items():
            if start < offset + len(part) and offset < stop:
                data[max(0, offset - start) : offset + len(part) - start] = part[max(0, start - offset) : stop - offset]
        return bytes(data)


def test_sizes_beyond_8_gib(monkeypatch: pytest.MonkeyPatch):
    """Octal sizes end at 8 GiB; GNU then writes base 256, PAX a record. Offsets behind are beyond 32 bits anyway."""
    monkeypatch.setattr(tar_members, "CHUNK_BYTES", 32 << 20)
    size = (8 << 30) + 5
    for tar_format in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        info = tarfile.TarInfo("big.bin")
        info.size = size
        head = info.tobuf(tar_format)
        after = len(head) + -(-size // BLOCK) * BLOCK
        tail = tar_of([("small.txt", b"s")])
        walked = TarWalk(_Holes({0: head, after: tail}, after + len(tail)))  # type: ignore[arg-type]
        assert [(m.name, m.offset, m.size) for m in walked] == [
            ("big.bin", len(head), size),
            ("small.txt", after + BLOCK, 1),
        ]
        assert walked.reason == ""


WHOLE = tar_of([("a.txt", b"a" * 600), ("b.txt", b"b"), ("c.txt", b"")])  # headers at 0, 1536, 2560; end mark at 3072


@pytest.mark.parametrize(
    ("length", "names", "end", "reason"),
    [
        (0, [], 0, "it ends without an end mark"),
        (1000, [("a.txt", CUT_OFF)], 0, "it ends inside a file"),
        (1111, [("a.txt", CUT_OFF)], 0, "it ends inside a file"),
        (1112, [("a.txt", FILE)], 1536, "it ends without an end mark"),  # only padding is missing
        (1536, [("a.txt", FILE)], 1536, "it ends without an end mark"),
        (1600, [("a.txt", FILE)], 1536, "it ends inside a header"),
        (2048, [("a.txt", FILE), ("b.txt", CUT_OFF)], 1536, "it ends inside a file"),
        (3072, [("a.txt", FILE), ("b.txt", FILE), ("c.txt", FILE)], 3072, "it ends without an end mark"),
        (3584, [("a.txt", FILE), ("b.txt", FILE), ("c.txt", FILE)], 3584, ""),
    ],
)
def test_a_tar_that_is_cut_off_says_where(length: int, names: list[tuple[str, str]], end: int, reason: str):
    members, walked = walk(WHOLE[:length])
    assert [(m.name, m.kind) for m in members] == names
    assert (walked.end, walked.reason, walked.lost, walked.size) == (end, reason, bool(reason), length)


def test_garbage_behind_good_members_is_said():
    members, walked = walk(WHOLE[:1536] + b"garbage" * 1000)
    assert [m.name for m in members] == ["a.txt"]
    assert (walked.end, walked.reason, walked.lost) == (1536, "what follows is not a tar header", True)


def test_what_follows_the_end_mark_is_said():
    members, walked = walk(WHOLE + WHOLE)  # cat a.tar b.tar
    assert [m.name for m in members] == ["a.txt", "b.txt", "c.txt"]
    assert (walked.end, walked.reason, walked.lost) == (3584, "something follows its end mark", False)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x1f\x8b" + bytes(2000), "compressed .gzip."),
        (b"\x1f\x8b", "compressed .gzip."),
        (b"\x28\xb5\x2f\xfd" + bytes(2000), "compressed .zstd."),
        (b"PK\x03\x04" + bytes(2000), "compressed .zip."),
        (b"no tar at all", "does not begin with a tar header"),
        (b"x" * 5000, "does not begin with a tar header"),
    ],
)
def test_what_is_no_tar_is_refused(data: bytes, why: str):
    with pytest.raises(ValueError, match=why):
        walk(data)


def header(size: bytes, kind: bytes) -> bytes:
    buffer = bytearray(tarfile.TarInfo("x").tobuf(tarfile.GNU_FORMAT))
    buffer[124:136], buffer[156:157], buffer[148:156] = size, kind, b" " * 8
    buffer[148:156] = b"%06o\0 " % sum(buffer)
    return bytes(buffer)


HUGE, NEGATIVE = b"\x80" + b"\xff" * 11, b"\xff" * 12
SIZES = [HUGE, NEGATIVE, b"77777777777\0", b"-0000000001\0", b"0o000000017\0", b"9" + bytes(11)]


@pytest.mark.parametrize("kind", [b"0", b"L", b"K", b"x", b"g", b"S", b"Z"])
@pytest.mark.parametrize(
    "size", [HUGE, NEGATIVE, b"77777777777\0", b"-0000000001\0", b"0o000000017\0", b"9\0" + bytes(10)]
)
def test_no_claimed_size_costs_memory_or_goes_backwards(kind: bytes, size: bytes):
    data = WHOLE[:1536] + header(size, kind) + bytes(100_000)
    tracemalloc.start()
    members, walked = walk(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [m.name for m in members if m.kind == FILE] == ["a.txt"]
    assert walked.reason and walked.lost and walked.size == len(data)
    assert peak < 4 * len(data)


@pytest.mark.parametrize("payload", [b"no record", b"9999 path=x\n", b"0 path=x\n", b"12 size=-100\n", b"9 pathx\n\n"])
def test_malformed_extended_headers_end_the_walk(payload: bytes):
    data = WHOLE[:1536] + header(b"%011o\0" % len(payload), b"x") + payload.ljust(BLOCK, b"\0") + WHOLE
    members, walked = walk(data)
    assert [m.name for m in members] == ["a.txt"]
    assert walked.reason == "an extended header is malformed, too long or cut off"


FUZZED = tar_of([("a.txt", b"a" * 600), ("é" * 90, b"b"), ("c" * 120, b"c" * 20), ("d.txt", b"")], tarfile.PAX_FORMAT)


@settings(max_examples=150)
@given(
    flips=st.lists(st.tuples(st.integers(0, len(FUZZED) - 1), st.integers(0, 255)), max_size=20),
    cut=st.integers(0, len(FUZZED)),
    repair=st.booleans(),
)
def test_damaged_tars_raise_nothing_but_value_error(flips: list[tuple[int, int]], cut: int, repair: bool):
    data = bytearray(FUZZED)
    for place, value in flips:
        data[place] = value
        start = place - place % BLOCK
        if repair:  # a hostile header has a right checksum
            data[start + 148 : start + 156] = b" " * 8
            data[start + 148 : start + 156] = b"%06o\0 " % sum(data[start : start + BLOCK])
    data = data[: len(data) - cut]
    walked = TarWalk(io.BytesIO(bytes(data)))
    try:
        members = list(walked)
    except ValueError as error:
        assert str(error).startswith("it ")
        return
    assert walked.size == len(data)
    for member in members:
        assert member.size == 0 or member.kind == CUT_OFF or member.offset + member.size <= len(data)
    assert [m.offset for m in members] == sorted(m.offset for m in members)
