"""What a run says and draws when it ends."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from pipeline import Pipeline
from pipeline.cluster import Cluster
from pipeline.forecast import forecast
from pipeline.timeline import write_timeline
from rag_mm import checkpoint
from rag_mm.bad_steps import FILE as BAD_STEPS
from rag_mm.bad_steps import BadSteps
from rag_mm.batch import Collator
from rag_mm.config import Config
from rag_mm.mesh import Mesh
from rag_mm.step import JointStep

Say = Callable[[str], None]


def draw_timeline(config: Config, pipeline: Pipeline, mesh: Mesh, *, say: Say) -> None:
    """The last step as the plan expected it and as it was, beside the plan (a collective)."""
    measured = pipeline.events()
    if mesh.is_first and measured:
        plan, path = pipeline.plan, Path(config.run_dir) / "timeline.png"
        link = Cluster.of(config.parallel).link
        expected = {"expected by the plan": forecast(plan, link=link).events} if plan.step_s else {}
        write_timeline(path, {**expected, "measured in the last step": measured}, num_ranks=plan.num_ranks)
        say(f"the last step, drawn: {path}")


def say_too_many_bad_steps(run_dir: Path, bad_steps: BadSteps, *, say: Say) -> None:
    """Why training stops, and what can be done."""
    say(
        f"training stops: {bad_steps.in_a_row} steps in a row were not taken (train.max_bad_steps); "
        f"{checkpoint.last_of(run_dir)}. "
        f"{run_dir / BAD_STEPS} names reasons and samples: look at those samples, then lower "
        "train.learning_rate or train.retriever_learning_rate, or raise train.spike_sigma, in a new --run-dir"
    )


def say_end(run_dir: Path, joint: JointStep, collator: Collator, bad_steps: BadSteps, mesh: Mesh, *, say: Say) -> None:
    """What was truncated, left out or not taken (a collective)."""
    truncated: Counter[str] = Counter()
    for counts in mesh.gather(collator.truncated):
        truncated |= counts  # ranks that read a part count the same of it
    limit = {"questions": "max_query_tokens", "documents": "max_document_tokens", "answers": "max_answer_tokens"}
    for what, count in sorted(truncated.items()):
        if count:
            say(f"{what} were truncated {count} times (data.{limit[what]})")
    embedded = Counter({"questions": joint.truncated, "documents": joint.encoder.featurizer.truncated})
    embedded = functools.reduce(operator.or_, mesh.gather(embedded), Counter())
    for what, count in sorted(embedded.items()):
        say(joint.encoder.featurizer.said_truncated(count, what))
    for bad in (joint.questions.bad, joint.pairs.bad, joint.memory.store.bad):
        for line in bad.report():
            say(line)
    if bad_steps.total:
        say(f"{bad_steps.total} steps were not taken; {run_dir / BAD_STEPS} says why")
