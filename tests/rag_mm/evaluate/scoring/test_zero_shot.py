"""Parity with clip-benchmark (class embeddings) and torchmetrics (accuracy), and cases by hand."""

import numpy
import pytest
import torch
from clip_benchmark.metrics.zeroshot_classification import zero_shot_classifier
from torchmetrics.functional.classification import multiclass_accuracy

from rag_mm.evaluate.scoring.zero_shot import class_embeddings, prompts, rank_of_label


class Letters(torch.nn.Module):
    """A "text tower" whose embedding is a random projection of letter counts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.randn(128, 16, generator=torch.Generator().manual_seed(0))

    def encode_text(self, counts: torch.Tensor) -> torch.Tensor:
        return counts @ self.weight


def counts(texts: list[str]) -> torch.Tensor:
    return torch.tensor([[text.count(chr(i)) for i in range(128)] for text in texts], dtype=torch.float32)


def test_class_embeddings_are_clip_benchmarks() -> None:
    names, model = ["cat", "dog", "zebra crossing"], Letters()
    theirs = zero_shot_classifier(
        model, counts, names, ["a photo of a {c}.", "{c}", "art of the {c}!"], "cpu", amp=False
    )
    ours = class_embeddings(
        lambda texts: model.encode_text(counts(list(texts))).numpy(),
        names,
        ["a photo of a {}.", "{}", "art of the {}!"],
    )
    numpy.testing.assert_allclose(ours, theirs.T.numpy(), atol=1e-6)
    numpy.testing.assert_allclose(numpy.linalg.norm(ours, axis=1), 1, atol=1e-6)


def test_accuracy_is_torchmetrics_where_no_scores_tie() -> None:
    """clip-benchmark's own accuracy stops with numpy 2.4."""
    generator = numpy.random.default_rng(0)
    scores, label = generator.normal(size=(200, 12)), generator.integers(12, size=200)
    rank = rank_of_label(scores, label)
    for k in (1, 5):
        tensors = torch.from_numpy(scores), torch.from_numpy(label)
        theirs = multiclass_accuracy(*tensors, num_classes=12, average="micro", top_k=k)
        assert (rank <= k).mean() == pytest.approx(float(theirs), rel=1e-6)


def test_ties_are_pessimistic() -> None:
    assert rank_of_label(numpy.array([[1.0, 1.0, 0.0]]), numpy.array([0])).tolist() == [2]


def test_prompts() -> None:
    assert prompts("cat", ["a {}", "{}!"]) == ["a cat", "cat!"]
    assert prompts("{x}", ["a {}"]) == ["a {x}"]
    for bad in ("no place", "{} {}", "{c}", "{} }"):
        with pytest.raises(ValueError, match="must hold"):
            prompts("cat", [bad])
