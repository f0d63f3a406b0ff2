"""The reader's pictures, encoded for every pair, once a micro-batch, or once a step: the cases of `sharing`.

Two ranks, the fid reader with a vision tower of 4 layers in place of its small one, 16 samples with 4 documents each in
2 micro-batches, 1F1B. Sharing factor f: each document is read by f samples, either of one micro-batch (``together``) or
as far apart as can be (``apart``), where only encoding once a step saves anything while a micro-batch's pairs are fewer
than the documents.

Memory is the fullest rank's, in live tensor bytes: parameters, gradients, activations, receive buffers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.pipeline.measuring import LiveBytes, busy_profile, in_turn, measured_link, median_ratio
from benchmarks.pipeline.models import Layer
from pipeline import BlockProgram, Pipeline, Plan, Profile, partition, simulate
from pipeline.costs import Link
from rag_mm.mesh import Mesh
from rag_mm.objectives import ObjectivesConfig
from rag_mm.reader.config import ReaderConfig
from rag_mm.reader.embedding import Vision
from rag_mm.reader.fusion import reader_program
from rag_mm.vision_choice import MODES, choose, make_vision
from rag_mm.vision_choice import Vision as Way
from rag_mm.vision_grouped import VisionGrouped
from rag_mm.vision_once import VisionOnce

RANKS, SAMPLES, K, MICROBATCHES = 2, 16, 4, 2
WIDTH, LAYERS, IMAGE, PATCH, VOCABULARY, E = 64, 4, 48, 8, 500, 8
QUESTION, DOCUMENT, ANSWER = 8, 32, 4
CASES = ((1, "apart"), (2, "apart"), (2, "together"), (4, "apart"), (4, "together"), (8, "apart"), (8, "together"))


class Tower(Vision):
    """A vision block that costs something: transformer layers over the patches."""

    def __init__(self, config: ReaderConfig, *, image_size: int) -> None:
        super().__init__(config, image_size=image_size)
        self.layers = nn.Sequential(*(Layer(config.width) for _ in range(LAYERS)))

    def encode(self, image_N3SS: Tensor) -> Tensor:
        return self.layers(super().encode(image_N3SS))


def reader() -> BlockProgram:
    torch.manual_seed(0)
    config = ReaderConfig(width=WIDTH, heads=2, ffn_width=2 * WIDTH, encoder_layers=2, decoder_layers=2, patch=PATCH)
    program = reader_program(config, ObjectivesConfig(pdist=0.0), vocabulary=VOCABULARY, image_size=IMAGE)
    first, *rest = program.blocks
    tower = type(first)(first.name, Tower(config, image_size=IMAGE), first.reads, first.writes)
    return BlockProgram([tower, *rest], inputs=program.inputs, outputs=program.outputs, axes=program.axes).train()


def reads(factor: int, where: str) -> Tensor:
    """Which document each pair reads (P,)."""
    pairs = SAMPLES * K
    if where == "apart":
        return torch.arange(pairs) % (pairs // factor)
    each = pairs // MICROBATCHES // factor  # documents of a micro-batch
    own = torch.arange(pairs // MICROBATCHES) % each
    return torch.cat([own + m * each for m in range(MICROBATCHES)])


def batch() -> dict[str, Tensor]:
    """Everything but the documents' pictures."""
    g = torch.Generator().manual_seed(1)
    pairs, patches = SAMPLES * K, (IMAGE // PATCH) ** 2

    def ids(rows: int, length: int) -> Tensor:
        return torch.randint(1, VOCABULARY, (rows, length), generator=g)

    question, document, target = ids(SAMPLES, QUESTION), ids(pairs, DOCUMENT), ids(SAMPLES, ANSWER)
    blank = torch.zeros(pairs, 2 * patches, dtype=torch.int64)
    weight = torch.full((SAMPLES,), 1 / SAMPLES)
    return {
        "sample_id": torch.arange(SAMPLES),
        "question": question,
        "question_image": torch.rand(SAMPLES, 3, IMAGE, IMAGE, generator=g),
        "document": document,
        "document_match": torch.zeros(pairs, DOCUMENT),
        "context_mask": torch.ones(pairs, QUESTION + 2 * patches + DOCUMENT, dtype=torch.bool),
        "context_token": torch.cat([question.repeat_interleave(K, dim=0), blank, document], dim=1),
        "answer_in": target,
        "target": target,
        "target_weight": torch.full((SAMPLES, ANSWER), 1 / (SAMPLES * ANSWER)),
        "sample_weight": weight,
        "distill_weight": weight,
        "query_embedding": torch.randn(SAMPLES, E, generator=g),
        "document_embedding": torch.randn(pairs, E, generator=g),
    }


class Case:
    """One way to encode the pictures of one batch: its program and a step of it, as training takes it."""

    def __init__(self, whole: BlockProgram, mode: str, mesh: Mesh, read_P: Tensor) -> None:
        self.mesh, self.read_P = mesh, read_P
        self.vision: Way | None = make_vision(mode, whole, mesh, num_microbatches=MICROBATCHES)
        self.program = whole if self.vision is None else self.vision.program
        self.given = batch()
        g = torch.Generator().manual_seed(2)
        self.image_C3SS = torch.rand(int(read_P.max()) + 1, 3, IMAGE, IMAGE, generator=g)
        self.image_N3SS = torch.cat([self.given["question_image"], self.image_C3SS])

    def inputs(self) -> dict[str, Tensor]:
        """The batch that the pipeline is given."""
        given = {**self.given, "document_image": self.image_C3SS[self.read_P]}
        if isinstance(self.vision, VisionGrouped):
            return self.vision.inputs(given, self.image_C3SS, self.read_P)
        if isinstance(self.vision, VisionOnce):
            patch_NnD = self.vision.embed(self.image_N3SS).requires_grad_()
            return {**self.vision.inputs(given, patch_NnD, self.read_P), "patch": patch_NnD}
        return given

    def step(self, pipeline: Pipeline) -> None:
        given = self.inputs()
        patch_NnD = given.pop("patch", None)
        pipeline.step(given, seed=0, step=1)
        if isinstance(self.vision, VisionOnce) and patch_NnD is not None:
            grad_NnD = torch.zeros_like(patch_NnD) if patch_NnD.grad is None else patch_NnD.grad
            self.mesh.sum([grad_NnD])
            self.vision.backward(self.image_N3SS, grad_NnD)

    def parameters(self, pipeline: Pipeline) -> dict[str, nn.Parameter]:
        return {**pipeline.parameters_here, **({} if self.vision is None else self.vision.parameters)}

    def outside_bytes(self) -> int:
        """What the way keeps outside of the pipeline: patches and their gradient, its parameters and theirs."""
        if not isinstance(self.vision, VisionOnce):
            return 0
        patches = self.image_N3SS.shape[0] * (IMAGE // PATCH) ** 2 * WIDTH
        return 2 * 4 * (patches + sum(p.numel() for p in self.vision.parameters.values()))


def _gradients(case: Case, pipeline: Pipeline) -> dict[str, Tensor]:
    """Of all ranks' parameters, by name, after one step."""
    case.program.zero_grad(set_to_none=True)
    _clear(case, pipeline)
    case.step(pipeline)
    mine = {name: p.grad for name, p in case.parameters(pipeline).items() if p.grad is not None}
    gathered: list[Any] = [None] * RANKS
    dist.all_gather_object(gathered, mine)
    _clear(case, pipeline)
    return {name: grad for grads in gathered for name, grad in grads.items()}


def _clear(case: Case, pipeline: Pipeline) -> None:
    for parameter in case.parameters(pipeline).values():
        parameter.grad = None


def _peak(case: Case, plan: Plan) -> int:
    """Most live bytes of a rank, over two steps."""
    with LiveBytes() as live:
        pipeline = Pipeline(case.program, plan)
        for _ in range(2):
            case.step(pipeline)
    own = sum(p.numel() * p.element_size() for p in case.parameters(pipeline).values())
    peaks: list[Any] = [None] * RANKS
    dist.all_gather_object(peaks, own + live.peak)
    _clear(case, pipeline)
    return max(peaks)


def on_rank(rounds: int, cases: Sequence[tuple[int, str]] = CASES) -> list[dict[str, Any]]:
    """The rows of the table: every way for every sharing factor."""
    whole, mesh, link = reader(), Mesh(num_stages=RANKS, num_replicas=1), measured_link()
    return [row for factor, where in cases for row in _rows(whole, mesh, link, factor, where, rounds)]


def _rows(whole: BlockProgram, mesh: Mesh, link: Link, factor: int, where: str, rounds: int) -> list[dict[str, Any]]:
    cases = {mode: Case(whole, mode, mesh, reads(factor, where)) for mode in MODES}
    profiles, plans = {}, {}
    for mode, case in cases.items():
        given = {name: tensor for name, tensor in case.inputs().items() if name in case.program.inputs}
        profiles[mode] = busy_profile(case.program, given, num_microbatches=MICROBATCHES, repeats=5)
        plans[mode] = _plan(profiles[mode], link)
    chosen, seconds = choose(
        profiles,
        partition=lambda _, profile: _plan(profile, link),
        sharing=factor,
        k=K,
        num_replicas=1,
        num_ranks=RANKS,
    )
    pipelines = {mode: Pipeline(case.program, plans[mode]) for mode, case in cases.items()}
    gradients = {mode: _gradients(case, pipelines[mode]) for mode, case in cases.items()}

    def work(mode: str) -> Callable[[], object]:
        def once() -> None:
            cases[mode].step(pipelines[mode])
            _clear(cases[mode], pipelines[mode])

        return once

    times = in_turn({mode: work(mode) for mode in MODES}, rounds=rounds)
    rows = []
    for mode, case in cases.items():
        run = simulate(profiles[mode], plans[mode], link=link, parameter_copies=2.0)
        peak, predicted = _peak(case, plans[mode]), max(run.rank_memory_bytes) + case.outside_bytes()
        measured = statistics.median(times[mode])
        rows.append(
            {
                "read by": f"{factor} {where}" if factor > 1 else "1",
                "pictures encoded": mode,
                "chosen": "yes" if mode == chosen else "",
                "measured ms": 1e3 * measured,
                "predicted ms": 1e3 * seconds[mode],
                "time of repeated / time": median_ratio(times["repeated"], times[mode]),
                "measured MiB": peak / 2**20,
                "predicted MiB": predicted / 2**20,
                "gradient error": f"{_error(gradients['repeated'], gradients[mode]):.1e}",
            }
        )
    return rows


def _plan(profile: Profile, link: Link) -> Plan:
    return partition(
        profile, num_stages=RANKS, schedule="1f1b", num_microbatches=MICROBATCHES,
        link_latency_s=link.latency_s, link_bytes_per_s=link.bytes_per_s,
    )  # fmt: skip


def _error(right: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> float:
    """Largest difference of a gradient, as a share of that parameter's largest (or 1e-6 of the largest of all)."""
    assert set(right) == set(found)
    floor = 1e-6 * max(float(grad.abs().max()) for grad in right.values())
    return max(
        float((found[name] - grad).abs().max()) / max(float(grad.abs().max()), floor) for name, grad in right.items()
    )
