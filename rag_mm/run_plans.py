"""How a run is cut: the reader's and the towers' plans, made anew or taken up from the run folder.

A resumed run on the same layout keeps its plans, since cutting anew could change the last bits of its numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from data.command_line import dump
from data.dataset import Dataset
from pipeline import Pipeline, Plan
from rag_mm.config import Config
from rag_mm.mesh import Mesh
from rag_mm.model import Model
from rag_mm.planning import kept_plan, make_towers_plan, plan_reader
from rag_mm.step import JointStep
from rag_mm.towers import DealtTowers, PipedTowers, Towers
from rag_mm.vision_choice import Vision
from retriever.durable_files import replace_text


@dataclass(frozen=True)
class RunPlans:
    """Cuts the parts of a run; its methods are collectives.

    Attributes:
        resumes: whether the run goes on from a checkpoint.
        say: prints a line, on the first rank.
    """

    config: Config
    mesh: Mesh
    resumes: bool
    say: Callable[[str], None]

    @property
    def run_dir(self) -> Path:
        return Path(self.config.run_dir)

    def make_pipeline(self, model: Model, joint: JointStep) -> tuple[Pipeline, Vision | None]:
        """Cut the reader by what a batch like those it will read costs, or as it was cut before."""
        model.reader.train()
        plan, vision, said = plan_reader(self.config, model.reader, joint, self.mesh, saved=self._saved_plan())
        if self.mesh.is_first:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            replace_text(self.run_dir / "config.yaml", dump(self.config))
            replace_text(self.run_dir / "plan.json", plan.to_json())
        if said:
            self.say(said)
        for i, stage in enumerate(plan.stages):
            times = f"forward {stage.forward_s * 1e3:.1f} ms, backward {stage.backward_s * 1e3:.1f} ms a micro-batch"
            self.say(f"stage {i}: {stage.blocks[0]} .. {stage.blocks[-1]} ({times})")
        program = model.reader if vision is None else vision.program
        parallel = self.config.parallel
        pipeline = Pipeline(
            program, plan, group=self.mesh.pipeline, timeout_s=parallel.timeout_s, record=parallel.timeline
        )
        return pipeline, vision

    def make_towers(self, model: Model, dataset: Dataset) -> Towers:
        """The retriever's towers, dealt out or piped, as ``parallel.towers`` says."""
        parallel = self.config.parallel
        if parallel.towers == "dealt":
            return DealtTowers(model.encoder, self.mesh)
        path = self.run_dir / "towers.json"
        saved = Plan.read(path).to_json() if self.mesh.is_first and self.resumes and path.exists() else None
        text = self.mesh.broadcast(saved)
        plan = None if text is None else Plan.from_json(text)
        layout = (parallel.pipeline_stages, parallel.num_microbatches)
        if plan is not None and (plan.num_ranks, plan.num_microbatches) == layout:
            self.say(kept_plan(self.config, "towers.json"))
        else:
            plan = make_towers_plan(self.config, model.encoder, dataset.store, self.mesh)
        if self.mesh.is_first:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            replace_text(path, plan.to_json())
        return PipedTowers(model.encoder, self.mesh, plan, timeout_s=parallel.timeout_s)

    def _saved_plan(self) -> Plan | None:
        """The reader's plan of the run that is resumed, if it is for this layout."""
        path, parallel = self.run_dir / "plan.json", self.config.parallel
        saved = None
        if self.mesh.is_first and self.resumes and path.exists() and not parallel.plan:
            plan = Plan.read(path)
            if (plan.num_ranks, plan.num_stages, plan.schedule, plan.num_microbatches) == (
                parallel.pipeline_stages, parallel.num_stages, parallel.schedule, parallel.num_microbatches
            ):  # fmt: skip
                saved = path.read_text()
        text = self.mesh.broadcast(saved)
        return None if text is None else Plan.from_json(text)
