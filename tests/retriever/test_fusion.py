"""Fusion: each mode against what it says it computes, row by row; missing parts contribute nothing."""

import pytest
import torch

from retriever.config import RetrieverConfig
from retriever.encoder import DualEncoder
from retriever.fusion import Blocks, Learned, Mean, make_fusion

DIMS = {"text": 4, "image": 3}
HAS_TEXT, HAS_IMAGE = torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([1.0, 0.0, 1.0, 0.0])
WEIGHT = torch.tensor([0.5, 2.0])


def parts(*, seed: int = 0, dims=DIMS):
    generator = torch.Generator().manual_seed(seed)
    text, image = (torch.randn(4, dims[name], generator=generator) for name in ("text", "image"))
    return [(text, HAS_TEXT), (image, HAS_IMAGE)]


def slow_mean(fusion: Mean, given) -> torch.Tensor:
    rows = []
    for n in range(4):
        there = []
        for name, weight, (part, has) in zip(("text", "image"), WEIGHT, given, strict=True):
            if has[n]:
                there.append(weight * (fusion.project[name].weight @ part[n] if fusion.project else part[n]))
        rows.append(sum(there) / len(there) if there else torch.zeros(fusion.dim))
    return torch.stack(rows)


def test_blocks_score_is_text_with_text_plus_picture_with_picture():
    fusion, given, other = Blocks(DIMS), parts(), parts(seed=1)
    score = fusion(given, WEIGHT) @ fusion(other, WEIGHT).T
    for q in range(4):
        for d in range(4):
            text = HAS_TEXT[q] * HAS_TEXT[d] * 0.25 * given[0][0][q] @ other[0][0][d]
            image = HAS_IMAGE[q] * HAS_IMAGE[d] * 4.0 * given[1][0][q] @ other[1][0][d]
            torch.testing.assert_close(score[q, d], text + image)


def test_mean_is_the_average_of_the_parts_that_are_there():
    fusion = Mean(DIMS, shared_dim=5)
    torch.testing.assert_close(fusion(parts(), WEIGHT), slow_mean(fusion, parts()))
    same = {"text": 3, "image": 3}
    plain = Mean(same, shared_dim=0)
    assert not list(plain.parameters()) and plain.dim == 3
    torch.testing.assert_close(plain(parts(dims=same), WEIGHT), slow_mean(plain, parts(dims=same)))


def test_learned_starts_as_the_mean_and_then_sees_what_is_missing():
    fusion = Learned(DIMS, shared_dim=5)
    torch.testing.assert_close(fusion(parts(), WEIGHT), slow_mean(fusion, parts()))
    torch.nn.init.normal_(fusion.out.weight)
    moved = fusion(parts(), WEIGHT)
    assert not torch.allclose(moved[:3], slow_mean(fusion, parts())[:3])
    assert torch.equal(moved[3], torch.zeros(5))  # a row without any part
    text, image = parts()
    scrambled = [(torch.where(HAS_TEXT.bool()[:, None], text[0], 7.0), text[1]), image]
    assert torch.equal(fusion(scrambled, WEIGHT), moved)  # what stands where nothing is does not matter


def test_parts_of_different_widths_need_a_shared_one():
    with pytest.raises(ValueError, match=r"retriever.fusion is 'mean'.*text 4, image 3.*retriever.shared_dim"):
        make_fusion("mean", DIMS, shared_dim=0)
    with pytest.raises(ValueError, match=r"retriever.shared_dim is 8, but retriever.fusion is 'blocks'"):
        RetrieverConfig(shared_dim=8)


@pytest.mark.parametrize("fusion", ["mean", "learned"])
def test_in_one_space_a_text_finds_a_picture(fusion: str):
    torch.manual_seed(0)
    encoder = DualEncoder(RetrieverConfig(fusion=fusion, shared_dim=32, learned_text=True), image_size=24)
    names = ["red square", "green circle", "blue star", "white cross"]
    blank, image = torch.ones(4, 3, 24, 24), torch.rand(4, 3, 24, 24)
    optimizer = torch.optim.Adam([p for p in encoder.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(30):
        text = encoder(encoder.features(names, blank, torch.zeros(4)))
        shown = encoder(encoder.features([""] * 4, image, torch.ones(4)))
        loss = torch.nn.functional.cross_entropy(encoder.scale() * text @ shown.T, torch.arange(4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (text @ shown.T).argmax(1).tolist() == [0, 1, 2, 3]
    both = encoder(encoder.features(names, image, torch.ones(4)))
    assert both.shape == (4, 32) and encoder.dim == 32


def test_in_blocks_a_text_and_a_picture_have_nothing_in_common():
    encoder = DualEncoder(RetrieverConfig(), image_size=24)
    text = encoder(encoder.features(["nepal"], torch.ones(1, 3, 24, 24), torch.zeros(1)))
    shown = encoder(encoder.features([""], torch.rand(1, 3, 24, 24), torch.ones(1)))
    assert (text @ shown.T).item() == 0.0


@pytest.mark.parametrize("missing", ["text", "image"])
def test_an_encoder_of_one_part(missing: str):
    encoder = DualEncoder(RetrieverConfig(**{missing: "none"}), image_size=24)
    out = encoder(encoder.features(["nepal", ""], torch.rand(2, 3, 24, 24), torch.tensor([0.0, 1.0])))
    assert out.shape == (2, 1024 if missing == "image" else 128)
    assert out.square().sum(1).gt(0).tolist() == ([True, False] if missing == "image" else [False, True])
    with pytest.raises(ValueError, match="both 'none'"):
        RetrieverConfig(text="none", image="none")
