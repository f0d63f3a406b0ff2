"""Pictures as the libraries' own preprocessing makes them, but for mean and deviation."""

from __future__ import annotations

import io
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

from data.config import DataConfig
from data.images import ImageError, decode
from data.transforms import check
from rag_mm.batch import Collator
from retriever.config import RetrieverConfig
from retriever.embed import architecture, document_features
from retriever.encoder import DualEncoder


@pytest.fixture(scope="module")
def photo() -> Image.Image:
    """Wider than high, with structure at all scales."""
    coarse = numpy.random.default_rng(0).integers(0, 255, (20, 31, 3), dtype=numpy.uint8)
    return Image.fromarray(coarse).resize((310, 200), Image.Resampling.BICUBIC)


def encoded(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("model, tag", [("ViT-B-32", ""), ("ViT-B-16-SigLIP", "webli")])
def test_as_open_clip_prepares_for_a_model(photo: Image.Image, model: str, tag: str):
    """Its own transform for evaluation, its normalisation undone: squashed for SigLIP, cropped for CLIP."""
    import open_clip
    from open_clip.transform import image_transform

    given = open_clip.get_pretrained_cfg(model, tag) if tag else {}
    mean, std = given.get("mean", open_clip.OPENAI_DATASET_MEAN), given.get("std", open_clip.OPENAI_DATASET_STD)
    theirs = image_transform(
        64, is_train=False, mean=mean, std=std, interpolation=given.get("interpolation"),
        resize_mode=given.get("resize_mode"),
    )(photo)  # fmt: skip
    expected = theirs * torch.tensor(std).view(3, 1, 1) + torch.tensor(mean).view(3, 1, 1)
    found = decode(encoded(photo), 64, transform=f"open_clip:{model}:{tag}" if tag else f"open_clip:{model}")
    assert torch.allclose(found / 255, expected, atol=1e-5) and found.shape == (3, 64, 64)


def test_as_torchvision_prepares_for_weights(photo: Image.Image):
    from torchvision.models import ResNet50_Weights

    preset = ResNet50_Weights.IMAGENET1K_V2.transforms()
    theirs = preset(photo)  # at its own size
    expected = theirs * torch.tensor(preset.std).view(3, 1, 1) + torch.tensor(preset.mean).view(3, 1, 1)
    found = decode(encoded(photo), 224, transform="torchvision:ResNet50_Weights.IMAGENET1K_V2")
    assert torch.allclose(found / 255, expected, atol=1e-5)
    small = decode(encoded(photo), 32, transform="torchvision:ResNet50_Weights.IMAGENET1K_V2")
    assert small.shape == (3, 32, 32)


def test_transparency_becomes_white_and_nothing_is_trimmed():
    image = Image.new("RGBA", (40, 40), (0, 0, 0, 0))
    image.paste((255, 0, 0, 255), (10, 10, 30, 30))
    found = decode(encoded(image), 40, transform="open_clip:ViT-B-32")
    assert found[:, 0, 0].tolist() == [255, 255, 255] and found[:, 20, 20].tolist() == [255, 0, 0]
    assert decode(encoded(image), 40)[:, 0, 0].tolist() == [255, 0, 0]  # square: trimmed to the red


def test_questions_and_documents_go_through_the_same_one_and_an_index_names_it(factbook, photo: Image.Image):
    name = "torchvision:ResNet50_Weights.IMAGENET1K_V2"
    collator = Collator(factbook.tokenizer, DataConfig(image_transform=name), num_patches=4)
    encoder = DualEncoder(RetrieverConfig(), image_size=24, image_transform=name)
    document = next(d for d in factbook.store.fetch(factbook.store.ids) if d.image is not None)
    features = document_features(encoder, [document], image_size=24)
    asked, _ = collator.images([document.image])
    assert torch.equal(features["image"], asked)
    assert torch.equal(asked[0], decode(document.image, 24, transform=name) / 255)
    assert not torch.equal(asked[0], decode(document.image, 24) / 255)
    plain = architecture(DualEncoder(RetrieverConfig(), image_size=24), image_size=24)
    assert name in architecture(encoder, image_size=24) and "transform" not in plain


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("crop", "allowed are square, open_clip:MODEL"),
        ("open_clip:", "allowed are square"),
        ("open_clip:ViT-B-33", "no model 'ViT-B-33'; did you mean 'ViT-B-32'"),
        ("open_clip:ViT-B-32:laion", "no pretrained tag 'laion'; did you mean 'laion"),
        ("torchvision:ResNet50_Weights.IMAGENET", "no weights .*; did you mean 'ResNet50_Weights.IMAGENET1K"),
    ],
)
def test_unknown_names_get_the_nearest(name: str, said: str):
    with pytest.raises(ValueError, match=said):
        check(name)
    with pytest.raises(ValueError, match=r"data\.image_transform is"):
        DataConfig(image_transform=name)


def test_the_default_is_the_projects_own(tmp_path: Path):
    assert DataConfig().image_transform == "square"


@pytest.mark.parametrize("name", ["open_clip:ViT-B-32", "torchvision:ResNet50_Weights.IMAGENET1K_V2"])
def test_a_line_of_pixels_is_no_bomb(name: str):
    """2 to 16 million pixels, which are allowed, and a shorter side of one, which would be made 224."""
    for size in ((4_000_000, 1), (1, 4_000_000), (201, 1)):
        out = io.BytesIO()
        Image.new("L", size).save(out, "PNG")
        with pytest.raises(ImageError, match="proportions beyond 200 to 1"):
            decode(out.getvalue(), 224, transform=name)
        assert decode(out.getvalue(), 24).shape == (3, 24, 24)  # the project's own makes a square of anything
    out = io.BytesIO()
    Image.new("L", (200, 1)).save(out, "PNG")
    assert decode(out.getvalue(), 24, transform=name).shape == (3, 24, 24)
