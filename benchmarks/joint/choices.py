"""Objectives and refresh modes, one run each and seed: ``python -m benchmarks.joint.choices``.

Every run is ``train.py`` with ``configs/choices.yaml`` and the few fields that its row changes, evaluated on the test
countries of fold 0 with an index of its final weights. Rows are compared with *frozen*, whose retriever stops when the
reader joins: what a row finds beyond it, its objective taught. Differences pair the questions of the same seed, are
averaged over seeds, and their intervals resample countries, each with its answers of all seeds; the spread over seeds
stands beside them. Seconds are medians of the steps with the reader in short runs of their own (``--timing-only``
makes these), one at a time and nothing beside them; ratios count.

Started again, it goes on: runs resume, and what is evaluated is read from its files.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.pipeline.measuring import machine
from data.command_line import parse
from rag_mm.config import Config
from rag_mm.evaluate.answer import load_run
from rag_mm.evaluate.bootstrap import paired_bootstrap
from rag_mm.evaluate.evaluation import evaluate_run
from rag_mm.evaluate.overrides import Overrides, flags, replaced
from rag_mm.evaluate.questions import QuestionsConfig
from rag_mm.evaluate.training_jobs import Job, JobsEnded, run_jobs

FILE = "configs/choices.yaml"
DOCS = Path(__file__).parents[2] / "docs" / "results.md"
RESULTS = Path(__file__).parent / "results" / "choices.json"
SEEDS = (0, 1, 2)
TIMED_STEPS = 60
FIGURES = ("hit@1 picture", "EM")


@dataclass(frozen=True, eq=False)
class Choice:
    """A row: what differs from ``configs/choices.yaml``.

    Attributes:
        about: for the table.
    """

    name: str
    about: str
    overrides: Overrides


LABELS: Overrides = {"objectives.contrastive_on": "both", "train.pairs": "all"}
PDIST: Overrides = {"objectives.pdist": 1.0}
ADIST_VALUES: Overrides = {"objectives.adist": 1.0, "objectives.adist_from": "values"}
ASYNC: Overrides = {
    **PDIST, "index.refresh": "async", "index.refresh_every_n_steps": 25, "index.refresh_lag": 10
}  # fmt: skip
RERANK: Overrides = {"index.refresh": "none", "retriever.rerank": 8}

MARGINAL_TEMPERATURE = 0.1  # as in the other objectives, so that all see equally sharp scores


def _marginal(name: str) -> Overrides:
    return {f"objectives.{name}": 1.0, f"objectives.{name}_score_temperature": MARGINAL_TEMPERATURE}


OBJECTIVES = (
    Choice("frozen", "the retriever stops when the reader joins", {"train.joint_retriever_scale": 0.0}),
    Choice("score prior", "generation alone, through the pointer's prior", {"reader.score_prior": True}),
    Choice("pdist", "likelihood of each document alone (Atlas)", PDIST),
    Choice("emdr2", "marginal likelihood, per sequence", {"objectives.emdr2": 1.0}),
    Choice("emdr2_token", "the same for each token", {"objectives.emdr2_token": 1.0}),
    Choice("adist, logits", "attention before the softmax (FiD-KD)", {"objectives.adist": 1.0}),
    Choice("adist, values", "attention x value norm (Atlas)", ADIST_VALUES),
    Choice("loop", "likelihood without each document", {"objectives.loop": 1.0}),
    Choice("rag_sequence", "marginal likelihood that trains the reader too", _marginal("rag_sequence")),
    Choice("rag_token", "the same for each token", _marginal("rag_token")),
    Choice("pdist + score prior", "both", {**PDIST, "reader.score_prior": True}),
    Choice("contrastive on labels", "question-document labels instead of answers", LABELS),
)
REFRESHES = (
    Choice("none", "searches the index of when the reader joined", {**PDIST, "index.refresh": "none"}),
    Choice(
        "query_side", "so does this, and its documents' towers stand still", {**PDIST, "index.refresh": "query_side"}
    ),
    Choice("every 100 steps", "embeds the memory anew, training waits", PDIST),
    Choice("every 25 steps", "the same, four times as often", {**PDIST, "index.refresh_every_n_steps": 25}),
    Choice("async, every 25 steps", "beside the steps, searched 10 steps later", ASYNC),
    Choice("none, rerank 8", "8 proposals scored anew by the current towers", {**PDIST, **RERANK}),
)


def run_dir(out: Path, choice: Choice, seed: int | str) -> Path:
    """Where a run lies; the same run in both groups is one."""
    changed = "_".join(f"{name}-{value}" for name, value in sorted(choice.overrides.items()))
    return out / (re.sub(r"[^\w.,-]+", "-", changed) or "base") / f"seed-{seed}"


def job(choice: Choice, seed: int, *, out: Path, given: Sequence[str]) -> Job:
    """The training run of a row and seed."""
    return _job(f"{choice.name}, seed {seed}", run_dir(out, choice, seed), choice, seed, given)


def timing_job(choice: Choice, *, out: Path, given: Sequence[str]) -> Job:
    """A short run of a row, for its seconds alone."""
    short = ["--train.steps", str(TIMED_STEPS), "--train.retriever_share", "0.2", "--train.distill_share", "0"]
    return _job(f"{choice.name}, timing", run_dir(out, choice, "timing"), choice, 0, [*given, *short])


def _job(name: str, folder: Path, choice: Choice, seed: int, given: Sequence[str]) -> Job:
    base = parse(Config, ["--config", FILE], prog="", description="")
    changed = parse(Config, ["--config", FILE, *given], prog="", description="")
    config = replaced(changed, {**choice.overrides, "train.seed": seed, "run_dir": str(folder)})
    return Job(name, folder, ("--config", FILE, *flags(config, base)), config.train.steps)


def reading_steps(folder: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl`` of steps that the reader took part in."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["hit_at_k"] is not None]


def timing(folder: Path) -> dict[str, float]:
    """Seconds of a step, and how long training stands still for a refresh, of a finished timing run."""
    lines = reading_steps(folder)
    refresh = [line["time_s"]["refresh"] for line in lines if line["time_s"]["refresh"] > 1e-3]
    steps = [sum(line["time_s"].values()) - line["time_s"]["refresh"] for line in lines]
    return {"step_s": statistics.median(steps), "refresh_s": statistics.fmean(refresh)}


def evaluate(folder: Path) -> dict[str, Any]:
    """Figures of a finished run, from its ``choice.json`` if it has one."""
    path = folder / "choice.json"
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    run = load_run(folder)
    evaluated = evaluate_run(run, ["joint"], QuestionsConfig("test"), console=Console(quiet=True))
    scored = evaluated.scored["joint"]
    values: dict[str, dict[str, list[float]]] = {figure: {} for figure in FIGURES}
    for item in scored:
        country = item.sample.subject or item.sample.id
        if item.em is not None:
            values["EM"].setdefault(country, []).append(item.em)
        if item.sample.kind == "picture":
            values["hit@1 picture"].setdefault(country, []).append(item.hit[1])
    reading = reading_steps(folder)
    changed = [line["staleness"]["changed_at_refresh"] for line in reading]
    drift = [line["staleness"]["score_drift"] for line in reading]
    found = {
        "values": values,
        "changed": _mean([value for value in changed if value is not None]),
        "drift": _mean([value for value in drift if value is not None]),
    }
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(found))
    temporary.replace(path)
    return found


def _done(done: Job, seconds: float) -> None:
    evaluate(done.run_dir)


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def row(
    choice: Choice,
    runs: Sequence[Mapping[str, Any]],
    frozen: Sequence[Mapping[str, Any]],
    seconds: Mapping[str, float],
) -> dict[str, Any]:
    """A row of the table from the runs of all seeds."""
    made: dict[str, Any] = {"name": choice.name, "about": choice.about, **seconds}
    for figure in FIGURES:
        by_seed = [statistics.fmean(v for values in run["values"][figure].values() for v in values) for run in runs]
        mine, other = (_joined([run["values"][figure] for run in side]) for side in (runs, frozen))
        difference = None if runs is frozen else paired_bootstrap(mine, other, seed=0)
        made[figure] = {"mean": statistics.fmean(by_seed), "by_seed": by_seed, "minus_frozen": difference}
    for name in ("changed", "drift"):
        made[name] = _mean([run[name] for run in runs if run[name] is not None])
    return made


def _joined(seeds: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Of each country the values of all seeds."""
    return {country: [value for values in seeds for value in values[country]] for country in seeds[0]}


