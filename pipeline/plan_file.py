"""The plan: which blocks each stage runs, the schedule, and what that is expected to cost.

A plan is a small JSON file that a person can read, edit and hand back, so it names blocks in full
instead of giving cut indices: longer, but still right (or refused) after the model has changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pipeline.program import BlockProgram, nearest

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
LOOPED = ("interleaved", "zero_bubble")  # several stages a rank


@dataclass(frozen=True)
class StagePlan:
    """One stage. Times are those of one micro-batch (0 where nothing was traced).

    Attributes:
        blocks: names of its blocks, in program order.
        forward_s, backward_s: predicted compute time of a micro-batch.
        memory_bytes: predicted peak of parameters, gradients, saved activations and receive buffers.
        send_bytes: bytes sent to the next stage for a micro-batch (0 for the last).
        return_bytes: bytes of gradients that come back from there; -1 stands for as many as were sent.
    """

    blocks: tuple[str, ...]
    forward_s: float = 0.0
    backward_s: float = 0.0
    memory_bytes: int = 0
    send_bytes: int = 0
    return_bytes: int = -1

    def __post_init__(self) -> None:
        if self.return_bytes < 0:
            object.__setattr__(self, "return_bytes", self.send_bytes)


@dataclass(frozen=True)
class Plan:
    """A complete layout. ``step_s`` and ``bubble`` (idle share of the ranks' time) are predictions.

    Attributes:
        stages: consecutive parts of the model; stage s runs on rank ``s % num_ranks``.
        num_ranks: ranks of the pipeline; 0 stands for one rank a stage. Fewer ranks than stages is what the
            schedules ``interleaved`` and ``zero_bubble`` are for.
        recomputed: recomputable blocks whose results are computed on every stage that reads them, not sent.
        reduce_s: the part of ``step_s`` in which parameters of several ranks are all-reduced.
    """

    stages: tuple[StagePlan, ...]
    schedule: str
    num_microbatches: int
    step_s: float = 0.0
    bubble: float = 0.0
    num_ranks: int = 0
    recomputed: tuple[str, ...] = ()
    reduce_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("plan: stages is empty; it must list at least one stage")
        if not self.num_ranks:
            object.__setattr__(self, "num_ranks", len(self.stages))
        check_schedule(
            self.schedule,
            num_microbatches=self.num_microbatches,
            num_ranks=self.num_ranks,
            num_stages=len(self.stages),
        )

    @classmethod
    def from_cuts(
        cls,
        program: BlockProgram,
        cuts: Sequence[int],
        *,
        schedule: str = "1f1b",
        num_microbatches: int = 1,
        num_ranks: int = 0,
        recomputed: Sequence[str] = (),
    ) -> Plan:
        """A plan with stages starting at blocks 0 and ``cuts`` (increasing), without predictions."""
        bounds = [0, *cuts, len(program.blocks)]
        if any(a >= b for a, b in pairwise(bounds)):
            raise ValueError(f"cuts {list(cuts)} must increase and lie in 1..{len(program.blocks) - 1}")
        names = [block.name for block in program.blocks]
        stages = tuple(StagePlan(tuple(names[a:b])) for a, b in pairwise(bounds))
        return cls(stages, schedule, num_microbatches, num_ranks=num_ranks, recomputed=tuple(recomputed))

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that run on a rank of the pipeline, in order."""
        return tuple(range(rank, self.num_stages, self.num_ranks))

    @property
    def last_rank(self) -> int:
        """The rank that runs the last stage."""
        return (self.num_stages - 1) % self.num_ranks

    @property
    def hash(self) -> str:
        """16 hex digits over what changes the computation's layout (not over the predictions)."""
        what: list[Any] = [[list(s.blocks) for s in self.stages], self.schedule, self.num_microbatches]
        if self.num_ranks != self.num_stages or self.recomputed:
            what += [self.num_ranks, list(self.recomputed)]
        return hashlib.blake2b(json.dumps(what).encode(), digest_size=8).hexdigest()

    def bounds(self) -> tuple[tuple[int, int], ...]:
        """(first, last) block index of each stage."""
        result, first = [], 0
        for stage in self.stages:
            result.append((first, first + len(stage.blocks)))
            first += len(stage.blocks)
        return tuple(result)

    def validate(self, program: BlockProgram) -> None:
        """Check that the stages are the program's blocks, all of them, once and in order.

        Raises:
            ValueError: naming the first block that is unknown, missing or out of place.
        """
        expected = [block.name for block in program.blocks]
        planned = [name for stage in self.stages for name in stage.blocks]
        for i, stage in enumerate(self.stages):
            if not stage.blocks:
                raise ValueError(f"plan: stage {i} has no blocks; give it one or remove the stage")
            for name in stage.blocks:
                if name not in expected:
                    raise ValueError(f"plan: stage {i} names unknown block {name!r}{nearest(name, expected)}")
                if planned.count(name) > 1:
                    raise ValueError(f"plan: block {name!r} occurs {planned.count(name)} times; it must occur once")
        for name in expected:
            if name not in planned:
                raise ValueError(f"plan: block {name!r} of the model is on no stage")
        for place, (name, right) in enumerate(zip(planned, expected, strict=True)):
            if name != right:
                raise ValueError(
                    f"plan: block {name!r} is at position {place}, where the model has {right!r}; "
                    "stages must follow the model's order"
                )

        for name in self.recomputed:
            if name not in expected:
                raise ValueError(f"plan: recomputed names unknown block {name!r}{nearest(name, expected)}")
            if not program.blocks[program.index(name)].recomputable:
                raise ValueError(f"plan: recomputed names block {name!r}, which is not recomputable in the model")
            reads = program.blocks[program.index(name)].reads
            for other in program.blocks:
                if other.recomputable and other.name not in self.recomputed and set(other.writes) & set(reads):
                    raise ValueError(
                        f"plan: recomputed has {name!r}, but not {other.name!r}, whose results it reads; add that one "
                        "or leave both out"
                    )

    def to_json(self) -> str:
        """The plan as JSON (schema: docs/pipeline.md)."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def read(cls, path: str | Path) -> Plan:
        """Read a plan's file.

        Raises:
            OSError: if there is no such file or it cannot be read.
            ValueError: names the file, and the field that is unknown, missing or mistyped.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 (byte {error.start})") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan.

        Raises:
            ValueError: naming the unknown, missing or mistyped field.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"plan: not valid JSON ({error})") from error
        fields = {"stages": list, "schedule": str, "num_microbatches": int, "step_s": float, "bubble": float}
        later = {"num_ranks": int, "recomputed": list, "reduce_s": float}  # absent in plans written by hand
        given = {key: kind for key, kind in later.items() if isinstance(data, dict) and key in data}
        values = _checked(data, {**fields, **given}, "plan")
        values["recomputed"] = tuple(values.get("recomputed", ()))
        stage_fields = {
            "blocks": list, "forward_s": float, "backward_s": float, "memory_bytes": int, "send_bytes": int,
        }  # fmt: skip
        stages = []
        for i, stage in enumerate(values.pop("stages")):
            known = {"return_bytes": int} if isinstance(stage, dict) and "return_bytes" in stage else {}
            entry = _checked(stage, {**stage_fields, **known}, f"plan: stage {i}")
            if not all(isinstance(name, str) for name in entry["blocks"]):
                raise ValueError(f"plan: stage {i}: blocks must be a list of block names")
            stages.append(StagePlan(**{**entry, "blocks": tuple(entry["blocks"])}))
        return cls(tuple(stages), **values)


