"""Every layout, schedule, reader and objective against one process that runs the whole batch.

The twin (`JointStep.reference`) does not depend on the layout, so it is computed once for each reader and objective,
here; the ranks of the pool send their gradients back. `make test` runs a subset in which every pair of values of two
factors occurs, but for the objectives in `SLOWER`; `make test-all` runs all 240 cells, and those of the largest layout
without dropout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.verify import gradient_report
from rag_mm.config import Config
from rag_mm.objectives import ObjectivesConfig
from tests.distributed import run_on_ranks
from tests.rag_mm.joint_setup import READER, build, config, gradients_here, in_float64, make_pipeline, prepare

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
OBJECTIVES = {
    "pdist": ObjectivesConfig(pdist=0.7, contrastive=0.0),
    "emdr2": ObjectivesConfig(pdist=0.0, emdr2=0.5, contrastive=0.0),
    "rag_sequence": ObjectivesConfig(pdist=0.0, rag_sequence=0.5, contrastive=0.0),
    "contrastive": ObjectivesConfig(pdist=0.0, contrastive=0.5),
    "emdr2_token": ObjectivesConfig(pdist=0.0, emdr2_token=0.5, contrastive=0.0),
    "adist": ObjectivesConfig(pdist=0.0, adist=0.5, contrastive=0.0),
    "adist_values": ObjectivesConfig(pdist=0.0, adist=0.5, adist_from="values", contrastive=0.0),
    "loop": ObjectivesConfig(pdist=0.0, loop=0.5, contrastive=0.0),
    "mined": ObjectivesConfig(
        pdist=0.0, contrastive=0.5, contrastive_mined_negatives=2, contrastive_positives=2, contrastive_several="each",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One place in the matrix. ``deep``: a reader of eight blocks or more, enough for two chunks on four ranks."""

    schedule: str
    ranks: int
    replicas: int
    fusion: str
    objective: str
    deep: bool = False
    dropout: float = READER.dropout

    def __str__(self) -> str:
        dry = "" if self.dropout else "-dry"
        return f"{self.schedule}-{self.replicas}x{self.ranks}-{self.fusion}-{self.objective}{dry}"

    def settings(self, directory: Path) -> Config:
        more = {"encoder_layers": 2, "decoder_layers": 3} if self.deep else {}
        return config(
            directory, ranks=self.ranks, replicas=self.replicas, schedule=self.schedule, num_microbatches=4,
            reader=replace(READER, fusion=self.fusion, dropout=self.dropout, **more),
            objectives=OBJECTIVES[self.objective],
        )  # fmt: skip


LAYOUTS = [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2)]
CELLS = [
    Cell(schedule, ranks, replicas, fusion, objective, deep=ranks == 4)
    for schedule, (ranks, replicas), fusion, objective in product(
        ["gpipe", "1f1b", "interleaved"], LAYOUTS, ["fid", "prepend"], OBJECTIVES
    )
    if fusion == "fid" or not objective.startswith("adist")  # which prepend refuses
]


def pairs_of(cell: Cell) -> set[tuple[Any, Any]]:
    """All pairs of values that occur together in a cell."""
    factors = (cell.schedule, (cell.ranks, cell.replicas), cell.fusion, cell.objective)
    return set(combinations(enumerate(factors), 2))


def covering(cells: list[Cell]) -> list[Cell]:
    """Few cells in which every pair of values occurs: always the one that adds most."""
    missing = set().union(*map(pairs_of, cells))
    chosen = []
    while missing:
        best = max(cells, key=lambda cell: len(pairs_of(cell) & missing))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen


SLOWER = ("emdr2_token", "adist", "adist_values", "loop", "mined")  # one cell of each in `make test`
COVERED = [c for c in CELLS if c.objective not in SLOWER]
COVER = covering(COVERED) + [
    next(c for c in CELLS if c.objective == name and (c.schedule, c.ranks, c.replicas) == ("1f1b", 2, 1))
    for name in SLOWER
]
DRY = [replace(c, dropout=0.0) for c in CELLS if (c.ranks, c.replicas) == (2, 2) and c.objective == "pdist"]


def gradients(cell: Cell, directory: Path, run_dir: Path) -> dict[torch.dtype, dict[str, Any]]:
    """On a rank: its gradients by name in both precisions, and the ids that were retrieved."""
    settings = cell.settings(directory)
    joint, reader = build(settings, run_dir)
    pipeline = make_pipeline(settings, joint, reader)
    prepared = prepare(joint)
    found = {torch.float32: gradients_here(joint, prepared, pipeline)}
    in_float64(joint, reader, prepared)
    found[torch.float64] = gradients_here(joint, prepared, pipeline)
    return {dtype: {"gradients": grads, "ids": prepared.ids} for dtype, grads in found.items()}


@cache
def twin(cell: Cell, directory: Path, run_dir: Path) -> dict[torch.dtype, dict[str, Any]]:
    """One process, one graph, the whole batch; ``cell`` is on one rank."""
    joint, reader = build(cell.settings(directory), run_dir)
    prepared = prepare(joint)
    assert prepared.read.numel() > prepared.read.unique().numel()  # some document is read by two questions
    parts = [set(reader.block_parameters(name)) for name in ("embed", "head")]
    assert parts[0] & parts[1]  # the embedding is tied over the first and the last stage
    lengths = (prepared.reader["document"] != 0).sum(1)
    assert lengths.unique().numel() > 1 and (prepared.reader["sample_weight"] == 0).sum() == 2
    found = {torch.float32: joint.reference(prepared, reader)[1]}
    in_float64(joint, reader, prepared)
    found[torch.float64] = joint.reference(prepared, reader)[1]
    return {dtype: {"gradients": grads, "ids": prepared.ids} for dtype, grads in found.items()}


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("twins")


@pytest.mark.parametrize(
    "cell", [pytest.param(c, id=str(c), marks=[] if c in COVER else [pytest.mark.slow]) for c in CELLS + DRY]
)
def test_gradients_are_those_of_one_process(cell: Cell, factbook_dir: Path, tmp_path: Path, twins: Path) -> None:
    ranks = run_on_ranks(gradients, cell.ranks * cell.replicas, cell, factbook_dir, tmp_path)
    right = twin(replace(cell, schedule="gpipe", ranks=1, replicas=1), factbook_dir, twins)
    for dtype, tolerance in TOLERANCE.items():
        seen = set()
        for rank in ranks:
            assert rank[dtype]["ids"] == right[dtype]["ids"]
            report = gradient_report(right[dtype]["gradients"], rank[dtype]["gradients"], tolerance=tolerance)
            assert report, f"{dtype}: {report.message}"
            seen |= set(rank[dtype]["gradients"])
        silent = set(right[dtype]["gradients"]) - seen
        assert all(right[dtype]["gradients"][name].abs().max() == 0 for name in silent), silent


def test_the_subset_covers_every_pair() -> None:
    assert set().union(*map(pairs_of, COVER)) >= set().union(*map(pairs_of, COVERED))
    assert len(CELLS) == 240 and len(COVER) <= 31 and len(DRY) == 6 and READER.dropout > 0
