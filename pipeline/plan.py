"""Command line: where to cut, and what it will cost.

    python -m pipeline.plan --config C [--stages S] [--microbatches M] [--cluster F] [--json] [--cache DIR]
        [--trace FILE] [--timeline FILE] [--program package.module:function] [--section.field value ...]

This package knows no model, so ``--program`` says where one comes from: a function (default
``rag_mm.program:for_planning``) called with the path of the configuration and the list of overrides; it gives
(BlockProgram, batch, ParallelConfig), and, if ranks hold more than their stages, a function from the ParallelConfig to
what each holds beside them (`pipeline.costs.Beside`). The price is that a broken model shows up as an import error
here. Ranks of this machine compute while the trace measures (`pipeline.busy`), as they will in training.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.busy import BusyRanks, num_busy
from pipeline.cluster import Cluster
from pipeline.config import ParallelConfig
from pipeline.costs import Beside
from pipeline.device import Device
from pipeline.ghosts import make_ghosts
from pipeline.partition import partition
from pipeline.plan_file import Plan
from pipeline.plan_table import print_tables
from pipeline.program import BlockProgram, nearest
from pipeline.simulate import Simulation, predicted, simulate
from pipeline.timeline import write_timeline
from pipeline.trace import Profile, trace
from pipeline.trace_bar import trace_bar

LINEAGE_SAMPLES = 4  # as training traces; the proof runs on the whole batch
DEFAULT_PROGRAM = "rag_mm.program:for_planning"
Other = Callable[[ParallelConfig], Sequence[Beside]]
Factory = Callable[[str, list[str]], tuple[Any, ...]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; gives the exit status (2: the user's input is wrong)."""
    try:
        arguments, overrides = _parse(list(sys.argv[1:] if argv is None else argv))
        print_plan(arguments, overrides)
    except (FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.plan",
        description="Trace a model, cut it into pipeline stages and predict the step.",
        epilog="Fields of the configuration can be overridden: --parallel.schedule interleaved --parallel.chunks 2 "
        "--parallel.pins '[decoder.0]'",
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, help="YAML configuration")
    parser.add_argument("--program", default=DEFAULT_PROGRAM, help="package.module:function that gives the model")
    parser.add_argument("--stages", type=int, help="overrides parallel.pipeline_stages, the ranks of a pipeline")
    parser.add_argument("--microbatches", type=int, help="overrides parallel.num_microbatches")
    parser.add_argument("--cluster", default="", help="YAML with what connects the ranks; overrides parallel.cluster")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--cache", metavar="DIR", help="keep the trace here, and read it while nothing has changed")
    parser.add_argument("--trace", metavar="FILE", help="write the simulated step as a trace for Perfetto")
    parser.add_argument("--timeline", metavar="FILE", help="draw the simulated step: .png, .svg, or .json for Perfetto")
    options = [action.option_strings[-1][2:] for action in parser._actions if action.option_strings]
    own, overrides = parser.parse_known_args(argv)
    expects_value = False
    for word in overrides:
        if word.startswith("--"):
            name = word[2:].partition("=")[0]
            if "." not in name:
                raise ValueError(f"unknown option --{name}{nearest(name, options)}")
            expects_value = "=" not in word
        elif not expects_value:
            raise ValueError(f"unexpected argument {word!r}; overrides are written --section.field value")
        else:
            expects_value = False
    return own, overrides


