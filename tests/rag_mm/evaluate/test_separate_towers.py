"""Runs whose documents have a side of their own: the index is made by it, and questions are asked by the other."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from data.command_line import dump
from data.dataset import Dataset
from rag_mm.evaluate.answer import load_run
from rag_mm.evaluate.ask import Asker
from rag_mm.evaluate.evaluation import evaluate_run
from rag_mm.evaluate.questions import QuestionsConfig
from rag_mm.mesh import Mesh
from rag_mm.model import build_model, weights
from rag_mm.saver import save
from retriever.embed import embed_documents, pictures
from tests.rag_mm.evaluate.conftest import small_config


@pytest.mark.parametrize("how", ["separate", "query_side"])
def test_it_finds_what_a_loop_over_both_sides_finds(how: str, factbook_dir: Path, tmp_path: Path) -> None:
    config = small_config(factbook_dir, tmp_path / "run")
    changed: dict[str, Any] = (
        {"retriever": dataclasses.replace(config.retriever, towers="separate")}
        if how == "separate"
        else {"index": dataclasses.replace(config.index, refresh="query_side")}
    )
    config = dataclasses.replace(config, **changed)
    model = build_model(config, Dataset(factbook_dir))
    assert model.encoder.document is not None
    with torch.no_grad():
        for parameter in model.encoder.document.parameters():
            parameter.mul_(1.0 + 0.1 * torch.rand(parameter.shape, generator=torch.Generator().manual_seed(0)))
    run_dir = Path(config.run_dir)
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(dump(config))
    save(run_dir, 900, tensors=weights(model), state={}, mesh=Mesh(num_stages=1, num_replicas=1), keep=1)
    run = load_run(run_dir)
    evaluated = evaluate_run(run, ["joint"], QuestionsConfig("test", 8), console=Console(quiet=True))
    encoder, store, size = run.model.encoder, run.dataset.store, config.data.image_size
    with torch.no_grad():
        memory = embed_documents(encoder, store, store.ids, image_size=size, batch_size=64)
        for item in evaluated.scored["joint"]:
            (sample,) = evaluated.questions.of([item.sample])
            image, there = pictures([sample.image], size)
            query = encoder(encoder.features([sample.question], image, there, side="query"))[0]
            right = sorted(range(len(memory)), key=lambda i: (-float(memory[i] @ query), store.ids[i]))
            assert item.prediction.document_ids[0] == store.ids[right[0]]
    asked = Asker(run, console=Console(quiet=True)).ask("what is the capital of Peru?")
    assert len(asked.documents) == 4
