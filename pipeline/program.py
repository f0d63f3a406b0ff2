"""A model as a straight line of blocks over named tensors.

Why: a pipeline can be cut between any two blocks once it is known which named tensors are alive
there. Liveness is computed here, once, and everything else (tracing, partition, runtime) asks for it.
The price is that control flow between blocks is gone: a model is a fixed list, and what branches must
branch inside a block.

A tensor's *axis* says what its leading dimension counts: ``"sample"`` (B rows, the default), ``"pair"``
(B*k rows; the k rows of a sample are adjacent), ``"microbatch"`` (M*U rows, U for each of M micro-batches: what the
samples of a micro-batch share, such as its different documents) or ``None`` (no sample dimension: every micro-batch
gets the whole tensor). Parameters are named ``block.param`` by the first block that holds them,
whatever stage that block lives on.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from pipeline import keyed

AXES = ("sample", "pair", "microbatch", None)
SAMPLE_ID = "sample_id"


@dataclass(frozen=True)
class Block:
    """One step of a program: ``module(*[env[r] for r in reads])`` gives the tensors named in ``writes``.

    Attributes:
        name: unique; dots group blocks (``encoder.3``). Parameters are named ``<name>.<parameter>``.
        module: returns one tensor, or a tuple with one tensor for each entry of ``writes``.
        reads: batch inputs or tensors written by earlier blocks, in the order of the module's arguments.
        writes: at least one name; writing a name again replaces it for later blocks.
        recomputable: what it writes may be computed again on every stage that reads it instead of being sent
            there (rotary tables, position biases); the plan says which of the two is done. Such a block reads only
            batch inputs and what other recomputable blocks write, and nobody writes its names again.
    """

    name: str
    module: nn.Module
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    recomputable: bool = False

    def __post_init__(self) -> None:
        if not self.name or any(not part.isidentifier() and not part.isdigit() for part in self.name.split(".")):
            raise ValueError(
                f"block name {self.name!r} must be identifiers or numbers joined by dots, such as 'encoder.3'"
            )
        for field in ("reads", "writes"):
            if not isinstance(getattr(self, field), tuple):
                raise ValueError(f"block {self.name!r}: {field} must be a tuple of names, not {getattr(self, field)!r}")
        if not self.writes or len(set(self.writes)) != len(self.writes):
            raise ValueError(f"block {self.name!r} writes {self.writes}; it must write at least one name, each once")


class BlockProgram(nn.Module):
    """A list of blocks, the batch inputs they may read and the outputs they must leave.

    ``program(env)`` runs all blocks. Modules are registered under the block names, so ``state_dict``,
    ``to`` and ``train`` work as for any module.

    Args:
        blocks: executed in order.
        inputs: names of the batch inputs (never sent between stages; each stage is given its own).
            ``sample_id`` (int64, B) may be listed without any block reading it; keyed randomness uses it.
        outputs: names left at the end, each with a sample or pair axis.
        axes: leading axis by name; names not listed have ``"sample"``.

    Raises:
        ValueError: on unknown, unread or duplicate names.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        *,
        inputs: Sequence[str],
        outputs: Sequence[str],
        axes: Mapping[str, str | None] | None = None,
    ) -> None:
        super().__init__()
        self.blocks = tuple(blocks)
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.axes = dict(axes or {})
        self._index = {block.name: i for i, block in enumerate(self.blocks)}
        self._check()
        for block in self.blocks:
            self._register(block)
        self._live = self._liveness()
        self._check_unused()

    def _check(self) -> None:
        if not self.blocks:
            raise ValueError("a program needs at least one block")
        if not self.outputs:
            raise ValueError("a program needs at least one output")
        for what, names in (("input", self.inputs), ("output", self.outputs)):
            twice = sorted({n for n in names if names.count(n) > 1})
            if twice:
                raise ValueError(f"{what} {twice[0]!r} is listed twice")
        block_names = [block.name for block in self.blocks]
        for name in block_names:
            if block_names.count(name) > 1:
                raise ValueError(
                    f"block name {name!r} is used {block_names.count(name)} times; block names must be unique"
                )
            for other in block_names:
                if other.startswith(name + "."):
                    raise ValueError(
                        f"block names {name!r} and {other!r}: one is a prefix of the other, "
                        "so their parameter names could collide; rename one"
                    )
        known = set(self.inputs)
        for block in self.blocks:
            for name in block.reads:
                if name not in known:
                    later = any(name in b.writes for b in self.blocks)
                    hint = (
                        f"; it is only written by a later block or itself ({name!r})" if later else nearest(name, known)
                    )
                    raise ValueError(f"block {block.name!r} reads unknown name {name!r}{hint}")
            known.update(block.writes)
        self._check_recomputable()
        for name in self.outputs:
            if name not in known:
                raise ValueError(f"output {name!r} is written by no block{nearest(name, known)}")
        for name, axis in self.axes.items():
            if name not in known:
                raise ValueError(f"axes names unknown tensor {name!r}{nearest(name, known)}")
            if axis not in AXES:
                raise ValueError(f"axis of {name!r} is {axis!r}; allowed: 'sample', 'pair', 'microbatch', None")
        for name in self.outputs:
            if not self.has_samples(name):
                raise ValueError(
                    f"output {name!r} has no sample axis, so the micro-batches' values cannot be joined; "
                    "write one row a sample instead"
                )
        if SAMPLE_ID in self.inputs and self.axis(SAMPLE_ID) != "sample":
            raise ValueError(f"axis of {SAMPLE_ID!r} must be 'sample'")

    def _check_recomputable(self) -> None:
        free = set(self.inputs)
        for i, block in enumerate(self.blocks):
            if not block.recomputable:
                free -= set(block.writes)
                continue
            for name in block.reads:
                if name not in free:
                    raise ValueError(
                        f"block {block.name!r} is recomputable but reads {name!r}, which a block that is not "
                        "recomputable writes; only batch inputs are on every stage"
                    )
            for other in (*self.blocks[:i], *self.blocks[i + 1 :]):
                for name in set(block.writes) & set(other.writes):
                    raise ValueError(
                        f"block {block.name!r} is recomputable, so {name!r} may not be written by "
                        f"{other.name!r} as well; use another name"
                    )
            for name in set(block.writes) & set(self.inputs):
                raise ValueError(f"block {block.name!r} is recomputable and may not replace the input {name!r}")
            free |= set(block.writes)

    def _register(self, block: Block) -> None:
        parent: nn.Module = self
        *groups, last = block.name.split(".")
        for group in groups:
            if group not in parent._modules:
                self._reserve(parent, group, block)
                parent.add_module(group, nn.Module())
            parent = parent.get_submodule(group)
        self._reserve(parent, last, block)
        parent.add_module(last, block.module)

    @staticmethod
    def _reserve(parent: nn.Module, name: str, block: Block) -> None:
        if hasattr(parent, name):
            raise ValueError(f"block name {block.name!r}: {name!r} is an attribute of torch modules; rename the block")

    def _liveness(self) -> tuple[frozenset[str], ...]:
        live = set(self.outputs)
        at = [frozenset(live)]
        for block in reversed(self.blocks):
            live = (live - set(block.writes)) | set(block.reads)
            at.append(frozenset(live))
        return tuple(reversed(at))

    def _check_unused(self) -> None:
        for i, block in enumerate(self.blocks):
            for name in block.writes:
                if name not in self._live[i + 1]:
                    raise ValueError(
                        f"block {block.name!r} writes {name!r}, which no later block reads and which is no output"
                    )
        for name in self.inputs:
            if name not in self._live[0] and name != SAMPLE_ID:
                raise ValueError(f"input {name!r} is read by no block; remove it from inputs")

    def axis(self, name: str) -> str | None:
        """Leading axis of a named tensor."""
        return self.axes.get(name, "sample")

    def has_samples(self, name: str) -> bool:
        """Whether each row of a named tensor belongs to one sample."""
        return self.axis(name) in ("sample", "pair")

    def index(self, name: str) -> int:
        """Position of a block.

        Raises:
            ValueError: if there is no such block; suggests the nearest name.
        """
        if name not in self._index:
            raise ValueError(f"unknown block {name!r}{nearest(name, self._index)}")
        return self._index[name]

    def carry(self, cut: int, *, recomputed: Collection[str] = ()) -> tuple[str, ...]:
        """Computed tensors that must cross the cut before block ``cut``, in order of first writing.

        Batch inputs never travel, nor does what the blocks named in ``recomputed`` write.
        ``carry(len(blocks))`` is the outputs.
        """
        assert 0 <= cut <= len(self.blocks)
        sent = (block for block in self.blocks[:cut] if block.name not in recomputed)
        written = dict.fromkeys(name for block in sent for name in block.writes)
        if cut == len(self.blocks):
            return self.outputs
        return tuple(name for name in written if name in self._live[cut])

    def rerun(self, first: int, last: int, *, recomputed: Collection[str]) -> tuple[Block, ...]:
        """Blocks before ``first`` that a stage of blocks ``[first, last)`` computes again, in program order."""
        needed = set(self._read_from_outside(first, last))
        again: list[Block] = []
        for block in reversed(self.blocks[:first]):
            if block.name in recomputed and needed & set(block.writes):
                again.append(block)
                needed |= set(block.reads)
        return tuple(reversed(again))

    def _read_from_outside(self, first: int, last: int) -> tuple[str, ...]:
        """Names that blocks ``[first, last)`` read (or leave as outputs) and do not write before."""
        needed: dict[str, None] = {}
        written: set[str] = set()
        for block in self.blocks[first:last]:
            needed.update(dict.fromkeys(name for name in block.reads if name not in written))
            written.update(block.writes)
        if last == len(self.blocks):
            needed.update(dict.fromkeys(name for name in self.outputs if name not in written))
        return tuple(needed)

    def inputs_of(self, first: int, last: int, *, recomputed: Collection[str] = ()) -> tuple[str, ...]:
        """Batch inputs that a stage of blocks ``[first, last)`` reads, and ``sample_id`` if the program has it."""
        written = {name for block in self.blocks[:first] for name in block.writes}
        again = self.rerun(first, last, recomputed=recomputed)
        computed = {name for block in again for name in block.writes}
        reads = (*(name for block in again for name in block.reads), *self._read_from_outside(first, last))
        needed = dict.fromkeys(name for name in reads if name not in written and name not in computed)
        if SAMPLE_ID in self.inputs:
            needed[SAMPLE_ID] = None
        return tuple(needed)

    def run(
        self,
        env: Mapping[str, Tensor],
        first: int = 0,
        last: int | None = None,
        *,
        recomputed: Collection[str] = (),
    ) -> dict[str, Tensor]:
        """Run blocks ``[first, last)`` on the tensors of ``env``; gives what is alive afterwards.

        Args:
            env: the batch inputs of these blocks and the carry of cut ``first``.
            recomputed: names of blocks that are computed again here instead of having been sent here.

        Raises:
            ValueError: if a block returns another number of tensors than it declares.
        """
        last = len(self.blocks) if last is None else last
        state = dict(env)
        ids = state.get(SAMPLE_ID)
        for block in (*self.rerun(first, last, recomputed=recomputed), *self.blocks[first:last]):
            with keyed.block(block.name, ids=ids):
                result = block.module(*[state[name] for name in block.reads])
            values = (result,) if isinstance(result, Tensor) else result
            if not isinstance(values, tuple | list) or len(values) != len(block.writes):
                got = type(values).__name__ if not isinstance(values, tuple | list) else f"{len(values)} values"
                raise ValueError(f"block {block.name!r} returned {got}; it must return {block.writes}")
            state.update(zip(block.writes, values, strict=True))
        return {name: state[name] for name in self.carry(last, recomputed=recomputed)}

    def forward(self, env: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the whole program; gives the outputs by name."""
        return self.run(env)

    def _members(self, blocks: Sequence[Block], kind: str) -> Iterator[tuple[str, Tensor]]:
        for block in blocks:
            yield from getattr(block.module, f"named_{kind}")(prefix=block.name, remove_duplicate=False)

    def _canonical(self, kind: str) -> dict[int, str]:
        names: dict[int, str] = {}
        for name, tensor in self._members(self.blocks, kind):
            names.setdefault(id(tensor), name)
        return names

    def named_parameters_global(self) -> dict[str, nn.Parameter]:
        """Every parameter once, under its canonical name: that of the first block that holds it."""
        names = self._canonical("parameters")
        return {names[id(p)]: p for _, p in self._members(self.blocks, "parameters")}  # type: ignore[misc]

    def named_buffers_global(self) -> dict[str, Tensor]:
        """Every buffer once, under its canonical name."""
        names = self._canonical("buffers")
        return {names[id(b)]: b for _, b in self._members(self.blocks, "buffers")}

    def block_parameters(self, block_name: str) -> dict[str, nn.Parameter]:
        """Parameters that one block holds, by canonical name."""
        names = self._canonical("parameters")
        members = self._members([self.blocks[self.index(block_name)]], "parameters")
        return {names[id(p)]: p for _, p in members}  # type: ignore[misc]

    def num_samples(self, batch: Mapping[str, Tensor]) -> int:
        """B of a batch; checks every input's rows against it.

        Raises:
            ValueError: if an input is missing or its rows do not fit its axis.
        """
        names = [n for n in self.inputs if n in batch and self.axis(n) == "sample"]
        if not names:
            raise ValueError("the batch has no input with a sample axis, so its size is unknown")
        leader = SAMPLE_ID if SAMPLE_ID in names else names[0]
        rows = _rows(leader, batch[leader])
        for name in self.inputs:
            axis = self.axis(name)
            if name not in batch or axis is None:
                continue
            n = _rows(name, batch[name])
            if (axis == "sample" and n != rows) or (axis == "pair" and n % rows):
                need = f"{rows}" if axis == "sample" else f"a multiple of {rows}"
                raise ValueError(f"input {name!r} (axis {axis!r}) has {n} rows; {leader!r} says it must be {need}")
        return rows

    def microbatch(self, batch: Mapping[str, Tensor], index: int, count: int) -> dict[str, Tensor]:
        """Rows of micro-batch ``index`` out of ``count`` of every tensor; those without an axis are whole.

        Raises:
            ValueError: if the rows of an axis ``"microbatch"`` do not divide into ``count``.
        """
        return {name: self.slice_rows(name, tensor, index, count) for name, tensor in batch.items()}

    def slice_rows(self, name: str, tensor: Tensor, index: int, count: int) -> Tensor:
        """Rows of one named tensor that belong to micro-batch ``index`` out of ``count``."""
        if self.axis(name) is None:
            return tensor
        if self.axis(name) == "microbatch" and tensor.shape[0] % count:
            raise ValueError(
                f"input {name!r} (axis 'microbatch') has {tensor.shape[0]} rows, which do not divide into {count} "
                "micro-batches; give each as many rows as the one that needs most"
            )
        rows = tensor.shape[0] // count
        return tensor.narrow(0, index * rows, rows)


def _rows(name: str, tensor: Tensor) -> int:
    if tensor.dim() == 0 or tensor.shape[0] == 0:
        raise ValueError(f"input {name!r} has shape {tuple(tensor.shape)}; it needs at least one row (or axis None)")
    return tensor.shape[0]


def nearest(name: str, known: object) -> str:
    """`` (did you mean 'x'?)`` for the known name nearest to ``name``, or an empty string.

    Of equally near ones that which begins alike: ``decoder.0``, not ``encoder.7``, for ``decoder.7``.
    """
    near = difflib.get_close_matches(name, [str(k) for k in known], n=5, cutoff=0.5)  # type: ignore[attr-defined]

    def nearness(other: str) -> tuple[float, int]:
        alike = [a == b for a, b in zip(name, other, strict=False)]
        return difflib.SequenceMatcher(None, other, name).ratio(), [*alike, False].index(False)

    return f" (did you mean {max(near, key=nearness)!r}?)" if near else ""
