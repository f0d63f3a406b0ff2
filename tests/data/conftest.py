"""A small factbook, built once: every kind of duplicate flag, and a few others."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.dataset import Dataset
from data.factbook import build_factbook

COUNTRIES = (
    *("au", "hm", "fr", "mf", "no", "sj", "bv", "id", "mc", "ro", "td"),  # with doubles
    *("np", "jp", "br", "ke", "us", "gb", "de", "jo", "ps", "za", "ci", "nz", "cl"),  # without
)


@pytest.fixture(scope="session")
def factbook_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data") / "factbook"
    out.mkdir()
    build_factbook(out, countries=COUNTRIES, limit_emoji=40)
    return out


@pytest.fixture(scope="session")
def factbook(factbook_dir: Path) -> Dataset:
    return Dataset(factbook_dir)
