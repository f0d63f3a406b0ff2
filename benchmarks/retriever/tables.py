"""Put the results into docs/benchmarks.md: ``python -m benchmarks.retriever.tables``."""

from __future__ import annotations

from benchmarks.pipeline.tables import main
from benchmarks.retriever.measuring import RESULTS

if __name__ == "__main__":
    main(RESULTS)
