"""Put the results into docs/benchmarks.md: ``python -m benchmarks.data.tables`` (see `benchmarks.pipeline.tables`)."""

from __future__ import annotations

from benchmarks.data.measuring import RESULTS
from benchmarks.pipeline.tables import main

if __name__ == "__main__":
    main(RESULTS)
