"""Training: configuration in, run folder out. Started again on the same folder, it goes on.

A run folder explains itself: ``config.yaml`` (resolved), ``plan.json``, ``metrics.jsonl``, TensorBoard events,
``index/`` (the versions that training searched) and ``checkpoints/``.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from data.ahead import WorkerError
from data.bad_data import BadDataError
from data.command_line import dump, fail, parse
from data.dataset import Dataset
from pipeline import Pipeline, Plan
from pipeline.cluster import Cluster
from pipeline.forecast import forecast
from pipeline.roll_call import LostRankError, RollCall
from pipeline.timeline import write_timeline
from rag_mm import checkpoint, launch
from rag_mm.bad_samples import BadSamples
from rag_mm.bad_steps import FILE as BAD_STEPS
from rag_mm.bad_steps import BadSteps, BadStepsFile
from rag_mm.config import Config
from rag_mm.memory import Memory
from rag_mm.mesh import Mesh
from rag_mm.metrics import LiveLine, MetricsWriter, Window, peak_memory_bytes
from rag_mm.model import build_model
from rag_mm.optimizer import Optimizer, rates
from rag_mm.planning import kept_plan, make_towers_plan, plan_reader
from rag_mm.proof import ProofError, prove
from rag_mm.role import Role
from rag_mm.same_run import check_same_run
from rag_mm.step import JointStep
from rag_mm.towers import DealtTowers, PipedTowers, Towers
from rag_mm.training_batches import BatchMismatchError


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
        if self.resume_from is not None:
            state = checkpoint.read_state(self.run_dir, self.resume_from)
            for line in check_same_run(config, self.dataset, state):
                self._say(line)
        self.model = build_model(config, self.dataset)
        self.memory = Memory(
            self.dataset.store, self.run_dir / "index", self.mesh, image_size=config.data.image_size,
            batch_size=config.index.batch_size, keep=config.index.keep_versions,
        )  # fmt: skip
        self.towers = self._make_towers()
        self.joint = JointStep(
            config,
            self.dataset,
            towers=self.towers,
            collator=self.model.collator,
            memory=self.memory,
            mesh=self.mesh,
        )
        self._refuse_bad_data()
        self.pipeline = self._make_pipeline()
        self._prove()
        self.joint.take_role(Role.of(self.mesh, self.towers, self.pipeline, self.vision))
        self.pipeline.release_other_stages()
        self.towers.release()
        self.optimizer = Optimizer(config.train, self.towers, self.pipeline, self.vision, self.mesh)
        self.saver = checkpoint.Saver(self.run_dir, self.mesh, config.checkpoint)
        self.window = Window()
        self.step = 0
        self.trained = 0  # steps of this process
        self.bad_steps = BadSteps(sigma=config.train.spike_sigma, window=config.train.spike_window)
        self._writer: MetricsWriter | None = None  # of the first rank, as the next
        self._bad_steps_file: BadStepsFile | None = None
        self._save_s = 0.0  # that the last step's end waited for a checkpoint

    def _newest_checkpoint(self) -> int | None:
        """Step of the newest usable checkpoint; what is wrong with newer ones is said (a collective)."""
        found: tuple[int | None, list[str], str] = (None, [], "")
        if self.mesh.is_first:
            try:
                found = (*checkpoint.newest_usable(self.run_dir), "")
            except checkpoint.DamagedCheckpointError as error:
                found = (None, [], str(error))
        step, said, problem = self.mesh.broadcast(found)
        if problem:
            raise ValueError(problem)
        for line in said:
            self._say(line)
        return step

    def _refuse_bad_data(self) -> None:
        """BadDataError, on every rank, if one of them has already met too many bad samples."""
        for view in (self.joint.questions, self.joint.pairs):
            complaints = self.mesh.gather(view.bad.complaint(self.config.data.max_bad_share))
            if complaint := next(filter(None, complaints), None):
                raise BadDataError(complaint)

    def _make_pipeline(self) -> Pipeline:
        """Cut the reader by what a batch like those it will read costs, or as it was cut before."""
        self.model.reader.train()
        plan, self.vision, said = plan_reader(
            self.config, self.model.reader, self.joint, self.mesh, saved=self._saved_plan()
        )
        if self.mesh.is_first:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            (self.run_dir / "config.yaml").write_text(dump(self.config))
            (self.run_dir / "plan.json").write_text(plan.to_json())
        if said:
            self._say(said)
        self._say_plan(plan)
        program = self.model.reader if self.vision is None else self.vision.program
        parallel = self.config.parallel
        return Pipeline(program, plan, group=self.mesh.pipeline, timeout_s=parallel.timeout_s, record=parallel.timeline)

    def _make_towers(self) -> Towers:
        """The retriever's towers, dealt out or piped, as ``parallel.towers`` says."""
        if self.config.parallel.towers == "dealt":
            return DealtTowers(self.model.encoder, self.mesh)
        path = self.run_dir / "towers.json"
        resumes = self.resume_from is not None
        saved = Plan.read(path).to_json() if self.mesh.is_first and resumes and path.exists() else None
        text = self.mesh.broadcast(saved)
        plan, parallel = None if text is None else Plan.from_json(text), self.config.parallel
        layout = (parallel.pipeline_stages, parallel.num_microbatches)
        if plan is not None and (plan.num_ranks, plan.num_microbatches) == layout:
            self._say(kept_plan(self.config, "towers.json"))
        else:
            plan = make_towers_plan(self.config, self.model.encoder, self.dataset.store, self.mesh)
        if self.mesh.is_first:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            path.write_text(plan.to_json())
        return PipedTowers(self.model.encoder, self.mesh, plan, timeout_s=self.config.parallel.timeout_s)

    def _saved_plan(self) -> Plan | None:
        """The plan of the run that is resumed, if it is for this layout: cutting anew could change the last bits."""
        path, parallel = self.run_dir / "plan.json", self.config.parallel
        saved = None
        if self.mesh.is_first and self.resume_from is not None and path.exists() and not parallel.plan:
            plan = Plan.read(path)
            if (plan.num_ranks, plan.num_stages, plan.schedule, plan.num_microbatches) == (
                parallel.pipeline_stages, parallel.num_stages, parallel.schedule, parallel.num_microbatches
            ):  # fmt: skip
                saved = path.read_text()
        text = self.mesh.broadcast(saved)
        return None if text is None else Plan.from_json(text)

    def _prove(self) -> None:
        """Before step 1 and with the untrained weights, which every rank still has whole."""
        started = time.perf_counter()
        line = prove(self.config, self.joint, self.joint.example(), self.pipeline, self.vision)
        self._say(f"{line} ({time.perf_counter() - started:.1f} s)")

    def _say(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True, markup=False)

    def _say_plan(self, plan: Plan) -> None:
        for i, stage in enumerate(plan.stages):
            times = f"forward {stage.forward_s * 1e3:.1f} ms, backward {stage.backward_s * 1e3:.1f} ms a micro-batch"
            self._say(f"stage {i}: {stage.blocks[0]} .. {stage.blocks[-1]} ({times})")

    def resume(self) -> None:
        """Take up the newest checkpoint, if there is one."""
        if self.resume_from is None:
            return
        newest = self.resume_from
        state = checkpoint.read_state(self.run_dir, newest)
        checkpoint.load(self.run_dir, newest, self._tensors(), mesh=self.mesh)
        self.step = state["step"]
        self.joint.streams.go_on(self.step, state["cursors"])
        self.bad_steps.load(state["bad_steps"])
        if state["index_version"] is not None:
            self.memory.load(state["index_version"], staleness=state["staleness"])
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

    def save(self, *, wait: bool = True, limit_s: float | None = None) -> None:
        """Begin to write a checkpoint of the current step; with ``wait``, it is there when this returns.

        Args:
            limit_s: longest wait.

        Raises:
            OSError: with ``wait``, on every rank, if it could not be written in that time.
        """
        started = time.perf_counter()
        self.pipeline.check_ties()
        self.saver.begin(
            self.step, self._tensors(),
            {
                "index_version": self.memory.version,
                "staleness": self.memory.staleness,
                "bad_steps": self.bad_steps.state(),
                "plan_hash": self.pipeline.plan.hash,
                "data_fingerprint": self.dataset.fingerprint,
                "store_edits": self.dataset.store.num_edits,
                "cursors": self.joint.streams.cursors(self.step),
                "config": dump(self.config),
                "good": self.window.good,
                "metrics": self.window.means(),
            },
        )  # fmt: skip
        self.window.clear()
        if wait:
            self.saver.finish(limit_s=limit_s)
            if self.saver.problem:
                raise OSError(self.saver.problem)
        self._save_s = time.perf_counter() - started

    def _save_with_metrics(self, writer: MetricsWriter | None, *, wait: bool, limit_s: float | None) -> None:
        """Write a checkpoint once ``metrics.jsonl`` is durable: on resume it must not lack steps.

        Raises:
            OSError: with ``wait``, on every rank, if one of them could not be written.
        """
        problem = ""
        if writer is not None:
            try:
                writer.sync()
            except OSError as error:
                problem = f"{writer.path}: {error}"
        problem = self.mesh.broadcast(problem)
        if problem and wait:
            raise OSError(problem)
        if problem:
            self._say_unwritten(problem)
        else:
            self.save(wait=wait, limit_s=limit_s)

    def _say_unwritten(self, problem: str) -> None:
        steps = checkpoint.list_steps(self.run_dir)
        last = f"the last one is of step {steps[-1]}" if steps else "there is none yet"
        self._say(
            f"A CHECKPOINT COULD NOT BE WRITTEN ({problem}); training goes on, {last}: make room "
            f"at {self.run_dir} before it is interrupted"
        )

    def _look_after_saving(self) -> None:
        """Publish the checkpoint that is being written when it is done, and say what went wrong."""
        self.saver.poll()
        if self.saver.problem:
            self._say_unwritten(self.saver.problem)
            self.saver.problem = None

    def run(self, interrupt: launch.Interrupt) -> int:
        """Train to the last step or an interruption; gives the exit status."""
        every, steps = self.config.checkpoint.every_n_steps, self.config.train.steps
        writer = self._writer
        bad_samples = BadSamples(
            [self.joint.questions.bad, self.joint.pairs.bad], max_share=self.config.data.max_bad_share,
            epochs=self._epochs(), say=self._say,
        )  # fmt: skip
        live = LiveLine(self.console, title="training", start=self.step, steps=steps)
        files = contextlib.closing(writer) if writer else contextlib.nullcontext()
        events_said = False
        with live, files, self.joint.reading_ahead(start=self.step), self.watched():
            while self.step < steps:
                record = self.train_step()
                if writer is not None:
                    writer.write(record)
                    live.update(record)
                    if writer.events_problem is not None and not events_said:
                        events_said = True
                        self._say(f"TensorBoard events end here ({writer.events_problem}); metrics.jsonl has all")
                self._look_after_saving()
                if self.bad_steps.in_a_row >= self.config.train.max_bad_steps:
                    self._say_too_many_bad_steps()
                    return launch.EXIT_FAILED
                asked, complaints = zip(
                    *self.mesh.gather((interrupt.asked, bad_samples.after_step(self._epochs()))), strict=True
                )
                complaint = next(filter(None, complaints), None)
                stop = complaint is not None or (any(asked) and self.step < steps)
                if stop or self.step == steps or (every and self.step % every == 0):
                    limit_s = self.config.checkpoint.limit_s if stop else None
                    self._save_with_metrics(writer, wait=stop or self.step == steps, limit_s=limit_s)
                if complaint is not None:
                    self._say(f"training stops after step {self.step}, which is safe: {complaint}")
                    return launch.EXIT_FAILED
                if stop:
                    self._say(f"interrupted; step {self.step} is safe, run the same command to go on")
                    return launch.EXIT_INTERRUPTED
        self._say_end()
        self._draw_timeline()
        return 0

    def _epochs(self) -> list[int]:
        """Epochs of the questions and of the pairs that are over."""
        streams, step = self.joint.streams, self.step
        return [streams.epoch("questions", step) + streams.epoch("questions alone", step), streams.epoch("pairs", step)]

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """Within it, the error of a lost connection names the rank that died."""
        return launch.watched(self._roll_call)

    def train_step(self) -> dict[str, Any]:
        """One step; gives its line of metrics."""
        step, train = self.step, self.config.train
        reads, started = self.joint.reads(step), time.perf_counter()
        if reads and train.documents == "retrieved":
            self._refresh(step)
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
        waited, self._save_s = self._save_s, 0.0
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
            "token_accuracy": outcome.accuracy,
            "score_entropy": outcome.score_entropy,
            "staleness": {"changed_at_refresh": self.memory.staleness, "score_drift": prepared.drift},
            "index_version": self.memory.version,
            "time_s": {
                "refresh": refreshed - started,
                "retrieve": prepared.retrieve_s,
                "fetch": fetched - refreshed - prepared.retrieve_s,
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

    def _refresh(self, step: int) -> None:
        every, since = self.config.index.refresh_every_n_steps, step - self.config.train.retriever_steps
        due = self.memory.version is None or (every > 0 and since % every == 0)
        if not due or self.memory.version == step:
            return
        if self.memory.version is not None and not self.joint.trains_retriever(step):
            return  # nothing has moved since
        named = self._named_versions() if self.mesh.is_first else set()
        probe = self.joint.probe(step)
        self.memory.refresh(self.towers, step=step, probe_BE=probe, k=self.config.retriever.k, named=named)

    def _named_versions(self) -> set[int]:
        """Index versions that checkpoints name, the one being written as well."""
        states = [self.saver.pending_state or {"index_version": None}]
        for step in checkpoint.list_steps(self.run_dir):
            with contextlib.suppress(checkpoint.DamagedCheckpointError):
                states.append(checkpoint.read_state(self.run_dir, step))
        return {state["index_version"] for state in states} - {None}

    def _draw_timeline(self) -> None:
        """The last step as the plan expected it and as it was, beside the plan."""
        if not self.config.parallel.timeline or not self.trained or not self.joint.reads(self.step - 1):
            return
        measured = self.pipeline.events()
        if self.mesh.is_first and measured:
            plan, path = self.pipeline.plan, self.run_dir / "timeline.png"
            link = Cluster.of(self.config.parallel).link
            expected = {"expected by the plan": forecast(plan, link=link).events} if plan.step_s else {}
            write_timeline(path, {**expected, "measured in the last step": measured}, num_ranks=plan.num_ranks)
            self._say(f"the last step, drawn: {path}")

    def _say_too_many_bad_steps(self) -> None:
        self.saver.finish()
        steps = checkpoint.list_steps(self.run_dir)
        last = f"the last checkpoint is of step {steps[-1]}" if steps else "there is no checkpoint"
        self._say(
            f"training stops: {self.bad_steps.in_a_row} steps in a row were not taken (train.max_bad_steps); {last}. "
            f"{self.run_dir / BAD_STEPS} names reasons and samples: look at those samples, then lower "
            "train.learning_rate or train.retriever_learning_rate, or raise train.spike_sigma, in a new --run-dir"
        )

    def _say_end(self) -> None:
        truncated: Counter[str] = Counter()
        for counts in self.mesh.gather(self.model.collator.truncated):
            truncated |= counts  # ranks that read a part count the same of it
        for what, count in sorted(truncated.items()):
            if count:
                limit = {
                    "questions": "max_query_tokens",
                    "documents": "max_document_tokens",
                    "answers": "max_answer_tokens",
                }
                self._say(f"{what} were truncated {count} times (data.{limit[what]})")
        for view in (self.joint.questions, self.joint.pairs):
            for line in view.bad.report():
                self._say(line)
        if self.bad_steps.total:
            self._say(f"{self.bad_steps.total} steps were not taken; {self.run_dir / BAD_STEPS} says why")


def main(argv: Sequence[str]) -> int:
    """Entry point of ``train.py``; the exit status."""
    config = parse(
        Config,
        argv,
        prog="python train.py",
        description="Train a retriever and a reader jointly. Started again on the same --run-dir, training goes on.",
    )
    os.environ.setdefault("OMP_NUM_THREADS", str(config.train.threads))
    ranks = config.parallel.pipeline_stages * config.parallel.data_replicas
    if not launch.is_rank():
        _check_before_start(config)
        if ranks > 1:
            return launch.launch(argv, num_ranks=ranks)
    elif os.environ["RANK"] == "0":
        _check_before_start(config)
    try:
        roll_call = launch.join(timeout_s=config.parallel.timeout_s, threads=config.train.threads)
    except LostRankError as error:
        print(error, file=sys.stderr)
        return launch.EXIT_FAILED
    first = not launch.is_rank() or os.environ["RANK"] == "0"
    with launch.Interrupt() as interrupt, contextlib.ExitStack() as held:
        try:
            if first:
                held.enter_context(launch.only_one(Path(config.run_dir)))
            with launch.watched(roll_call):
                trainer = Trainer(config, roll_call)
                trainer.resume()
                trainer.open_files()
        except LostRankError as error:
            print(f"rank {dist.get_rank()} stops: {error}", file=sys.stderr)
            return launch.EXIT_FAILED
        except (ValueError, FileNotFoundError) as error:  # the user's; every rank finds the same
            if first:
                fail(str(error))
            return launch.EXIT_USER
        except (ProofError, BadDataError) as error:
            if first:
                print(error, file=sys.stderr)
            return launch.EXIT_FAILED
        except OSError as error:
            if first:
                print(
                    f"{config.run_dir} could not be written: {error}; make room there, or use another --run-dir",
                    file=sys.stderr,
                    flush=True,
                )
            return launch.EXIT_FAILED
        try:
            status = trainer.run(interrupt)
        except (LostRankError, WorkerError) as error:
            print(f"rank {trainer.mesh.rank} stops: {error}", file=sys.stderr)
            return launch.EXIT_FAILED
        except BatchMismatchError as error:
            if first:
                print(error, file=sys.stderr)
            return launch.EXIT_FAILED
        except OSError as error:
            if first:
                kept = checkpoint.list_steps(config.run_dir)
                there = f"the last checkpoint is of step {kept[-1]}" if kept else "there is no checkpoint"
                print(
                    f"{config.run_dir} could not be written: {error}; {there}: make room there, then run the same "
                    "command to go on from it",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
            os._exit(launch.EXIT_FAILED)  # a thread that still tries to write would hold the process
    launch.leave()
    return status


def _check_before_start(config: Config) -> None:
    """What can be said about the user's input before any rank is started."""
    try:
        dataset = Dataset.of(config.data)
    except (OSError, ValueError) as error:
        fail(str(error))
    if config.train.documents == "retrieved" and config.retriever.k > len(dataset.store):
        fail(
            f"retriever.k is {config.retriever.k}; the memory holds {len(dataset.store)} documents, "
            "so it must be at most that"
        )
    if config.parallel.plan and not Path(config.parallel.plan).is_file():
        fail(f"parallel.plan is {config.parallel.plan!r}, which is not a file; make one with `python -m pipeline.plan`")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
