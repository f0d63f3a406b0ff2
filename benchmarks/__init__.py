"""Measurements; each module is one command. Results and what they mean: docs/benchmarks.md."""
