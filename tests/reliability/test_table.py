"""The table of the torture's findings in the docs."""

from __future__ import annotations

import pytest

from benchmarks.reliability.table import DOCS, markdown, put

RESULT = {
    "machine": {"cpu": "x"}, "date": "2026-11-30", "checkpoint_wait_s": 0.012, "kills": 3, "finished_runs": 2,
    "faults": [], "slowest_end_s": 1.25, "minutes": 2.0, "seed": 0, "steps": 30,
    "rows": [{"killed": "forked, one rank, any", "kills": 2}, {"killed": "launched, all, index", "kills": 1}],
}  # fmt: skip


def test_kills_and_faults_are_in_the_table():
    assert "3 kills (1 of launched runs) in 2 minutes on 2026-11-30" in markdown(RESULT) and "12 ms" in markdown(RESULT)
    assert "| forked, one rank, any | 2 |" in markdown(RESULT) and "Nothing was lost" in markdown(RESULT)
    found = markdown({**RESULT, "faults": ["run-1: step 4 differs in ['loss']"]})
    assert "- run-1: step 4 differs" in found and "faults: 1." in found and "Nothing was lost" not in found


def test_the_docs_have_its_place():
    text = put(DOCS.read_text(), "the table")
    assert "<!-- torture -->\nthe table\n<!-- /torture -->" in text
    assert put(text, "the table") == text
    with pytest.raises(ValueError, match="no place"):
        put("nothing", "the table")