def markdown(result: Mapping[str, Any]) -> str:
    """Both tables, and what they were made with."""
    lines = []
    for title, rows in result["groups"].items():
        lines += [
            f"| {title} | | hit@1 pict. | over seeds | − frozen | EM | over seeds | s a step | s a refresh "
            "| changed | drift |",
            "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for made in rows:
            hit, em = made["hit@1 picture"], made["EM"]
            cells = [made["name"], made["about"], f"{hit['mean']:.3f}", _spread(hit), _difference(hit)]
            cells += [f"{em['mean']:.3f}", _spread(em), f"{made['step_s']:.3f}", f"{made['refresh_s']:.3f}"]
            cells += ["–" if made[name] is None else f"{made[name]:.3f}" for name in ("changed", "drift")]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    made = result["machine"]
    lines.append(
        f"{len(result['seeds'])} seeds, {result['num_runs']} runs of {result['steps']} steps, two at a time. "
        "*changed*: share of the documents found that a refresh changes; *drift*: mean change of a found document's "
        f"score since the index was made. {made['date']}, {made['processor']}, {made['cores']} cores, torch "
        f"{made['torch']}, load {made['load_before']} before."
    )
    return "\n".join(lines)


def _spread(figure: Mapping[str, Any]) -> str:
    return f"{min(figure['by_seed']):.3f}–{max(figure['by_seed']):.3f}"


def _difference(figure: Mapping[str, Any]) -> str:
    return "{:+.3f} ({:+.3f} to {:+.3f})".format(*figure["minus_frozen"]) if figure["minus_frozen"] else ""


def put(text: str, table: str) -> str:
    """``text`` with the tables between their two marks."""
    block = re.compile(r"(<!-- choices -->\n).*?(<!-- /choices -->)", re.S)
    if not block.search(text):
        raise SystemExit(f"{DOCS} has no place for the tables; write <!-- choices --> and <!-- /choices -->")
    return block.sub(lambda found: f"{found[1]}{table}\n{found[2]}", text)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.joint.choices", description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/choices"), help="folder of the runs")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)), help="of training, comma-separated")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--timing-only", action="store_true", help="make only the short runs, for seconds; no table")
    parser.add_argument("--no-timing", action="store_true", help="leave the short runs for later; no table")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the results go")
    parser.add_argument("--docs", action="store_true", help="put the tables into docs/results.md")
    given, rest = parser.parse_known_args(argv)  # the rest are fields of the configuration, for every run
    seeds, before = [int(seed) for seed in given.seeds.split(",")], machine()
    choices = (*OBJECTIVES, *REFRESHES)
    timed = {one.run_dir: one for choice in choices for one in [timing_job(choice, out=given.runs, given=rest)]}
    found = [job(choice, seed, out=given.runs, given=rest) for seed in seeds for choice in choices]
    jobs = {one.run_dir: one for one in found}
    console = Console()
    if given.docs:
        put(DOCS.read_text(), "")  # hours before it is needed: whether there is a place
    try:
        if not given.timing_only:
            waiting = [one for one in jobs.values() if not (one.run_dir / "choice.json").exists()]
            run_jobs(waiting, at_once=given.jobs, console=console, done=_done)
        if not given.no_timing:
            run_jobs(list(timed.values()), at_once=1, console=console, done=lambda done, seconds: None)
    except JobsEnded as end:
        print(end, file=sys.stderr)
        return end.status
    if given.timing_only or given.no_timing:
        return 0
    runs = {one: [evaluate(run_dir(given.runs, one, seed)) for seed in seeds] for one in choices}
    seconds = {one: timing(run_dir(given.runs, one, "timing")) for one in choices}
    frozen = runs[OBJECTIVES[0]]
    result = {
        "groups": {
            title: [row(one, runs[one], frozen, seconds[one]) for one in group]
            for title, group in (("objective", OBJECTIVES), ("refresh, with pdist", REFRESHES))
        },
        "seeds": seeds, "num_runs": len(jobs), "steps": next(iter(jobs.values())).steps, "machine": before,
    }  # fmt: skip
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(markdown(result))
    if given.docs:
        DOCS.write_text(put(DOCS.read_text(), markdown(result)))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main(sys.argv[1:]))
