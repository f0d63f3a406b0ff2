"""Measurements of the pipeline: ``python -m benchmarks.pipeline.NAME``."""
