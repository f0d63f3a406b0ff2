"""The ranks that answer, and what this one holds of the model: the weights of its own stages, nothing else.

Answering has a layout of its own, whatever layout trained: a checkpoint has global names, so each rank makes the model
without memory, gives memory to the parameters of its stages, and reads just those. A model that fits on no single
device can so be evaluated. The retriever's towers are whole on every rank (``dealt``) or in stages as well (``piped``).

Embeddings are made of the same rows together on every layout (`rag_mm.evaluate.retrieval`), so that no layout moves
their last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from data.document_store import DocumentStore
from pipeline import BlockProgram, Pipeline, Plan
from pipeline.cut_search import search
from pipeline.ghosts import give_memory
from rag_mm.mesh import Mesh
from rag_mm.model import Model
from rag_mm.reader.fusion import answering_program
from rag_mm.tower_program import EMBEDDING, buffers_here, saved_buffers, tower_program
from retriever.embed import document_hash, stored_features, tensor_hashes
from retriever.encoder import DualEncoder, EncoderSide, Features


@dataclass(frozen=True)
class LayoutConfig:
    """The ranks that answer. No value here changes a prediction.

    Attributes:
        pipeline_stages: ranks that one copy of the reader is spread over.
        data_replicas: copies that share out the questions.
        towers: the retriever's towers are whole on every rank (dealt), or spread over the stages too (piped).
        plan: a plan.json that says where the reader is cut; empty: the run's own if it has as many ranks, else stages
            with about equal parameters.
        timeout_s: longest wait for another rank before giving up (seconds).
    """

    pipeline_stages: int = 1
    data_replicas: int = 1
    towers: Literal["dealt", "piped"] = "dealt"
    plan: str = ""
    timeout_s: int = 300

    def __post_init__(self) -> None:
        for name in ("pipeline_stages", "data_replicas", "timeout_s"):
            if getattr(self, name) < 1:
                raise ValueError(f"parallel.{name} is {getattr(self, name)}; it must be at least 1")
        if self.towers not in ("dealt", "piped"):
            raise ValueError(f"parallel.towers is {self.towers!r}; allowed: dealt, piped")

    @property
    def num_ranks(self) -> int:
        return self.pipeline_stages * self.data_replicas


class Layout:
    """One rank of those that answer.

    Args:
        model: whole, or without memory (`rag_mm.model.empty_model`), which its stages then get here.
        plan: of the answering program.
        piped: spread the towers over the stages.

    Attributes:
        reader: the answering program on this replica's stages.
        encoder: makes features; embeds by itself only where it is whole.
        searches: whether this rank searches the index for its replica.
    """

    def __init__(self, model: Model, mesh: Mesh, plan: Plan, *, piped: bool = False, timeout_s: float = 300.0) -> None:
        self.mesh, self.encoder = mesh, model.encoder
        program = answering_program(model.reader)
        plan.validate(program)
        _hold(program, plan, rank=mesh.stage, everywhere=())
        self.reader = Pipeline(program, plan, group=mesh.pipeline, timeout_s=timeout_s)
        self._towers: dict[EncoderSide, Pipeline] = {}
        if piped and mesh.num_stages > 1:
            programs = {side: tower_program(side).eval() for side in self.encoder.sides()}
            cut = smallest_parts(next(iter(programs.values())), mesh.num_stages)
            for towers in programs.values():
                _hold(towers, cut, rank=mesh.stage, everywhere=(self.encoder,))
            names = {id(p): n for n, p in self.encoder.named_parameters()}
            self._towers = {
                side: Pipeline(towers, cut, group=mesh.pipeline, timeout_s=timeout_s)
                for side, towers in programs.items()
            }
            self._encoder_here = {
                names[id(p)]: p.detach() for towers in self._towers.values() for p in towers.parameters_here.values()
            }
            self._encoder_here["log_scale"] = self.encoder.log_scale.detach()
            for towers in programs.values():
                self._encoder_here |= saved_buffers(self.encoder, buffers_here(towers, cut, mesh.stage))
        else:
            give_memory([self.encoder], list(self.encoder.state_dict(keep_vars=True).values()))
            self._encoder_here = dict(self.encoder.state_dict())
        self._weights: str | None = None

    @classmethod
    def whole(cls, model: Model) -> Layout:
        """Everything on this process."""
        program = answering_program(model.reader)
        return cls(model, Mesh(num_stages=1, num_replicas=1), Plan.from_cuts(program, []))

    @property
    def searches(self) -> bool:
        return self.mesh.stage == 0

    def tensors_here(self) -> dict[str, Tensor]:
        """What this rank holds, under the names it has in checkpoints; writing to them changes the model."""
        reader = {f"reader.{name}": p.detach() for name, p in self.reader.parameters_here.items()}
        return reader | {f"retriever.{name}": tensor for name, tensor in self._encoder_here.items()}

    def document_hash(self) -> str:
        """Of the weights that documents are embedded with (a collective where they are spread)."""
        return document_hash(self._hashes())

    def _hashes(self) -> dict[str, str]:
        hashes = tensor_hashes(self._encoder_here)
        if not self._towers:
            return hashes
        return {name: digest for theirs in self.mesh.gather(hashes) for name, digest in theirs.items()}

    @torch.no_grad()
    def embed(self, features: Features) -> Tensor:
        """Embeddings (N, E), on every rank of a replica, all of which call it."""
        if not self._towers:
            return self.encoder(features)
        towers = self._towers[self.encoder.side_of(features)]
        return towers.forward(features).outputs_everywhere()[EMBEDDING]

    def over_stages(self, value: Any) -> Any:
        """The Python value of the rank that searches, on all ranks of its replica."""
        if self.mesh.num_stages == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self.mesh.pipeline, group_src=0)
        return box[0]

    def over_replicas(self, value: Any) -> list[Any]:
        """The Python values of all replicas, in order, on the ranks of the same stage."""
        if self.mesh.num_replicas == 1:
            return [value]
        values: list[Any] = [None] * self.mesh.num_replicas
        dist.all_gather_object(values, value, group=self.mesh.replicas)
        return values

    def embed_documents(
        self,
        store: DocumentStore,
        ids: Sequence[str] | None,
        *,
        image_size: int,
        batch_size: int,
        progress: Callable[[int], None] | None = None,
    ) -> Tensor | None:
        """Embeddings (len(ids), E) of documents, on the first rank; every rank calls it, the others without ids.

        Batches are dealt out over the replicas one by one, so their rows are those of a single process.
        """
        ids = self.mesh.broadcast(ids)
        assert ids is not None
        before = self.encoder.featurizer.truncated
        starts, count = list(range(0, len(ids), batch_size)), self.mesh.num_replicas
        found: list[Tensor] = []
        for first in range(0, len(starts), count):
            mine: Tensor | None = None
            if first + self.mesh.replica < len(starts):
                start = starts[first + self.mesh.replica]
                batch = ids[start : start + batch_size]
                mine = self.embed(stored_features(self.encoder, store, batch, image_size=image_size))
            parts = [part for part in self._to_first(mine if self.searches else None) if part is not None]
            found += parts
            if progress is not None and parts:
                progress(sum(map(len, parts)))
        told = self._to_first((self.encoder.featurizer.truncated - before, store.bad.found))
        if not self.mesh.is_first:
            return None
        for truncated, damaged in told[self.mesh.num_stages :: self.mesh.num_stages]:  # one rank of each other replica
            self.encoder.featurizer.count_truncated(truncated)
            for name, problem in damaged.items():
                store.condemn(name, problem)
        return torch.cat([torch.zeros(0, self.encoder.dim), *found])

    def _to_first(self, value: Any) -> list[Any]:
        """Every rank's value, on the first."""
        if self.mesh.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.mesh.size if self.mesh.is_first else None
        dist.gather_object(value, values, dst=0)
        return values or []


