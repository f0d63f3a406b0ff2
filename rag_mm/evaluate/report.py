"""A run's evaluation as one page to look at: figures, curves, and questions with all that was read for them.

One file that fetches nothing: pictures are data URIs (shrunk to ``SIDE`` pixels), curves an inline SVG, style and
script inline, and a content security policy in the page forbids the rest, so that it can be sent around. It works
without script; with it, questions can be filtered. All texts are escaped by jinja2, and the policy admits only the
page's own script (by its hash), so a document whose title is a script stays a title.

Which questions: the first ``NUM_DRAWN`` in the order of a hash of their ids, which nobody chose, and, so that there
is enough to learn from, up to ``NUM_WRONG`` more of the wrong ones, marked as such. What a document contributed is
`rag_mm.evaluate.contribution`'s likelihood of the given answer with that document alone. Cost: one more pass of the
reader over those questions, seconds.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data import images
from data.document_store import Document
from data.factbook_questions import stable_hash
from rag_mm.evaluate import figures
from rag_mm.evaluate.answer import DEPTH, Answerer, Run
from rag_mm.evaluate.contribution import Contribution, contributions
from rag_mm.evaluate.decoding import DecodingConfig
from rag_mm.evaluate.evaluation import Evaluated
from rag_mm.evaluate.judging import Scored
from rag_mm.evaluate.rows import ROWS, row_of
from rag_mm.metrics import read_metrics

TEMPLATE, SCRIPT = (Path(__file__).with_name(f"report.{end}") for end in ("html", "js"))
NUM_DRAWN, NUM_WRONG, SIDE = 40, 20, 192
# Figures of the first table; the others (by field) stand in the second.
HEADLINE = (
    "em", "em kind=name", "em kind=picture", "em unseen", "f1", "f1 kind=name", "f1 kind=picture",
    "hit@1", "hit@1 kind=name", "hit@1 kind=picture", "hit@4", "hit@4 kind=name", "hit@4 kind=picture",
)  # fmt: skip


@dataclass(frozen=True)
class Shown:
    """A document as the page shows it.

    Attributes:
        gold: it counts as right.
        line: the line that the question is about, or empty.
        contribution: None where the reader did not read it.
    """

    id: str
    title: str
    text: str
    line: str
    image: str | None
    score: float
    gold: bool
    contribution: Contribution | None


@dataclass(frozen=True)
class Example:
    """A question as the page shows it.

    Attributes:
        drawn: by the hash; else it was added because it is wrong.
        others: what other rows answered.
    """

    id: str
    question: str
    image: str | None
    kind: str
    field: str
    answer: str
    gold_answers: tuple[str, ...]
    right: bool
    f1: float
    drawn: bool
    documents: tuple[Shown, ...]
    others: Mapping[str, str]


def write_report(run: Run, evaluated: Evaluated, path: Path | None = None) -> Path:
    """Write the page (by default beside the result file) and give its path; all ranks call it, the first writes."""
    path = path or evaluated.path.with_suffix(".html")
    row = _row(run, evaluated)
    chosen = choose(evaluated.scored[row]) if row else []
    pictured = evaluated.questions.of([s.sample for s, _ in chosen])
    shown = [
        (dataclasses.replace(s, sample=sample), drawn) for (s, drawn), sample in zip(chosen, pictured, strict=True)
    ]
    answerer = Answerer(run.config, run.dataset, run.model, None, layout=run.layout, decoding=DecodingConfig())
    given = (
        contributions(answerer, [s.sample for s, _ in shown], [s.prediction for s, _ in shown])
        if row and ROWS[row].weights_of
        else [()] * len(shown)
    )
    if run.layout.mesh.is_first:
        others = {name: {s.sample.id: s for s in items} for name, items in evaluated.scored.items() if name != row}
        examples = []
        for (item, drawn), parts in zip(shown, given, strict=True):
            documents = run.dataset.store.read(item.prediction.document_ids[: max(DEPTH, item.prediction.num_read)])
            said = {name: by_id[item.sample.id].prediction.answer for name, by_id in others.items()}
            answers = {name: answer for name, answer in said.items() if answer is not None}
            examples.append(make_example(item, documents, parts, drawn=drawn, others=answers))
        curves = figures.curves_svg(run.directory, title="") if read_metrics(run.directory) else None
        text = page(evaluated.result, examples, row=row, curves=curves)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    run.layout.mesh.barrier()
    return path


def _row(run: Run, evaluated: Evaluated) -> str:
    """The row whose answers are shown: the run's own, else the last that answers; empty if none does."""
    answering = [name for name, items in evaluated.scored.items() if any(s.em is not None for s in items)]
    own = row_of(run.config)
    return own if own in answering else next(reversed(answering), "")


def choose(scored: Sequence[Scored]) -> list[tuple[Scored, bool]]:
    """The questions to show, each with whether it was drawn (or added as a wrong one)."""
    order = sorted(scored, key=lambda s: stable_hash("report", s.sample.id))
    drawn, rest = order[:NUM_DRAWN], order[NUM_DRAWN:]
    return [*((s, True) for s in drawn), *((s, False) for s in [s for s in rest if not s.em][:NUM_WRONG])]


def make_example(
    scored: Scored,
    documents: Sequence[Document],
    parts: Sequence[Contribution],
    *,
    drawn: bool = True,
    others: Mapping[str, str] | None = None,
) -> Example:
    """What the page shows of an answered question and the documents that were retrieved for it."""
    sample, prediction = scored.sample, scored.prediction
    shown = tuple(
        Shown(
            document.id, document.title, document.text,
            f"{sample.field}: {document.fields[sample.field]}" if sample.field in document.fields else "",
            data_uri(document.image), prediction.scores[i], document.id in sample.gold,
            parts[i] if i < len(parts) else None,
        )
        for i, document in enumerate(documents)
    )  # fmt: skip
    return Example(
        sample.id, sample.question, data_uri(sample.image), sample.kind, sample.field, prediction.answer or "",
        sample.answers, bool(scored.em), scored.f1 or 0.0, drawn, shown, dict(others or {}),
    )  # fmt: skip


def page(result: Mapping[str, Any], examples: Sequence[Example], *, row: str, curves: str | None) -> str:
    """The HTML of the page.

    Args:
        result: contents of the result file.
        row: whose answers the examples are.
        curves: an ``<svg>`` element, trusted; None without metrics.
    """
    import jinja2
    from markupsafe import Markup

    script = SCRIPT.read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    names = dict.fromkeys(name for line in result["rows"] for name in line["figures"])
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        result=result, examples=examples, row=row, about=ROWS[row].about if row else "",
        rows={line["name"]: ROWS[line["name"]].about for line in result["rows"]},
        headline=[name for name in HEADLINE if name in names],
        by_field=[name for name in names if "field=" in name],
        context={k: _said(v) for k, v in result.items() if k not in ("rows", "comparisons", "definitions", "tasks")},
        curves=None if curves is None else Markup(curves),
        script=Markup(script), script_hash=_script_hash(script),
        num_wrong=sum(not example.right for example in examples), num_drawn=sum(example.drawn for example in examples),
    )  # fmt: skip


def data_uri(picture: bytes | None) -> str | None:
    """A picture as a PNG inside the page, None without one or where it cannot be decoded."""
    if picture is None:
        return None
    try:
        image = images.load_rgba(picture)
    except images.ImageError:
        return None
    image.thumbnail((SIDE, SIDE))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _script_hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _said(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
