"""The shards that loaders are compared on, and the decode work that is the same for all of them."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path

import numpy
from PIL import Image

SIDE, SMALL = 160, 64  # pixels


def decode(members: Mapping[str, bytes]) -> tuple[str, numpy.ndarray]:
    """The caption and the picture (3, 64, 64) of a sample: JPEG decoded and reduced, JSON parsed."""
    caption = json.loads(members["json"])["caption"]
    with Image.open(io.BytesIO(members["jpg"])) as image:
        small = image.convert("RGB").resize((SMALL, SMALL), Image.Resampling.BILINEAR)
    return caption, numpy.asarray(small).transpose(2, 0, 1)


def raw_samples(folder: Path) -> list[tuple[str, dict[str, bytes]]]:
    """Every sample of the folder, by key, in memory."""
    from data.shard_set import ShardSet

    shards = ShardSet(folder)
    return [(sample.key, sample.members) for sample in shards.read(range(len(shards)))]


def make(folder: Path, *, samples: int, per_shard: int) -> Path:
    """Shards of pictures of about 8 KB, written once."""
    from data.shards import write_shards

    target = folder / f"pictures-{samples}-{per_shard}"
    if (target / "done").exists():
        return target
    generator = numpy.random.default_rng(0)
    coarse = generator.integers(0, 255, (512, 20, 20, 3), dtype=numpy.uint8)
    encoded = []
    for pixels in coarse:
        buffer = io.BytesIO()
        Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
        encoded.append(buffer.getvalue())

    def contents():  # type: ignore[no-untyped-def]
        for i in range(samples):
            body = {"caption": f"picture number {i} of {samples}", "width": SIDE, "height": SIDE}
            yield f"{i:08d}", {"jpg": encoded[i % len(encoded)], "json": json.dumps(body).encode()}

    write_shards(target, contents(), samples_per_shard=per_shard)
    (target / "done").touch()
    return target