def answering_plan(program: BlockProgram, config: LayoutConfig, run_dir: Path) -> Plan:
    """Where an answering program is cut.

    Raises:
        FileNotFoundError, ValueError: if a given plan does not exist or fit, or there are more stages than blocks.
    """
    if config.plan:
        path = Path(config.plan)
        if not path.is_file():
            raise FileNotFoundError(f"parallel.plan is {str(path)!r}, which is not a file")
        plan = Plan.read(path)
        if plan.num_ranks != config.pipeline_stages:
            raise ValueError(
                f"parallel.pipeline_stages is {config.pipeline_stages}, but the plan {path} is for {plan.num_ranks} "
                "ranks; make them equal"
            )
        plan.validate(program)
        return plan
    own = run_dir / "plan.json"
    if config.pipeline_stages > 1 and own.exists():
        plan = Plan.read(own)
        names = [name for stage in plan.stages for name in stage.blocks]
        if plan.num_ranks == config.pipeline_stages and names == [block.name for block in program.blocks]:
            return plan
    return smallest_parts(program, config.pipeline_stages)


def smallest_parts(program: BlockProgram, num_stages: int) -> Plan:
    """The plan whose largest stage has the fewest parameters (shared ones count on each stage that has them).

    Raises:
        ValueError: if there are more stages than blocks.
    """
    blocks = program.blocks
    if num_stages > len(blocks):
        raise ValueError(
            f"parallel.pipeline_stages is {num_stages}; this model has {len(blocks)} blocks, so that is the most"
        )
    size = {name: parameter.numel() for name, parameter in program.named_parameters_global().items()}
    held = [set(program.block_parameters(block.name)) for block in blocks]
    cost = numpy.zeros((len(blocks) + 1, len(blocks) + 1))
    for first in range(len(blocks)):
        names: set[str] = set()
        for last in range(first + 1, len(blocks) + 1):
            names |= held[last - 1]
            cost[first, last] = sum(size[name] for name in names)
    order = numpy.arange(len(blocks) + 1)
    valid = order[:, None] < order[None, :]
    _, bounds = search(cost, [valid] * num_stages, minimax=True)
    return Plan.from_cuts(program, bounds[1:-1], schedule="gpipe")


def _hold(program: BlockProgram, plan: Plan, *, rank: int, everywhere: Sequence[DualEncoder]) -> None:
    """Give memory to what this rank's stages need, in the program and in the encoders it is made of."""
    needed: list[Tensor] = [encoder.log_scale for encoder in everywhere]
    for stage in plan.stages_of(rank):
        for name in plan.stages[stage].blocks:
            module = program.blocks[program.index(name)].module
            needed += [*module.parameters(), *module.buffers()]
    give_memory([program, *everywhere], needed)
