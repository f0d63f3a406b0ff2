import io
import struct
import zlib

import pytest
import torch
from PIL import Image

from data import images


def png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def test_transparent_border_is_trimmed_and_transparency_is_white():
    image = Image.new("RGBA", (40, 30), (0, 0, 0, 0))
    image.paste((255, 0, 0, 255), (8, 4, 24, 12))  # 16 x 8 of red ...
    image.paste((255, 0, 0, 255), (8, 12, 16, 20))  # ... and 8 x 8 below its left half
    decoded = images.decode(png(image), 4)
    assert decoded.shape == (3, 4, 4) and decoded.dtype == torch.uint8
    red, white = [255, 0, 0], [255, 255, 255]
    assert decoded[:, 0, 0].tolist() == red and decoded[:, 0, 3].tolist() == red
    assert decoded[:, 3, 0].tolist() == red and decoded[:, 3, 3].tolist() == white


def test_half_transparent_red_on_white():
    decoded = images.decode(png(Image.new("RGBA", (4, 4), (255, 0, 0, 51))), 2)  # 51 / 255 = 0.2
    assert decoded[:, 0, 0].tolist() == [255, 204, 204]


def test_shrinking_averages_areas():
    image = Image.new("RGB", (4, 4), (0, 0, 0))
    image.paste((255, 255, 255), (0, 0, 2, 4))
    image.paste((255, 255, 255), (2, 0, 3, 4))  # three of four columns are white
    assert images.decode(png(image), 2)[0].tolist() == [[255, 128], [255, 128]]


def test_all_transparent_is_white():
    assert (images.decode(png(Image.new("RGBA", (9, 9), (9, 9, 9, 0))), 3) == 255).all()


def test_the_cache_is_not_the_callers():
    data = png(Image.new("RGB", (4, 4), (1, 2, 3)))
    images.decode(data, 4).zero_()
    assert images.decode(data, 4)[:, 0, 0].tolist() == [1, 2, 3]


def test_broken_bytes_are_a_clear_error():
    whole = png(Image.effect_noise((32, 32), 50))
    with pytest.raises(ValueError, match="not an image"):
        images.decode(b"no picture", 4)
    with pytest.raises(ValueError, match="undecodable image"):
        images.decode(whole[: len(whole) // 2], 4)


def test_decompression_bomb_is_refused_before_it_is_decoded():
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 5000, 5000, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")
    with pytest.raises(ValueError, match="5000 x 5000 pixels"):
        images.decode(bomb, 4)


def test_pixels_are_centred_and_of_unit_length():
    noise = [png(Image.effect_noise((24, 24), sigma).convert("RGB")) for sigma in (20, 60)]
    features = images.pixels(noise)
    assert features.shape == (2, 3 * 12 * 12)
    torch.testing.assert_close(features.norm(dim=1), torch.ones(2))
    torch.testing.assert_close(features.mean(dim=1), torch.zeros(2), atol=1e-6, rtol=0)
