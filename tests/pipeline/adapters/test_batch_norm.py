"""A real network with batch norm (EfficientNet-lite0): refused while it trains, accepted where it is frozen."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

from pipeline.adapters import sequential
from pipeline.lineage import require_sample_lineage
from pipeline.trace import trace


@pytest.fixture(scope="module")
def network(efficientnet_state: dict[str, torch.Tensor]) -> nn.Sequential:
    """timm's network; the file's tensors are its own, in the same order under other names."""
    model = timm.create_model("efficientnet_lite0", pretrained=False)
    own = model.state_dict()
    assert [t.shape for t in own.values()] == [t.shape for t in efficientnet_state.values()]
    model.load_state_dict(dict(zip(own, efficientnet_state.values(), strict=True)))
    return model.as_sequential()


@pytest.fixture
def images() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))}


def test_frozen_batch_norm_is_per_sample(network: nn.Sequential, images: dict[str, torch.Tensor]) -> None:
    program = sequential(network.eval())
    profile = trace(program, images, num_microbatches=2, repeats=1, warmup=0)
    assert {block.lineage for block in profile.blocks} == {"sample"}
    require_sample_lineage(profile)
    assert torch.equal(program(images)["y"], network(images["x"]))


def test_training_batch_norm_is_refused_by_name(network: nn.Sequential, images: dict[str, torch.Tensor]) -> None:
    program = sequential(network.train()[:4])  # stem, its norm, and two groups of blocks
    profile = trace(program, images, num_microbatches=2, repeats=1, warmup=0)
    assert [block.lineage for block in profile.blocks] == ["sample", "batch", "batch", "batch"]
    with pytest.raises(ValueError, match=r"layer\.1.*batch"):
        require_sample_lineage(profile)
