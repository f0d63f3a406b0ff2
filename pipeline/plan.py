"""Command line: where to cut, and what it will cost.

    python -m pipeline.plan --config C [--stages S] [--microbatches M] [--cluster F] [--json]
        [--trace FILE] [--section.field value ...]

This package knows no model, so the configuration says where one comes from: its top-level key
``program`` is ``package.module:function`` (default ``rag_mm.program:for_planning``), called with the
path of the configuration and the list of overrides; it gives (BlockProgram, batch, ParallelConfig).
The price is that a broken model shows up as an import error here.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from pipeline.config import ParallelConfig
from pipeline.costs import Link
from pipeline.partition import partition
from pipeline.plan_file import Plan
from pipeline.program import BlockProgram, nearest
from pipeline.simulate import Simulation, simulate
from pipeline.trace import Profile, trace

DEFAULT_PROGRAM = "rag_mm.program:for_planning"


@dataclass(frozen=True)
class Cluster:
    """What connects the stages and how much a device holds; the keys of a ``--cluster`` file (YAML)."""

    link_latency_s: float = 0.0
    link_bytes_per_s: float = float("inf")
    capacity_bytes: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            optional = field.name == "capacity_bytes" and value is None
            if not optional and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ValueError(f"cluster: {field.name} is {value!r}; it must be a number (write 1.0e9, not 1e9)")

    @classmethod
    def load(cls, path: str) -> Cluster:
        data = _load_yaml(path, "--cluster")
        known = [field.name for field in fields(cls)]
        for key in data:
            if key not in known:
                raise ValueError(f"{path}: unknown key {key!r}{nearest(key, known)}; allowed: {', '.join(known)}")
        return cls(**data)


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
        epilog="Fields of the configuration can be overridden: --parallel.schedule gpipe",
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, help="YAML configuration")
    parser.add_argument("--stages", type=int, help="overrides parallel.pipeline_stages")
    parser.add_argument("--microbatches", type=int, help="overrides parallel.num_microbatches")
    parser.add_argument("--cluster", help="YAML with link_latency_s, link_bytes_per_s, capacity_bytes")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--trace", metavar="FILE", help="write the simulated step as a trace for Perfetto")
    own, overrides = parser.parse_known_args(argv)
    expects_value = False
    for word in overrides:
        if word.startswith("--"):
            name = word[2:].partition("=")[0]
            if "." not in name:
                options = ("config", "stages", "microbatches", "cluster", "json", "trace")
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
    program, batch, parallel = load_program(arguments.config, overrides)
    changes: dict[str, Any] = {}
    if arguments.stages is not None:
        changes["pipeline_stages"] = arguments.stages
    if arguments.microbatches is not None:
        changes["num_microbatches"] = arguments.microbatches
    if parallel.plan and changes:
        raise ValueError(f"parallel.plan names {parallel.plan}; --stages and --microbatches would contradict it")
    parallel = replace(parallel, **changes)
    cluster = Cluster.load(arguments.cluster) if arguments.cluster else Cluster()
    plan, profile, run = make_plan(program, batch, parallel, cluster=cluster)
    if arguments.trace:
        try:
            run.write_trace(arguments.trace)
        except OSError as error:
            raise ValueError(f"--trace {arguments.trace}: {error.strerror}") from error
    if arguments.json:
        print(plan.to_json(), end="")
    else:
        _print_table(plan, profile, run)


def load_program(config: str, overrides: list[str]) -> tuple[BlockProgram, dict[str, Any], ParallelConfig]:
    """Call the function that the configuration's ``program`` names."""
    target = _load_yaml(config, "--config").get("program", DEFAULT_PROGRAM)
    module_name, colon, function_name = str(target).partition(":")
    if not colon or not module_name or not function_name:
        raise ValueError(f"{config}: program is {target!r}; write package.module:function")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{config}: program {target!r} cannot be imported ({error})") from error
    program, batch, parallel = function(config, overrides)
    return program, batch, parallel


def make_plan(
    program: BlockProgram, batch: dict[str, Any], parallel: ParallelConfig, *, cluster: Cluster
) -> tuple[Plan, Profile, Simulation]:
    """Trace and partition (or take the plan that is given), and simulate a step."""
    link = Link(cluster.link_latency_s, cluster.link_bytes_per_s)
    if parallel.plan:
        try:
            plan = Plan.from_json(Path(parallel.plan).read_text())
        except OSError as error:
            raise ValueError(f"parallel.plan {parallel.plan}: {error.strerror}") from error
        plan.validate(program)
        profile = trace(program, batch, num_microbatches=plan.num_microbatches)
        return plan, profile, simulate(profile, plan, link=link)
    profile = trace(program, batch, num_microbatches=parallel.num_microbatches)
    plan = partition(
        profile,
        num_stages=parallel.pipeline_stages,
        schedule=parallel.schedule,
        num_microbatches=parallel.num_microbatches,
        objective=parallel.objective,
        capacity_bytes=cluster.capacity_bytes,
        link_latency_s=cluster.link_latency_s,
        link_bytes_per_s=cluster.link_bytes_per_s,
    )
    return plan, profile, simulate(profile, plan, link=link)


def _load_yaml(path: str, option: str) -> dict[str, Any]:
    try:
        data = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"{option} {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{option} {path}: not valid YAML ({' '.join(str(error).split())})") from error
    if not isinstance(data, dict):
        raise ValueError(f"{option} {path}: must hold a mapping of keys to values")
    return data


def _print_table(plan: Plan, profile: Profile, run: Simulation) -> None:
    table = Table(title=f"{plan.num_stages} stages, {plan.schedule}, {plan.num_microbatches} micro-batches")
    for name in ("stage", "blocks", "forward ms", "backward ms", "memory MiB", "send KiB"):
        table.add_column(name, justify="left" if name == "blocks" else "right")
    for i, (stage, memory) in enumerate(zip(plan.stages, run.peak_memory_bytes, strict=True)):
        names = stage.blocks if len(stage.blocks) < 4 else (stage.blocks[0], "...", stage.blocks[-1])
        table.add_row(
            str(i),
            f"{', '.join(names)} ({len(stage.blocks)})",
            f"{stage.forward_s * 1e3:.2f}",
            f"{stage.backward_s * 1e3:.2f}",
            f"{memory / 2**20:.2f}",
            f"{stage.send_bytes / 2**10:.2f}",
        )
    console = Console()
    console.print(table)
    console.print(f"step {run.step_s * 1e3:.2f} ms, bubble {run.bubble:.1%}, plan {plan.hash}", highlight=False)
    for block in profile.blocks:
        if block.lineage != "sample" or block.stateful:
            why = f"mixes samples ({block.lineage}): {block.mixes}" if block.mixes else "changes buffers"
            console.print(f"warning: block {block.name!r} {why}; training would refuse it", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
