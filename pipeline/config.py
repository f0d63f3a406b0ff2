"""How a step is laid out over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipeline.plan_file import LOOPED


@dataclass(frozen=True)
class ParallelConfig:
    """Layout of a training step. No value here changes the gradients (beyond rounding).

    Attributes:
        pipeline_stages: ranks that one copy of the reader is spread over.
        chunks: stages that each of these ranks holds: more than one for interleaved, any number for zero_bubble.
        data_replicas: copies of the pipeline, each taking an equal share of the global batch.
        num_microbatches: pieces that each replica's share of the batch is cut into.
        schedule: order of forward and backward passes over the micro-batches.
        plan: a plan.json to use instead of the traced one; empty: trace and partition.
        objective: what the automatic cut minimises: step time or peak memory of a rank.
        pins: blocks that must be the first of their stage.
        capacity_bytes: most memory a rank may need, by the planner's count; null: any.
        cluster: YAML file that says what connects the ranks and what they can hold (docs/pipeline.md); empty:
            sending takes no time.
        towers: rows of the retriever's towers are dealt out over ranks that each hold all of it, or piped through
            ranks that each hold a part, which is for towers too large for one device.
        verify: proof before step 1: compare loss and every gradient with one device running
            the whole batch (``full``), with the same cuts and a single micro-batch (``staged``),
            with a smaller model of the same program (``shrunk``), or not (``off``).
        verify_tolerance: largest error accepted by ``verify`` (relative; see docs/pipeline.md).
        trace_cache: folder where traces are kept, and read while program, batch, machine and code are the same
            (docs/lineage.md); empty: trace anew.
        timeline: draw the last step, expected and measured, into timeline.png of the run folder.
        timeout_s: longest wait for another rank before giving up (seconds).
    """

    pipeline_stages: int = 1
    chunks: int = 1
    data_replicas: int = 1
    num_microbatches: int = 4
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    plan: str = ""
    objective: Literal["speed", "memory"] = "speed"
    pins: tuple[str, ...] = ()
    capacity_bytes: float | None = None
    cluster: str = ""
    towers: Literal["dealt", "piped"] = "dealt"
    verify: Literal["off", "full", "staged", "shrunk"] = "full"
    verify_tolerance: float = 1e-4
    trace_cache: str = ""
    timeline: bool = True
    timeout_s: int = 300

    def __post_init__(self) -> None:
        for name in ("pipeline_stages", "chunks", "data_replicas", "num_microbatches", "timeout_s"):
            if getattr(self, name) < 1:
                raise ValueError(f"parallel.{name} is {getattr(self, name)}; it must be at least 1")
        if self.capacity_bytes is not None and not self.capacity_bytes > 0:
            raise ValueError(f"parallel.capacity_bytes is {self.capacity_bytes}; it must be above 0 (or null)")
        if self.schedule != "zero_bubble" and (self.schedule == "interleaved") != (self.chunks > 1):
            raise ValueError(
                f"parallel.chunks is {self.chunks} with parallel.schedule {self.schedule}; interleaved needs 2 or more "
                "stages a rank, zero_bubble 1 or more, the others run 1"
            )
        if self.schedule == "1f1b" and self.num_microbatches < self.pipeline_stages:
            raise ValueError(
                f"parallel.num_microbatches is {self.num_microbatches}, fewer than the "
                f"{self.pipeline_stages} stages of parallel.pipeline_stages; 1f1b needs at least as many "
                "(or use --parallel.schedule gpipe)"
            )
        rounds = max(1, self.num_microbatches // self.pipeline_stages)
        if self.schedule in LOOPED and self.num_microbatches % rounds:
            raise ValueError(
                f"parallel.num_microbatches is {self.num_microbatches}; {self.schedule} on {self.pipeline_stages} "
                f"ranks (parallel.pipeline_stages) needs a multiple of {rounds}; a multiple of "
                f"{self.pipeline_stages} always is right"
            )

    @property
    def num_stages(self) -> int:
        """Stages in all."""
        return self.pipeline_stages * self.chunks
