"""Bytes of any source changed at random: it converts, or it is refused with one sentence. Never a traceback."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from data import prepare
from tests.data.formats.examples import EXAMPLES


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Bytes replaced, left out, put in and doubled; at least one stays."""
    found = bytearray(data)
    for _ in range(draw.choice([1, 1, 3, 10])):
        kind, i = draw.random(), draw.randrange(len(found))
        if kind < 0.4:
            found[i] = draw.randrange(256)
        elif kind < 0.6:
            del found[i : i + draw.randrange(1, 20)]
        elif kind < 0.8:
            found[i:i] = bytes(draw.choice(b'{}[]",:\t\n0e') for _ in range(3))
        else:
            found[i:i] = found[max(0, i - 30) : i]
        found = found or bytearray(b" ")
    return bytes(found)


@pytest.mark.parametrize(("seed", "rounds"), [(0, 60), pytest.param(1, 600, marks=pytest.mark.slow)])
def test_one_sentence_or_a_data_set(seed: int, rounds: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    draw, refused = random.Random(seed), 0
    names = sorted(set(EXAMPLES) - {"datasets"})  # whose readers are not ours, and slow
    for _ in range(rounds):
        name, root = draw.choice(names), tmp_path / "round"
        (root / "source").mkdir(parents=True)
        argv = EXAMPLES[name][0](root / "source")
        files = sorted(p for p in (root / "source").rglob("*") if p.is_file() and p.stat().st_size)
        file = draw.choice(files)
        file.write_bytes(damaged(file.read_bytes(), draw))
        capsys.readouterr()
        status = prepare.main([*argv, "--out", str(root / "out"), "--workers", "1", "--vocabulary", "0"])
        error = capsys.readouterr().err
        assert (status, error.count("\n")) in ((0, 0), (2, 1)), f"{name}, {file.name}: {status} {error}"
        assert (root / "out" / "dataset.json").exists() == (status == 0)
        refused += status == 2
        shutil.rmtree(root)
    assert 0.1 < refused / rounds < 0.95  # the damage is neither nothing nor everything
