"""One compute thread per process and no network, for every test.

On a two-core machine one thread is faster than two (they fight over the cores,
and xdist runs two workers); the environment variables reach the ranks that tests
spawn. They are set before torch is imported, because OpenMP reads them once.
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

import hypothesis
import pytest
import torch

from data.dataset import Dataset
from data.factbook import build_factbook

torch.set_num_threads(1)
# A slow machine is no failure: pytest's own timeout still ends what hangs.
hypothesis.settings.register_profile("project", deadline=None)
hypothesis.settings.load_profile("project")

# A small factbook, built once: every kind of duplicate flag, and a few others.
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
