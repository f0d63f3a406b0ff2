"""The error measure on numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch

from pipeline.verify import compare_gradients, gradient_report


def test_error_measure() -> None:
    right = {"big": torch.tensor([100.0, 1.0]), "zero": torch.tensor([0.0, 1e-9])}
    actual = {"big": torch.tensor([100.0, 1.5]), "zero": torch.tensor([2e-5, 0.0])}
    failures = compare_gradients(right, actual, tolerance=1e-2)
    # big: 0.5 / 100. zero: 2e-5 / max(1e-9, 1e-6 * 100).
    assert [f.name for f in failures] == ["zero"]
    assert failures[0].error == pytest.approx(0.2)
    report = gradient_report(right, {"big": actual["big"]}, tolerance=1e-2)
    assert report and report.worst == "big" and report.worst_error == pytest.approx(0.005)


def test_not_finite_fails_and_unknown_names_are_refused() -> None:
    right = {"a": torch.ones(2)}
    for bad in (float("nan"), float("inf")):
        report = gradient_report(right, {"a": torch.tensor([1.0, bad])}, tolerance=1e9)
        assert not report and report.worst == "a" and "a" in report.message
    with pytest.raises(ValueError, match="no reference"):
        compare_gradients(right, {"b": torch.ones(2)}, tolerance=1.0)
    with pytest.raises(ValueError, match="shape"):
        compare_gradients(right, {"a": torch.ones(3)}, tolerance=1.0)
