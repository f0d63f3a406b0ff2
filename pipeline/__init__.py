"""Cutting a model into pipeline stages without changing what it computes (docs/pipeline.md)."""

from pipeline import keyed
from pipeline.plan_file import Plan
from pipeline.program import Block, BlockProgram
from pipeline.runtime import Pipeline

__all__ = ["Block", "BlockProgram", "Pipeline", "Plan", "keyed"]
