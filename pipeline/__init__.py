"""Cutting a model into pipeline stages without changing what it computes (docs/pipeline.md)."""

from pipeline import keyed
from pipeline.partition import partition
from pipeline.plan_file import Plan
from pipeline.program import Block, BlockProgram
from pipeline.runtime import Pipeline
from pipeline.simulate import simulate
from pipeline.trace import Profile, trace

__all__ = [
    "Block",
    "BlockProgram",
    "Pipeline",
    "Plan",
    "Profile",
    "keyed",
    "partition",
    "simulate",
    "trace",
]
