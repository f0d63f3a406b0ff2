"""What a trace finds out: the costs and the lineage of each block, as data that can be written and read."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from pipeline.program import nearest


@dataclass(frozen=True)
class BlockProfile:
    """Costs of one block for one micro-batch.

    Attributes:
        forward_s, backward_s: median seconds; a block that trains nothing and whose inputs need no gradient
            has no backward: 0.
        flops, backward_flops: two for a multiply-add.
        parameter_bytes: of all parameters it holds, shared and frozen ones included.
        activation_bytes: storages saved for its backward, without parameters and its inputs' storages.
        written_bytes: of what it writes, where that is not saved (and counted) already.
        lineage: whose rows move an output row: ``sample``, ``group`` or ``batch``.
        stateful: buffers change in the forward.
        mixes: where and how rows of samples mix ("" if they do not).
        ties: canonical parameter name -> its bytes, for parameters that other blocks hold too.
        recomputable: the plan may have it computed again where its results are read (`pipeline.program`).
        reads, writes: names of tensors.
        shared: whole tensors whose rows move only the samples that use them (`pipeline.lineage`).
        frozen_bytes: of its parameters that need no gradient.
        partial_ties: canonical name of the first parameter in a storage -> bytes of that storage which this
            block and another one hold as *different* tensors (views or slices). No stage can keep a copy of
            such memory by itself: blocks with a name in common belong on one stage.
        bytes_moved: bytes that the forward's operations read and write (0 where it was not counted).
        synchronised: nothing but synchronised norms mixes samples or changes buffers.
        changes: paths of the buffers that change in the forward.
    """

    name: str
    forward_s: float
    backward_s: float
    flops: int
    parameter_bytes: int
    activation_bytes: int
    written_bytes: int
    lineage: str
    stateful: bool
    mixes: str
    ties: dict[str, int]
    recomputable: bool = False
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    frozen_bytes: int = 0
    partial_ties: dict[str, int] = field(default_factory=dict)
    backward_flops: int = 0
    bytes_moved: int = 0
    synchronised: bool = False
    changes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Profile:
    """A traced program.

    Attributes:
        carry_bytes: ``[i]`` is what crosses a cut after block i for a micro-batch (0 after the last), nothing
            being recomputed.
        recomputable_carries: ``[i]`` says which part of that recomputable blocks write, by name.
        outputs: names that the program leaves.
        gradient_bytes: ``[i]`` is what comes back over that cut: the carry that needs gradients.
        device: what the times are for: the machine that was measured, or the description they follow from.
        cached: read from a cache instead of traced (not written to JSON, not compared).
    """

    blocks: tuple[BlockProfile, ...]
    carry_bytes: tuple[int, ...]
    num_microbatches: int
    num_samples: int
    recomputable_carries: tuple[dict[str, int], ...] = ()
    outputs: tuple[str, ...] = ()
    gradient_bytes: tuple[int, ...] = ()
    device: str = ""
    cached: bool = field(default=False, compare=False)

    def to_json(self) -> str:
        data = asdict(self)
        del data["cached"]
        return json.dumps(data, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Read what `to_json` wrote.

        Raises:
            ValueError: if it is something else.
        """
        try:
            data = json.loads(text)
            blocks = tuple(BlockProfile(**_tuples(BlockProfile, block)) for block in data.pop("blocks"))
            return cls(blocks=blocks, **_tuples(cls, data))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a profile written by this program ({error})") from error


def _tuples(kind: type, data: dict[str, Any]) -> dict[str, Any]:
    """Lists of JSON as the tuples that the fields are."""
    known = [f.name for f in fields(kind)]
    for name in data:
        if name not in known:
            raise TypeError(f"unknown field {name!r} of {kind.__name__}{nearest(name, known)}")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
