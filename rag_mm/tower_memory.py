"""What runs outside the reader's pipeline takes of each rank's memory, for the planner, which cuts the reader into what
is left: the retriever's towers, and the vision block where pictures are encoded once.

Towers and reader compute at different times of a step, so of their activations the larger counts; parameters,
gradients, moments and receive buffers of both are there all the time. Dealt towers are whole on every rank, piped ones
lie as their own plan says. Counted as `pipeline.costs` does it: no temporaries, no allocator, one signature of shapes.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from pipeline import Block, BlockProgram, Plan, trace
from pipeline.costs import Beside, Costs
from pipeline.padding import pad_batch
from pipeline.simulate import rank_memory, rank_static
from rag_mm.config import Config
from rag_mm.prepared import Prepared
from rag_mm.tower_program import tower_program
from rag_mm.towers import ROW_BUCKET
from rag_mm.vision_once import BLOCK, VisionOnce
from retriever.encoder import DualEncoder, rows


def tower_memory(config: Config, encoder: DualEncoder, example: Prepared, plan: Plan | None) -> tuple[Beside, ...]:
    """By rank of a pipeline.

    Args:
        example: a batch like those of training, for the number of rows.
        plan: of piped towers; None: they are dealt out.
    """
    parallel, program = config.parallel, tower_program(encoder)
    queries, documents = (features["image"].shape[0] for features in (example.query, example.document))
    whole = example.query if queries > documents else example.document
    sharers = parallel.data_replicas * (1 if plan else parallel.pipeline_stages)
    features: dict[str, Tensor] = {name: tensor for name, tensor in whole.items() if name in program.inputs}
    share = rows(features, torch.arange(whole["image"].shape[0])[::sharers])
    count = 1 if plan is None else plan.num_microbatches
    if plan is not None:
        share = pad_batch(program, share, multiple=ROW_BUCKET, weights=())
        share = pad_batch(program, share, multiple=count, weights=())
    costs = Costs(trace(program, share, num_microbatches=count, repeats=1, warmup=0, lineage=False))
    bounds = (0, len(program.blocks)) if plan is None else (0, *(last for _, last in plan.bounds()))
    stages = list(pairwise(bounds))
    peaks = rank_memory(
        costs,
        bounds,
        num_ranks=len(stages),
        num_microbatches=count,
        schedule="gpipe" if plan is None else plan.schedule,
    )
    static = [rank_static(costs, [stage]) for stage in stages]
    sides = len(encoder.sides())  # of which one computes at a time
    found = tuple(Beside(s * sides, peak - s) for s, peak in zip(static, peaks, strict=True))
    return found if plan is not None else found * parallel.pipeline_stages


def vision_memory(vision: VisionOnce, example: Prepared, *, num_ranks: int) -> Beside:
    """Of the vision block on every rank, which encodes its share of the different pictures.

    Patches are not in it: they are batch inputs of the reader, and those are nowhere counted.

    Args:
        example: a batch like those of training. Its documents are hardly shared, so this is the most that a step takes.
        num_ranks: over which the pictures are dealt out.
    """
    image_N3SS, _ = vision.images(example)
    encode = Block(BLOCK, vision.encoder(), ("image",), ("patches",))
    program = BlockProgram([encode], inputs=("image",), outputs=("patches",))
    share = {"image": image_N3SS[::num_ranks]}
    costs = Costs(trace(program, share, num_microbatches=1, repeats=1, warmup=0, lineage=False))
    cost = costs.stage(0, 1)
    return Beside(cost.static_bytes, cost.flight_bytes)
