"""Proof before step 1 that this layout computes the gradients of one device running the whole batch.

``full`` compares with the slow twin `JointStep.reference`: one process, one graph, no micro-batches.
``staged`` needs no device that holds the whole model: the same cuts, one micro-batch of all samples. It sees what
depends on how the batch is cut (draws from generator state, a mean of means) and is blind to what both sides get
wrong alike: a tie that is not synchronised, a shared document's gradient applied at every occurrence.
``shrunk`` runs the full proof on a smaller reader (few layers, a quarter of the width) with the same program,
stages, micro-batches and schedule. It sees all of these, but no fault of a layer that it leaves out.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from pipeline import BlockProgram, Pipeline, Plan
from pipeline.verify import gradient_report
from rag_mm.config import Config
from rag_mm.prepared import Prepared
from rag_mm.reader.config import ReaderConfig
from rag_mm.reader.fusion import reader_program
from rag_mm.step import JointStep
from rag_mm.vision_choice import Vision


class ProofError(RuntimeError):
    """The layout's gradients are not those of one device."""


def prove(
    config: Config, joint: JointStep, prepared: Prepared, pipeline: Pipeline, vision: Vision | None = None
) -> str:
    """Run the proof that ``parallel.verify`` names; gives one line for the log.

    Args:
        vision: where the pipeline's program is the reader with its pictures encoded grouped or once.

    Raises:
        ProofError: on every rank, naming the parameters that are off.
    """
    mode, tolerance = config.parallel.verify, config.parallel.verify_tolerance
    if mode == "off":
        return "proof: off (parallel.verify)"
    if mode == "shrunk":
        pipeline, vision = _shrunk(config, joint, pipeline, vision)
    loss, actual = _gradients(joint, prepared, pipeline, vision)
    if mode == "staged":
        several = pipeline.plan.num_stages > pipeline.plan.num_ranks
        whole = Pipeline(
            pipeline.program, pipeline.plan, group=pipeline.group, num_microbatches=1,
            schedule="interleaved" if several else "gpipe", timeout_s=config.parallel.timeout_s,
        )  # fmt: skip
        right_loss, right = _gradients(joint, prepared, whole, vision)
    else:
        right_loss, right = joint.reference(prepared, pipeline.program if vision is None else vision.whole)
    report = gradient_report(right, actual, tolerance=tolerance)
    message = "" if report else report.message
    if not abs(loss - right_loss) <= tolerance * max(abs(right_loss), 1e-12):
        message = f"the loss is {loss:.7g}, {right_loss:.7g} would be right\n{message}".rstrip()
    messages = joint.mesh.gather(message)
    bad = [f"rank {rank}: {message}" for rank, message in enumerate(messages) if message]
    if bad:
        raise ProofError(
            f"parallel.verify {mode} failed; training does not start.\n"
            + "\n".join(bad)
            + "\nThis is a fault in the model's blocks or in the framework (see docs/pipeline.md)."
        )
    worst = max(joint.mesh.gather((report.worst_error, report.worst)))
    count = sum(joint.mesh.gather(report.num_compared))
    return f"proof: {mode}, loss and {count} gradients agree with one device, largest error {worst[0]:.1e} ({worst[1]})"


def _gradients(
    joint: JointStep, prepared: Prepared, pipeline: Pipeline, vision: Vision | None
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and this rank's gradients by name; ``.grad`` is empty afterwards."""
    reader = {**pipeline.parameters_here, **({} if vision is None else vision.parameters)}
    parameters = {f"reader.{n}": p for n, p in reader.items() if p.requires_grad}
    if joint.trains_retriever(prepared.step):
        towers = {**joint.towers.sharded, **joint.towers.replicated}
        parameters |= {f"retriever.{n}": p for n, p in towers.items()}
    for parameter in parameters.values():
        parameter.grad = None
    outcome = joint.gradients(prepared, pipeline, vision)
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    return outcome.loss, grads


def _shrunk(
    config: Config, joint: JointStep, pipeline: Pipeline, vision: Vision | None
) -> tuple[Pipeline, Vision | None]:
    """The same program with fewer, narrower layers, cut into as many stages."""
    stages, layers = pipeline.plan.num_stages, 0
    program, small = pipeline.program, vision
    while layers == 0 or len(program.blocks) < stages:  # ends at the whole depth: that has a block for every stage
        layers += 1
        program = _narrow(config, joint, layers=layers)
        if vision is not None:
            small = vision.of(program)
            program = small.program
    blocks, names = len(program.blocks), [block.name for block in program.blocks]
    plan = Plan.from_cuts(
        program, [blocks * i // stages for i in range(1, stages)], schedule=pipeline.schedule,
        num_microbatches=pipeline.num_microbatches, num_ranks=pipeline.num_ranks,
        recomputed=[name for name in pipeline.plan.recomputed if name in names],
    )  # fmt: skip
    return Pipeline(program, plan, group=pipeline.group, timeout_s=config.parallel.timeout_s), small


def _narrow(config: Config, joint: JointStep, *, layers: int) -> BlockProgram:
    """The reader with a quarter of its width and at most so many layers of each kind."""
    reader = config.reader
    small: ReaderConfig = replace(
        reader,
        width=2 * reader.heads * max(1, reader.width // (8 * reader.heads)),
        ffn_width=max(4, reader.ffn_width // 4),
        encoder_layers=min(reader.encoder_layers, layers),
        decoder_layers=min(reader.decoder_layers, layers),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        vocabulary = len(joint.collator.tokenizer)
        return reader_program(small, config.objectives, vocabulary=vocabulary, image_size=config.data.image_size)
