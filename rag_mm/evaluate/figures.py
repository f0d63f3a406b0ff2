"""Two pictures of a run: how loss and hit@k went, and what it answered about three flags.

The three are the first picture questions in the order of a hash of their ids: nobody chose them.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from data import images
from data.document_store import Document, DocumentStore
from data.factbook_questions import stable_hash
from rag_mm.evaluate.judging import Scored
from rag_mm.metrics import read_metrics

BLUE, ORANGE, GREEN, RED, GREY = "#0072b2", "#d55e00", "#00783e", "#b3261e", "#777777"
RULE = "the first picture questions in the order of a hash of their ids"


def curves(run_dir: str | Path, path: Path, *, title: str) -> Path:
    """Loss by objective and hit@k over the steps of a run, as a PNG.

    Raises:
        ValueError: if the run has no metrics yet.
    """
    return _save(_curves(run_dir, title=title), path)


def curves_svg(run_dir: str | Path, *, title: str) -> str:
    """The same as an ``<svg>`` element to stand inside a page, without anything that a browser would fetch.

    Raises:
        ValueError: if the run has no metrics yet.
    """
    figure, buffer = _curves(run_dir, title=title), io.StringIO()
    nobody = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # metadata; the date would change the page
    with matplotlib.rc_context({"svg.hashsalt": "curves"}):
        figure.savefig(buffer, format="svg", metadata=nobody)
    pyplot.close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _curves(run_dir: str | Path, *, title: str) -> Figure:
    records = read_metrics(run_dir)
    if not records:
        raise ValueError(f"{run_dir} has no metrics to draw")
    figure, (loss, hit) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    names = list(dict.fromkeys(name for record in records for name in record["losses"]))
    for name, colour in zip(names, (BLUE, ORANGE, GREEN, RED), strict=False):
        _line(loss, records, lambda record, name=name: record["losses"].get(name), label=name, colour=colour)
    loss.set(xlabel="step", ylabel="loss", title="loss by objective")
    loss.set_ylim(bottom=0)
    loss.legend(frameon=False)
    _line(hit, records, lambda record: record["hit_at_k"], label="right document among the k read", colour=BLUE)
    _line(hit, records, lambda record: record["token_accuracy"], label="answer tokens right", colour=ORANGE)
    hit.set(xlabel="step", ylabel="share", ylim=(0, 1.02), title="training questions")
    hit.legend(frameon=False, loc="lower right")
    for axes in (loss, hit):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(0, records[-1]["step"])
    figure.suptitle(title)
    return figure


def _line(axes: Axes, records: Sequence[dict[str, Any]], value: Any, *, label: str, colour: str) -> None:
    """Each step faintly, and a running mean over about a fortieth of the run."""
    points = [(record["step"], number) for record in records if (number := value(record)) is not None]
    if not points:
        return
    steps, numbers = [p[0] for p in points], [p[1] for p in points]
    width = max(1, len(numbers) // 40)
    means = [sum(numbers[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(numbers))]
    axes.plot(steps, numbers, color=colour, alpha=0.2, linewidth=0.8)
    axes.plot(steps, means, color=colour, linewidth=1.8, label=label)


def picture_questions(scored: Sequence[Scored], num: int) -> list[Scored]:
    """The first ``num`` picture questions by RULE, of different subjects."""
    asked = sorted((s for s in scored if s.sample.kind == "picture"), key=lambda s: stable_hash("shown", s.sample.id))
    by_subject: dict[str, Scored] = {}
    for item in asked:
        by_subject.setdefault(item.sample.subject, item)
    return list(by_subject.values())[:num]


def answers(shown: Sequence[Scored], store: DocumentStore, path: Path, *, title: str) -> Path:
    """Questions with their pictures, the documents read with theirs, and the answers, as a PNG."""
    width = 1 + max((s.prediction.num_read for s in shown), default=0)
    figure, grid = pyplot.subplots(
        len(shown),
        width,
        figsize=(2.6 * width + 1.2, 2.5 * len(shown) + 0.6),
        layout="constrained",
        squeeze=False,
    )
    for axes, item in zip(grid, shown, strict=True):
        sample, prediction = item.sample, item.prediction
        right = bool(item.em)
        _picture(axes[0], sample.image)
        axes[0].set_title(sample.question, fontsize=9, wrap=True)
        axes[0].set_xlabel(
            f"{prediction.answer}\n(right: {sample.answers[0]})" if not right else f"{prediction.answer}",
            color=GREEN if right else RED, fontsize=10, fontweight="bold",
        )  # fmt: skip
        read = prediction.document_ids[: prediction.num_read]
        for i, (document, score) in enumerate(zip(store.read(read), prediction.scores, strict=False)):
            _document(axes[1 + i], document, score, sample.field, gold=document.id in sample.gold)
        for rest in axes[1 + len(read) :]:
            rest.axis("off")
    figure.suptitle(title, fontsize=11)
    return _save(figure, path)


def _document(axes: Axes, document: Document, score: float, field: str, *, gold: bool) -> None:
    _picture(axes, document.image)
    axes.set_title(f"{document.title}  {score:.2f}", fontsize=9, color=GREEN if gold else GREY)
    line = f"{field}: {document.fields[field]}" if field in document.fields else f"(no {field})"
    axes.set_xlabel(line, fontsize=9, color=GREY, wrap=True)


def _picture(axes: Axes, png: bytes | None) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    if png is not None:
        picture = images.load_rgba(png)
        axes.imshow(picture.crop(picture.getchannel("A").getbbox()))


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    pyplot.close(figure)
    path.write_bytes(buffer.getvalue())
    return path