def check_schedule(schedule: str, *, num_microbatches: int, num_ranks: int, num_stages: int) -> None:
    """Refuse what a schedule cannot do.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"plan: schedule is {schedule!r}; allowed: {', '.join(SCHEDULES)}")
    if num_microbatches < 1:
        raise ValueError(f"plan: num_microbatches is {num_microbatches}; it must be at least 1")
    if not 1 <= num_ranks <= num_stages:
        raise ValueError(f"plan: num_ranks is {num_ranks}; {num_stages} stages need 1 to {num_stages}")
    if schedule not in LOOPED and num_ranks != num_stages:
        raise ValueError(
            f"plan: {num_stages} stages on {num_ranks} ranks need the schedule interleaved; {schedule} runs one a rank"
        )
    if schedule == "1f1b" and num_microbatches < num_ranks:
        raise ValueError(
            f"plan: num_microbatches is {num_microbatches}, fewer than the {num_ranks} stages; "
            "1f1b needs at least as many (or use the schedule gpipe)"
        )
    if schedule in LOOPED:
        if num_stages % num_ranks:
            raise ValueError(
                f"plan: {num_stages} stages do not divide over {num_ranks} ranks; {schedule} gives each rank as many"
            )
        rounds = max(1, num_microbatches // num_ranks)
        if num_microbatches % rounds:
            raise ValueError(
                f"plan: num_microbatches is {num_microbatches}; {schedule} on {num_ranks} ranks needs a multiple of "
                f"{rounds} (max(1, num_microbatches // ranks)); a multiple of {num_ranks} always is one"
            )


def _checked(data: Any, fields: Mapping[str, type], where: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ValueError(f"{where}: must be a JSON object, not {type(data).__name__}")
    for key in data:
        if key not in fields:
            raise ValueError(f"{where}: unknown field {key!r}{nearest(key, fields)}; allowed: {', '.join(fields)}")
    result = {}
    for key, kind in fields.items():
        if key not in data:
            raise ValueError(f"{where}: field {key!r} is missing")
        value = data[key]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{where}: {key} is {value!r}; it must be of type {kind.__name__}")
        result[key] = value
    return result