def print_plan(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Make the plan that the arguments ask for and print it.

    Raises:
        ValueError: for anything that the user can mend.
    """
    if not Path(arguments.config).is_file():
        raise ValueError(f"--config {arguments.config}: no such file")
    program, batch, parallel, *other = _factory(arguments.program)(arguments.config, overrides)
    changes: dict[str, Any] = {}
    if arguments.stages is not None:
        changes["pipeline_stages"] = arguments.stages
    if arguments.microbatches is not None:
        changes["num_microbatches"] = arguments.microbatches
    if parallel.plan and changes:
        raise ValueError(f"parallel.plan names {parallel.plan}; --stages and --microbatches would contradict it")
    if arguments.microbatches is not None and "microbatch" in program.axes.values():
        raise ValueError(
            f"--microbatches {arguments.microbatches}: the batch holds what the samples of each micro-batch share, so "
            "it is made for their number; give --parallel.num_microbatches instead"
        )
    parallel = replace(parallel, **changes)
    cluster = Cluster.of(parallel, path=arguments.cluster)
    _check_before_tracing(program, parallel, arguments.timeline)
    beside = _beside(other, parallel, cluster)
    source = _Source(arguments.program, arguments.config, overrides, parallel.num_microbatches)
    cache_dir = _cache_dir(arguments.cache or parallel.trace_cache or None)
    plan, profile, run = make_plan(
        program, batch, parallel, cluster=cluster, cache_dir=cache_dir, source=source, beside=beside
    )
    for option, path in (("--trace", arguments.trace), ("--timeline", arguments.timeline)):
        if path:
            try:
                if option == "--trace":
                    run.write_trace(path)
                else:
                    write_timeline(path, {"predicted": run.events}, num_ranks=plan.num_ranks)
            except OSError as error:
                raise ValueError(f"{option} {path}: {error.strerror}") from error
    if arguments.json:
        print(plan.to_json(), end="")
    else:
        print_tables(plan, profile, run, cluster, parallel)


@dataclass(frozen=True)
class _Source:
    """Where the program came from, for other processes that build it too."""

    target: str
    config: str
    overrides: list[str]
    num_microbatches: int

    def __call__(self) -> tuple[BlockProgram, dict[str, Any], int]:
        program, batch, *_ = _factory(self.target)(self.config, self.overrides)
        return program, batch, self.num_microbatches


def _beside(other: Sequence[Other], parallel: ParallelConfig, cluster: Cluster) -> Sequence[Beside]:
    """What ranks hold beside their stages, where memory is asked about."""
    asked = other and not parallel.plan and (cluster.capacity_bytes is not None or parallel.objective == "memory")
    return other[0](parallel) if asked else ()


def _check_before_tracing(program: BlockProgram, parallel: ParallelConfig, timeline: str | None) -> None:
    """What needs no trace is said before it."""
    names = [block.name for block in program.blocks]
    for pin in parallel.pins:
        if pin not in names:
            raise ValueError(f"parallel.pins names unknown block {pin!r}{nearest(pin, names)}")
    if parallel.num_stages > len(names) and not parallel.plan:
        raise ValueError(f"{parallel.num_stages} stages are more than the program's {len(names)} blocks; use fewer")
    if timeline and Path(timeline).suffix not in (".png", ".svg", ".json"):
        raise ValueError(f"--timeline {timeline}: its ending is {Path(timeline).suffix!r}; allowed: .png, .svg, .json")
    if timeline and not Path(timeline).parent.is_dir():
        raise ValueError(f"--timeline {timeline}: the folder does not exist")


def _cache_dir(path: str | None) -> Path | None:
    if path is None:
        return None
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--cache {path}: {error.strerror}; give a folder that can be written") from error
    return Path(path)


def _factory(target: str) -> Factory:
    module_name, colon, function_name = target.partition(":")
    if not colon or not module_name or not function_name:
        raise ValueError(f"--program is {target!r}; write package.module:function")
    try:
        function: Factory = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--program {target!r} cannot be imported ({error})") from error
    return function


def make_plan(
    program: BlockProgram,
    batch: dict[str, Any],
    parallel: ParallelConfig,
    *,
    cluster: Cluster,
    cache_dir: Path | None = None,
    source: _Source | None = None,
    beside: Sequence[Beside] = (),
) -> tuple[Plan, Profile, Simulation]:
    """Trace and partition (or take the plan that is given), and simulate a step.

    Args:
        source: builds the program in other processes, so that as many ranks as this machine can run trace at once.
        beside: see `partition`.
    """
    busy = num_busy(parallel.pipeline_stages * parallel.data_replicas) if source and not cluster.device else 1
    if parallel.plan:
        try:
            plan = Plan.read(parallel.plan)
        except OSError as error:
            raise ValueError(f"parallel.plan {parallel.plan}: {error.strerror}") from error
        plan.validate(program)
        source = replace(source, num_microbatches=plan.num_microbatches) if source else None
        profile = _trace(program, batch, plan.num_microbatches, cluster.described_device, cache_dir, source, busy)
        bounds = (0, *(last for _, last in plan.bounds()))
        plan = predicted(  # the file's own times may be of other cuts
            profile, bounds, schedule=plan.schedule, num_ranks=plan.num_ranks, recomputed=plan.recomputed,
            link=cluster.link,
        )  # fmt: skip
        return plan, profile, simulate(profile, plan, link=cluster.link)
    profile = _trace(program, batch, parallel.num_microbatches, cluster.described_device, cache_dir, source, busy)
    plan = partition(
        profile,
        num_stages=parallel.num_stages,
        num_ranks=parallel.pipeline_stages,
        schedule=parallel.schedule,
        num_microbatches=parallel.num_microbatches,
        objective=parallel.objective,
        capacity_bytes=cluster.capacity_bytes,
        link_latency_s=cluster.link_latency_s,
        link_bytes_per_s=cluster.link_bytes_per_s,
        pins=parallel.pins,
        beside=beside,
    )
    return plan, profile, simulate(profile, plan, link=cluster.link)


def _trace(
    program: BlockProgram,
    batch: dict[str, Any],
    num_microbatches: int,
    device: Device | None,
    cache_dir: Path | None,
    source: _Source | None,
    busy: int,
) -> Profile:
    if device is not None:
        make_ghosts([program])
        batch = {
            name: tensor.detach().to("meta").requires_grad_(tensor.requires_grad) for name, tensor in batch.items()
        }
    with trace_bar() as progress:
        return trace(
            program,
            batch,
            num_microbatches=num_microbatches,
            lineage=device is None,
            lineage_samples=LINEAGE_SAMPLES,
            device=device,
            progress=progress,
            cache_dir=cache_dir,
            busy_ranks=busy,
            around=BusyRanks(source, count=busy - 1, lineage_samples=LINEAGE_SAMPLES) if source and busy > 1 else None,
        )


if __name__ == "__main__":
    sys.exit(main())
