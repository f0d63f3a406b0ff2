"""Benchmarks of `data/`: ratios within one run, from files that the benchmark makes itself."""
