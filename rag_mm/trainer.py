"""Training: configuration in, run folder out. Started again on the same folder, it goes on.

A run folder explains itself: ``config.yaml`` (resolved), ``plan.json``, ``metrics.jsonl``, TensorBoard events,
``index/`` (the versions that training searched) and ``checkpoints/``.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from data.bad_data import BadDataError
from data.command_line import dump
from data.dataset import Dataset
from pipeline.roll_call import RollCall
from rag_mm import checkpoint, launch, run_end
from rag_mm.bad_samples import BadSamples
from rag_mm.bad_steps import BadSteps, BadStepsFile
from rag_mm.code_version import code_version
from rag_mm.config import Config
from rag_mm.dev_hits import DevHits
from rag_mm.document_side import DocumentSide
from rag_mm.index_upkeep import IndexUpkeep
from rag_mm.memory import Memory
from rag_mm.mesh import Mesh
from rag_mm.metrics import LiveLine, MetricsWriter, Window, peak_memory_bytes
from rag_mm.model import build_model
from rag_mm.optimizer import Optimizer, rates
from rag_mm.proof import prove
from rag_mm.role import Role
from rag_mm.run_plans import RunPlans
from rag_mm.same_run import check_same_run
from rag_mm.saving import Saving
from rag_mm.step import JointStep


class Trainer:
    """One rank of a run.

    Args:
        roll_call: names the ranks that die, if there are several.
    """

    def __init__(self, config: Config, roll_call: RollCall | None = None) -> None:
        self.config, self._roll_call = config, roll_call
        self.run_dir = Path(config.run_dir)
        self.mesh = Mesh(num_stages=config.parallel.pipeline_stages, num_replicas=config.parallel.data_replicas)
        self.console = Console(stderr=True, quiet=not self.mesh.is_first)
        self.dataset = Dataset.of(config.data)
        self.resume_from = self._newest_checkpoint()
        self._resume_state: dict[str, Any] = {}
        if self.resume_from is not None:
            self._resume_state = self._read_state(self.resume_from)
            for line in check_same_run(config, self.dataset, self._resume_state):
                self._say(line)
        self.model = build_model(config, self.dataset)
        self.memory = Memory(
            self.dataset.store, self.run_dir / "index", self.mesh, image_size=config.data.image_size,
            batch_size=config.index.batch_size, keep=config.index.keep_versions, sharded=config.index.sharded,
            factory=config.index.train_factory, recall=config.index.recall, recall_queries=config.index.recall_queries,
            wait_s=config.checkpoint.visible_s,
        )  # fmt: skip
        plans = RunPlans(config, self.mesh, resumes=self.resume_from is not None, say=self._say)
        self.towers = plans.make_towers(self.model, self.dataset)
        self.joint = JointStep(
            config,
            self.dataset,
            towers=self.towers,
            collator=self.model.collator,
            memory=self.memory,
            mesh=self.mesh,
        )
        self._refuse_bad_data()
        self.pipeline, self.vision = plans.make_pipeline(self.model, self.joint)
        self._prove()
        self.joint.take_role(Role.of(self.mesh, self.towers, self.pipeline, self.vision))
        self.pipeline.release_other_stages()
        self.towers.release()
        self.optimizer = Optimizer(config.train, self.towers, self.pipeline, self.vision, self.mesh)
        self.saving = Saving(self.run_dir, self.mesh, config.checkpoint, contents=self._contents, say=self._say)
        self.dev_hits = DevHits(config, self.dataset)
        self.upkeep = IndexUpkeep(
            config, memory=self.memory, towers=self.towers, joint=self.joint, mesh=self.mesh, saver=self.saving.saver,
            say=self._say,
        )  # fmt: skip
        self.code = code_version()
        self.window = Window()
        self.step = 0
        self.trained = 0  # steps of this process
        self.bad_steps = BadSteps(sigma=config.train.spike_sigma, window=config.train.spike_window)
        self._writer: MetricsWriter | None = None  # of the first rank, as the next
        self._bad_steps_file: BadStepsFile | None = None

    def _newest_checkpoint(self) -> int | None:
        """Step of the newest usable checkpoint; what is wrong with newer ones is said (a collective)."""
        step, said = checkpoint.agree_on_newest(self.run_dir, self.mesh, wait_s=self.config.checkpoint.visible_s)
        for line in said:
            self._say(line)
        return step

    def _read_state(self, step: int) -> dict[str, Any]:
        """``state.json`` of a checkpoint that all ranks have agreed on, as the first one sees it."""
        found: dict[str, Any] | OSError | ValueError = {}
        if self.mesh.is_first:
            try:
                found = checkpoint.read_state(self.run_dir, step, wait_s=self.config.checkpoint.visible_s)
            except (OSError, ValueError) as error:
                found = OSError(str(error)) if isinstance(error, OSError) else ValueError(str(error))
        found = self.mesh.broadcast(found)
        if isinstance(found, OSError | ValueError):
            raise found
        return found

    def _refuse_bad_data(self) -> None:
        """BadDataError, on every rank, if one of them has already met too many bad samples."""
        for view in (self.joint.questions, self.joint.pairs):
            complaints = self.mesh.gather(view.bad.complaint(self.config.data.max_bad_share))
            if complaint := next(filter(None, complaints), None):
                raise BadDataError(complaint)

    def _prove(self) -> None:
        """Before step 1 and with the untrained weights, which every rank still has whole."""
        started = time.perf_counter()
        with DocumentSide(self.towers).apart():
            line = prove(self.config, self.joint, self.joint.example(), self.pipeline, self.vision)
        self._say(f"{line} ({time.perf_counter() - started:.1f} s)")

    def _say(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True, markup=False)

    def resume(self) -> None:
        """Take up the newest checkpoint, if there is one."""
        if self.resume_from is None:
            return
        state, wait_s = self._resume_state, self.config.checkpoint.visible_s
        checkpoint.load(self.run_dir, self.resume_from, self._tensors(), mesh=self.mesh, wait_s=wait_s)
        self.step = state["step"]
        self.joint.streams.go_on(self.step, state["cursors"])
        self.bad_steps.load(state["bad_steps"])
        for view, counts in zip((self.joint.questions, self.joint.pairs), state["bad_samples"], strict=True):
            view.bad.load(counts)
        self.upkeep.load(state)
        self._say(f"resumed from step {self.step} of {self.run_dir}")

    def open_files(self) -> None:
        """Cut the run's files back to the step that it goes on from.

        Raises:
            ValueError: on every rank, if one is damaged; names it.
            OSError: on every rank, if one cannot be written.
        """
        problem: ValueError | OSError | None = None
        if self.mesh.is_first:
            try:
                self._writer = MetricsWriter(self.run_dir, start_step=self.step)
                self._bad_steps_file = BadStepsFile(self.run_dir, start_step=self.step)
                self.saving.line_files = (self._writer, self._bad_steps_file)
            except (ValueError, OSError) as error:
                problem = OSError(str(error)) if isinstance(error, OSError) else ValueError(str(error))
        problem = self.mesh.broadcast(problem)
        if problem is not None:
            raise problem

    def _tensors(self) -> dict[str, torch.Tensor]:
        """What this rank reads and writes of a checkpoint, by global name."""
        tensors = {f"reader.{n}": p.detach() for n, p in self.pipeline.parameters_here.items()}
        if self.vision is not None:
            tensors |= {f"reader.{n}": p.detach() for n, p in self.vision.parameters.items()}
        tensors |= {f"retriever.{n}": t for n, t in self.towers.tensors_here().items()}
        return tensors | checkpoint.optimizer_tensors(self.optimizer.adamw, self.optimizer.names)

    def _contents(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """What a checkpoint of the current step holds."""
        self.pipeline.check_ties()
        state = {
            **self.upkeep.state(),
            "bad_steps": self.bad_steps.state(),
            "plan_hash": self.pipeline.plan.hash,
            "data_fingerprint": self.dataset.fingerprint,
            "store_edits": self.dataset.store.num_edits,
            "cursors": self.joint.streams.cursors(self.step),
            "bad_samples": [view.bad.state() for view in (self.joint.questions, self.joint.pairs)],
            "config": dump(self.config),
            "code": self.code,
            "good": self.window.good,
            "metrics": self.window.means(),
        }
        self.window.clear()
        return self._tensors(), state

    def run(self, interrupt: launch.Interrupt) -> int:
        """Train to the last step or an interruption; gives the exit status."""
        interrupt.at_once = False  # from now on there is something to save
        every, steps = self.config.checkpoint.every_n_steps, self.config.train.steps
        writer = self._writer
        bad_samples = BadSamples(
            [self.joint.questions.bad, self.joint.pairs.bad], max_share=self.config.data.max_bad_share,
            epochs=self._epochs(), documents=self.memory.store.bad, say=self._say,
        )  # fmt: skip
        live = LiveLine(self.console, title="training", start=self.step, steps=steps)
        events_said = False
        with live, contextlib.ExitStack() as files, self.joint.reading_ahead(start=self.step), self.watched():
            if writer is not None:
                files.callback(writer.close)
            if self._bad_steps_file is not None:
                files.callback(self._bad_steps_file.close)
            files.callback(self.upkeep.close)
            while self.step < steps:
                if not self.upkeep.wait(self.step, lambda: interrupt.asked):
                    return self._stop_between_steps()
                record = self.train_step()
                if writer is not None:
                    writer.write(record)
                    live.update(record)
                    if writer.events_problem is not None and not events_said:
                        events_said = True
                        self._say(f"TensorBoard events end here ({writer.events_problem}); metrics.jsonl has all")
                self.saving.look_after()
                if self.bad_steps.in_a_row >= self.config.train.max_bad_steps:
                    self.saving.saver.finish()
                    run_end.say_too_many_bad_steps(self.run_dir, self.bad_steps, say=self._say)
                    return launch.EXIT_FAILED
                asked, complaints = zip(
                    *self.mesh.gather((interrupt.asked, bad_samples.after_step(self._epochs(), self._begun))),
                    strict=True,
                )
                complaint = next(filter(None, complaints), None)
                stop = complaint is not None or (any(asked) and self.step < steps)
                if stop or self.step == steps or (every and self.step % every == 0):
                    limit_s = self.config.checkpoint.limit_s if stop else None
                    self.saving.save(self.step, wait=stop or self.step == steps, limit_s=limit_s)
                if complaint is not None:
                    self._say(f"training stops after step {self.step}, which is safe: {complaint}")
                    return launch.EXIT_FAILED
                if stop:
                    self._say(f"interrupted; step {self.step} is safe, run the same command to go on")
                    return launch.EXIT_INTERRUPTED
        run_end.say_end(self.run_dir, self.joint, self.model.collator, self.bad_steps, self.mesh, say=self._say)
        if self.config.parallel.timeline and self.trained and self.joint.reads(self.step - 1):
            run_end.draw_timeline(self.config, self.pipeline, self.mesh, say=self._say)
        return 0

    def _stop_between_steps(self) -> int:
        """Asked to stop while the next step cannot begin yet."""
        limit_s, started = self.config.checkpoint.limit_s, time.monotonic()
        self.saving.saver.finish(limit_s=limit_s)
        if self.mesh.broadcast(self.step not in checkpoint.list_steps(self.run_dir)):
            self.saving.save(self.step, wait=True, limit_s=max(0.0, limit_s - (time.monotonic() - started)))
        self._say(f"interrupted; step {self.step} is safe, run the same command to go on")
        return launch.EXIT_INTERRUPTED

    def _epochs(self) -> list[int]:
        """Epochs of the questions and of the pairs that are over."""
        streams, step = self.joint.streams, self.step
        return [streams.epoch("questions", step) + streams.epoch("questions alone", step), streams.epoch("pairs", step)]

    def _begun(self, sequence: int) -> list[int]:
        """Positions of the questions (0) or pairs (1) that the last step took of an epoch that has just begun."""
        streams, step = self.joint.streams, self.step
        if sequence == 1:
            return [self.joint.usable_pairs[i] for i in streams.begun("pairs", step)]
        return streams.begun("questions" if streams.reads(step - 1) else "questions alone", step)

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """Within it, the error of a lost connection names the rank that died."""
        return launch.watched(self._roll_call)

    def _is_dev_due(self, step: int) -> bool:
        """Whether dev_hit_at_k is measured before this step though its index is not new: questions may have moved."""
        every = self.config.index.refresh_every_n_steps
        if self.memory.version is None or not every or (step - self.config.train.retriever_steps) % every:
            return False
        return self.joint.streams.moved_retriever(max(0, step - every), step)

    def train_step(self) -> dict[str, Any]:
        """One step; gives its line of metrics."""
        step = self.step
        reads, started = self.joint.reads(step), time.perf_counter()
        dev_hit_at_k, searched = None, self.memory.version
        if self.joint.streams.searches(step):
            self.upkeep.before_step(step)
        if self.memory.version != searched or self._is_dev_due(step):
            dev_hit_at_k = self.dev_hits.measure(self.memory, self.towers)
        refreshed = time.perf_counter()
        prepared = self.joint.prepare(step)
        fetched = time.perf_counter()
        self.optimizer.zero_grad()
        outcome = self.joint.gradients(prepared, self.pipeline if reads else None, self.vision)
        computed = time.perf_counter()
        norm, (reader_rate, retriever_rate) = self.optimizer.norm(), rates(self.config.train, step)
        bad = self.bad_steps.judge(outcome.losses, norm)
        if bad is None:
            self.optimizer.step(step, norm=norm)
        elif self._bad_steps_file is not None:
            ids = [sample.id for sample in prepared.samples]
            self._bad_steps_file.write(step=step + 1, reason=bad, loss=outcome.loss, norm=norm, sample_ids=ids)
        waited, self.saving.waited_s = self.saving.waited_s, 0.0
        refresh_waited, self.upkeep.waited_s = self.upkeep.waited_s, 0.0
        self.step += 1
        self.trained += 1
        done = time.perf_counter()
        everywhere = self.mesh.gather((peak_memory_bytes(), self.model.collator.padding))
        padding = {what: share for _, shares in everywhere for what, share in shares.items()}
        record = {
            "step": self.step,
            "loss": outcome.loss,
            "losses": outcome.losses,
            "grad_norm": norm,
            "lr": reader_rate if reads else retriever_rate,
            "lr_retriever": retriever_rate,
            "samples_per_s": prepared.query_embedding.shape[0] / (done - started),
            "hit_at_k": self.joint.hit_at_k(prepared),
            "dev_hit_at_k": dev_hit_at_k,
            "token_accuracy": outcome.accuracy,
            "score_entropy": outcome.score_entropy,
            "score_margin": outcome.score_margin,
            "contrastive": outcome.contrast,
            "entropies": outcome.entropies,
            "staleness": {"changed_at_refresh": self.memory.staleness, "score_drift": prepared.drift},
            "index_version": prepared.index_version,
            "time_s": {
                "refresh": refreshed - started,
                "refresh_wait": refresh_waited,
                "retrieve": prepared.retrieve_s,
                "rerank": prepared.rerank_s,
                "fetch": fetched - refreshed - prepared.retrieve_s - prepared.rerank_s,
                "forward_backward": computed - fetched,
                "update": done - computed,
                "checkpoint": waited,
            },
            "padding_share": dict(sorted(padding.items())) if reads else {},
            "peak_memory_bytes": [memory for memory, _ in everywhere],
            "data_digest": self.joint.data_digest(prepared),
            "retrieved_digest": self.joint.retrieved_digest(prepared),
            "skipped_steps": self.bad_steps.total,
        }
        self.window.add(record, taken=bad is None)
        return record
