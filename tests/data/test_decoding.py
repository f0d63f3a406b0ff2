import io
import os
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from data import decoding
from data.decoding import decode
from data.image_formats import EXTENSIONS
from data.shard_set import RawSample


def sample(**members: bytes) -> RawSample:
    return RawSample("k", members, Path("t.tar"))


def encoded(kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise((40, 30), 60).convert("RGB").save(buffer, kind)
    return buffer.getvalue()


class Trap:
    def __reduce__(self) -> Any:
        return os.mkdir, (f"{os.environ['TRAP']}/sprung",)


def test_values_by_extension():
    raw = sample(txt="é".encode(), json=b'\xef\xbb\xbf{"a": [1, "\\u00e9"]}', cls=b" -7\n", jpg=encoded("JPEG"))
    decoded = decode(raw)
    assert decoded.problem is None
    assert {k: v for k, v in decoded.values.items() if k != "jpg"} == {"txt": "é", "json": {"a": [1, "é"]}, "cls": -7}
    assert decoded.values["jpg"].size == (40, 30)
    assert decode(RawSample("k", {"seg.png": encoded("PNG")}, Path("t.tar"))).values["seg.png"].mode == "RGBA"
    assert decode(sample(webp=encoded("WEBP"), xyz=b"?"), ["webp"]).values.keys() == {"webp"}


def png_of(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({}, "missing member json"),
        ({"json": b""}, "json: malformed"),
        ({"json": b"{"}, "json: malformed"),
        ({"json": b'"\xff"'}, "json: not UTF-8"),
        ({"json": b"[" * 200_000}, "json: nests too deeply"),
        ({"json": b'{"a": "\\ud800"}'}, "json: half a surrogate pair"),
        ({"json": b"9" * 5000}, "json: malformed"),
        ({"json": b'"' + b"x" * decoding.MAX_TEXT_BYTES + b'"'}, "json: more than 16 MiB"),
        ({"txt": b"\xc3"}, "txt: not UTF-8"),
        ({"cls": b"seven"}, "cls: not a number"),
        ({"cls": b"1" * 33}, "cls: not a number"),
        ({"jpg": b""}, "jpg: not an image"),
        ({"jpg": b"GIF is what this is not"}, "jpg: not an image"),
        ({"jpg": encoded("JPEG")[:-200]}, "jpg: undecodable image"),
        ({"png": png_of(5000, 5000)}, "png: more than 16777216 pixels"),
        ({"png": png_of(200_000, 200_000)}, "png: more than 16777216 pixels"),
        ({"png": png_of(8, 8)}, "png: undecodable image"),
        ({"pkl": b"\x80\x04N."}, "pkl: pickles are never read"),
        ({"x.pth": b""}, "pth: pickles are never read"),
        ({"xyz": b""}, "xyz: no decoder"),
    ],
)
def test_what_is_wrong_is_a_reason(members: dict[str, bytes], reason: str):
    wanted = members or ["json"]
    decoded = decode(RawSample("k", members, Path("t.tar")), list(wanted))
    assert (decoded.problem, decoded.values) == (reason, {})


def test_a_large_member_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decoding, "MAX_IMAGE_BYTES", 1 << 20)
    assert decode(sample(png=png_of(8, 8) + bytes(1 << 20))).problem == "png: more than 1 MiB"


@pytest.mark.parametrize("extension", sorted(decoding.PICKLES))
def test_no_pickle_is_ever_opened(extension: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRAP", str(tmp_path))
    trap = pickle.dumps(Trap())
    assert decode(RawSample("k", {extension: trap}, Path("t.tar"))).problem == f"{extension}: pickles are never read"
    for other in decoding.DECODERS:
        assert decode(RawSample("k", {other: trap}, Path("t.tar"))).problem is not None
    assert list(tmp_path.iterdir()) == []
    pickle.loads(trap)
    assert (tmp_path / "sprung").exists()  # the trap works


def test_a_problem_of_the_shard_stays_the_problem():
    assert (
        decode(RawSample("k", {}, Path("t.tar"), "link instead of a file"), ["txt"]).problem == "link instead of a file"
    )


WHOLE = {kind: encoded(kind.upper().replace("JPG", "JPEG")) for kind in ("jpg", "png", "webp")}


@given(
    kind=st.sampled_from(sorted(WHOLE)),
    flips=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), min_size=1, max_size=12),
    cut=st.integers(0, 5000),
)
def test_damaged_pictures_never_raise(kind: str, flips: list[tuple[int, int]], cut: int):
    data = bytearray(WHOLE[kind])
    for place, value in flips:
        data[place % len(data)] = value
    decoded = decode(sample(**{kind: bytes(data[: len(data) - cut % len(data)])}))
    assert decoded.problem is None or decoded.problem.startswith(f"{kind}: ")


@given(extension=st.sampled_from(["txt", "json", "cls"]), data=st.binary(max_size=200))
def test_random_bytes_never_raise(extension: str, data: bytes):
    decoded = decode(sample(**{extension: data}))
    assert (decoded.problem is None) == (extension in decoded.values)


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_every_picture_that_a_sample_may_hold_has_a_decoder(extension: str):
    kind = {"jpg": "JPEG", "tif": "TIFF"}.get(extension, extension.upper())
    decoded = decode(sample(**{extension: encoded(kind)}))
    assert decoded.problem is None and decoded.values[extension].mode == "RGBA"
