"""Augmentation: keyed by id and step, within bounds, off at strength 0."""

import torch

from rag_mm.augmentation import augment

PICTURES = torch.rand(4, 3, 12, 12, generator=torch.Generator().manual_seed(0))


def test_a_picture_changes_alike_wherever_it_stands():
    together = augment(PICTURES, ["a", "b", "c", "d"], seed=1, step=5)
    alone = augment(PICTURES[2:3], ["c"], seed=1, step=5)
    torch.testing.assert_close(together[2:3], alone, atol=1e-6, rtol=0)


def test_steps_seeds_and_ids_draw_anew():
    base = augment(PICTURES[:1], ["a"], seed=1, step=5)
    for other in (dict(ids=["b"]), dict(step=6), dict(seed=2)):
        keys = {"ids": ["a"], "seed": 1, "step": 5} | other
        changed = augment(PICTURES[:1], keys["ids"], seed=keys["seed"], step=keys["step"])
        assert (changed - base).abs().max() > 0.01


def test_values_stay_in_range_and_pictures_stay_alike():
    changed = augment(PICTURES, ["a", "b", "c", "d"], seed=0, step=0)
    assert changed.shape == PICTURES.shape and changed.min() >= 0 and changed.max() <= 1
    assert (changed - PICTURES).abs().mean() < 0.35


def test_strength_zero_is_the_identity():
    assert torch.equal(augment(PICTURES, list("abcd"), seed=0, step=0, strength=0.0), PICTURES)
