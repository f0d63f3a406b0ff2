"""One pass over a tar: what lies where, and where it stops being a tar.

`tarfile` stops without a word where a header is damaged, so whoever indexes half a tar with it never learns of
that; it also needs a pass of its own beside the checksum's, and three times the processor time. So the headers are
read here, in one sequential pass that feeds a checksum too, and the walk ends with the reason why it ended. It
never goes backwards, allocates nothing of the size that a header claims beyond ``MAX_HEADER_BYTES``, and believes
no header that fails its checksum. The price is a parser of our own.

Formats: V7, USTAR, GNU (long names, base-256 sizes, sparse) and PAX (path, size, sparse), as POSIX.1-2024
(``pax``) and the manual of GNU tar ("Basic Tar Format") describe them; `tests/data/test_tar_members.py` holds the
walk against `tarfile`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

BLOCK = 512
CHUNK_BYTES = 4 << 20  # one read
MAX_HEADER_BYTES = 1 << 20  # of a long name or of extended headers; PATH_MAX is 4096

FILE, FOLDER, LINK, DEVICE, SPARSE = "file", "folder", "link", "device", "sparse file"
UNKNOWN, CUT_OFF = "member of an unknown type", "cut-off file"

_KINDS = {
    ord("0"): FILE, 0: FILE, ord("7"): FILE, ord("1"): LINK, ord("2"): LINK, ord("3"): DEVICE, ord("4"): DEVICE,
    ord("5"): FOLDER, ord("6"): DEVICE, ord("S"): SPARSE,
}  # fmt: skip
_EXTENDED = frozenset(b"LKxXg")  # headers that say more about the next member, or about all that follow
_WITHOUT_DATA = frozenset(b"123456")  # whatever size their header gives
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK": "zip"}
_ZEROS = bytes(BLOCK)


@dataclass(frozen=True, slots=True)
class Member:
    """One entry of a tar.

    Attributes:
        name: as stored; bytes that are not UTF-8 are escaped as surrogates.
        offset: of its first byte of data.
        size: bytes of data stored.
        kind: only a ``FILE`` has data that is what its name says; ``CUT_OFF`` is one that the tar ends in.
    """

    name: str
    offset: int
    size: int
    kind: str


class TarWalk:
    """Iterate once over the members of a tar, front to back.

    Attributes (after the iteration):
        size: bytes of the file.
        end: where its readable part ends.
        reason: why there is more, or less, than a readable part; empty when the tar is whole.
        lost: whether members may be missing that belonged to the last ones.
    """

    def __init__(self, file: BinaryIO, *, update: Callable[[bytes], object] | None = None) -> None:
        """Walk ``file`` from its beginning; ``update`` is given every byte of it in order."""
        self.size = 0
        self.end = 0
        self.reason = ""
        self.lost = False
        self._file = file
        self._update = update
        self._chunk = b""
        self._base = 0  # offset of the chunk in the file

    def __iter__(self) -> Iterator[Member]:
        """Yield the members; ValueError when ``file`` is not a tar from its first byte on."""
        position = 0
        pending: dict[str, str] = {}  # from headers about the next member
        lasting: dict[str, str] = {}  # and about all that follow
        while True:
            header = self._at(position, BLOCK)
            if header == _ZEROS:
                self._pass_end_mark(position + BLOCK)
                break
            if len(header) < BLOCK:
                if header and position == 0:
                    raise ValueError(_not_a_tar(header))
                self._stop("it ends inside a header" if header else "it ends without an end mark")
                break
            size = checked_size(header)
            if size is None:
                if position == 0:
                    raise ValueError(_not_a_tar(header))
                self._stop("what follows is not a tar header")
                break
            data, flag = position + BLOCK, header[156]
            if flag in _EXTENDED:
                payload = self._at(data, size) if size <= MAX_HEADER_BYTES else b""
                try:
                    if len(payload) < size:
                        raise ValueError
                    _take_in(flag, payload, pending, lasting)
                except ValueError:
                    self._stop("an extended header is malformed, too long or cut off")
                    break
                position = data + _padded(size)
                continue
            name, kind = _name(header), _KINDS.get(flag, UNKNOWN)
            if flag == ord("S"):
                data = self._after_sparse_map(data, more=header[482])
            if pending or lasting:
                known = lasting | pending
                name, size = known.get("path", name), int(known.get("size", size))
                if any(key.startswith("GNU.sparse.") for key in known):
                    name, kind = known.get("GNU.sparse.name", name), SPARSE
                pending = {}
            if flag in _WITHOUT_DATA:
                size = 0
            elif kind == FILE and name.endswith("/"):
                kind = FOLDER  # V7 has no type for it
            if size and not self._at(data + size - 1, 1):
                self._stop("it ends inside a file")
                yield Member(name, data, size, CUT_OFF)
                break
            self.end = position = data + _padded(size)
            yield Member(name, data, size, kind)
        while self._next_chunk():
            pass
        self.size = self._base

    def _at(self, offset: int, size: int) -> bytes:
        """Bytes ``offset`` to ``offset + size`` of the file, fewer at its end; never before the last offset."""
        begin = offset - self._base
        while begin >= len(self._chunk):
            if not self._next_chunk():
                return b""
            begin = offset - self._base
        data = self._chunk[begin : begin + size]
        while len(data) < size and self._next_chunk():
            data += self._chunk[: size - len(data)]
        return data

    def _next_chunk(self) -> bool:
        self._base += len(self._chunk)
        self._chunk = self._file.read(CHUNK_BYTES)
        if self._update is not None:
            self._update(self._chunk)
        return bool(self._chunk)

    def _pass_end_mark(self, position: int) -> None:
        """Whatever follows the end mark but the zeros that fill up a record is not read."""
        self.end = position
        rest = self._chunk[max(0, position - self._base) :]
        while rest.count(0) == len(rest):
            if not self._next_chunk():
                self.end = self._base
                return
            rest = self._chunk
        self.reason = "something follows its end mark"

    def _stop(self, reason: str) -> None:
        self.reason, self.lost = reason, True

    def _after_sparse_map(self, data: int, *, more: int) -> int:
        while more:
            block = self._at(data, BLOCK)
            more = block[504] if len(block) == BLOCK else 0
            data += BLOCK
        return data


def checked_size(header: bytes) -> int | None:
    """The size that a header gives (bytes), or None if its checksum or a number is wrong."""
    stated, size = _number(header[148:156]), _number(header[124:136])
    if stated is None or size is None:
        return None
    rest = header[:148] + header[156:]
    unsigned = 256 + sum(rest)  # the field itself counts as eight blanks
    if stated == unsigned or stated == unsigned - 256 * sum(byte > 127 for byte in rest):  # some summed signed bytes
        return size
    return None


def _number(field: bytes) -> int | None:
    """An octal number or, where the first bit is set, a base-256 one; None if it is neither or negative."""
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big") if field[0] == 0x80 else None
    digits = field.partition(b"\0")[0].strip()
    if not digits:
        return 0
    try:
        return int(digits, 8) if digits.isdigit() else None
    except ValueError:  # 8 or 9
        return None


def _name(header: bytes) -> str:
    name = _text(header[:100])
    if header[345] and header[257:263] == b"ustar\0":  # GNU keeps times there
        return f"{_text(header[345:500])}/{name}"
    return name


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _take_in(flag: int, payload: bytes, pending: dict[str, str], lasting: dict[str, str]) -> None:
    """Add what an extended header says; ValueError if it is malformed."""
    if flag == ord("L"):
        pending["path"] = _text(payload)
    elif flag != ord("K"):  # the target of a link is not followed
        (lasting if flag == ord("g") else pending).update(_pax_records(payload))


def _pax_records(payload: bytes) -> dict[str, str]:
    """``length key=value\\n`` again and again; the length counts the whole record."""
    records: dict[str, str] = {}
    while payload.strip(b"\0"):
        digits, blank, _ = payload[:20].partition(b" ")
        if not blank or not digits.isdigit():
            raise ValueError("no length")
        record = payload[len(digits) + 1 : int(digits)]
        key, equals, value = record.partition(b"=")
        if not equals or not record.endswith(b"\n") or int(digits) > len(payload):
            raise ValueError("no record")
        value = value[:-1]
        if key == b"size" and not (value.isdigit() and len(value) < 20):
            raise ValueError("no size")
        records[key.decode("utf-8", "surrogateescape")] = value.decode("utf-8", "surrogateescape")
        payload = payload[int(digits) :]
    return records


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _not_a_tar(header: bytes) -> str:
    for magic, name in _COMPRESSED.items():
        if header.startswith(magic):
            return f"it is compressed ({name}); samples of a compressed tar cannot be read at random: decompress it"
    return "it does not begin with a tar header"
