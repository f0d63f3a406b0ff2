"""Table and curve of a run of real weights: ``python -m benchmarks.retriever.pretrained``.

``runs/pretrained/before`` is the same configuration with both learning rates 0, so that its checkpoint holds the
weights as they come:

    python train.py --config configs/pretrained.yaml
    python train.py --config configs/pretrained.yaml --run-dir runs/pretrained/before --train.steps 1 \
        --train.learning_rate 0 --train.retriever_learning_rate 0
    for run in before joint; do
        python -m rag_mm.evaluate --run-dir runs/pretrained/$run --rows joint,no_documents --num 128
    done
    python -m benchmarks.retriever.pretrained --docs
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.pipeline.measuring import machine
from rag_mm.evaluate import figures

ROOT = Path(__file__).parents[2]
DOCS, CURVE = ROOT / "docs" / "pretrained.md", ROOT / "docs" / "images" / "pretrained.png"
RESULTS = Path(__file__).parent / "results" / "pretrained.json"
READS = {"joint": "retrieved", "no_documents": "nothing"}
MARK = re.compile(r"<!-- pretrained -->\n.*<!-- /pretrained -->\n", re.DOTALL)


def evaluated(run_dir: Path, num: int) -> dict[str, Any]:
    """The result that `rag_mm.evaluate` wrote."""
    path = run_dir / "eval" / f"test-{num}.json"
    if not path.is_file():
        raise SystemExit(f"{path} is missing; `python -m rag_mm.evaluate --run-dir {run_dir} --num {num}` makes it")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def collect(folder: Path, *, num: int) -> dict[str, Any]:
    """Rows by run, and how the run went."""
    rows = {run: evaluated(folder / run, num) for run in ("before", "joint")}
    lines = [json.loads(line) for line in (folder / "joint" / "metrics.jsonl").read_text().splitlines()]
    seconds = [sum(line["time_s"].values()) for line in lines]
    return {
        "rows": {
            run: {row["name"]: {k: v for k, v in row.items() if not isinstance(v, dict)} for row in found["rows"]}
            for run, found in rows.items()
        },
        "step": rows["joint"]["step"],
        "num_questions": rows["joint"]["num_questions"],
        "training_s": sum(seconds[: rows["joint"]["step"]]),
        "peak_memory_bytes": lines[-1]["peak_memory_bytes"],
        "machine": machine(),
    }


def table(result: dict[str, Any]) -> str:
    """Markdown."""
    lines = ["| reads | EM before | EM after | F1 before | F1 after |", "|---|---:|---:|---:|---:|"]
    for name, reads in READS.items():
        before, after = (result["rows"][run][name] for run in ("before", "joint"))
        lines.append(f"| {reads} | {before['em']:.3f} | {after['em']:.3f} | {before['f1']:.3f} | {after['f1']:.3f} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.retriever.pretrained", description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/pretrained"), help="folder with before/ and joint/")
    parser.add_argument("--num", type=int, default=128, help="questions that were asked")
    parser.add_argument("--docs", action="store_true", help="write the curve and the table into docs/")
    options = parser.parse_args(argv)
    result = collect(options.runs, num=options.num)
    text = table(result)
    print(text)
    RESULTS.write_text(json.dumps(result, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    if options.docs:
        title = f"SmolLM2-135M over retrieved documents, {result['step']} steps of 8 questions"
        figures.curves(options.runs / "joint", CURVE, title=title)
        given = DOCS.read_text(encoding="utf-8")
        DOCS.write_text(MARK.sub(f"<!-- pretrained -->\n{text}\n<!-- /pretrained -->\n", given), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
