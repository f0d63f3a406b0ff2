"""The page of a run: what stands in it, that it fetches nothing, and how a real browser shows it."""

from __future__ import annotations

import html.parser
import http.server
import io
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from data.dataset import Sample
from data.document_store import Document
from rag_mm.evaluate import figures, report
from rag_mm.evaluate.answer import Prediction, Run
from rag_mm.evaluate.contribution import Contribution
from rag_mm.evaluate.evaluation import Evaluated, evaluate_run
from rag_mm.evaluate.judging import Scored, make_row, score
from rag_mm.evaluate.questions import QuestionsConfig

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
EVIL = "<script>document.title = 'owned'</script>"


class Page(html.parser.HTMLParser):
    """Every element with its attributes, and what is text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += f"{data} "

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def png(colour: str, size: tuple[int, int] = (6, 4)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, format="PNG")
    return buffer.getvalue()


def examples(url: str = "http://127.0.0.1:9") -> list[report.Example]:
    """One right, with a picture; one wrong, whose every text would like to be markup."""
    bad = f"{EVIL}<img src={url}/stolen>"
    samples = [
        Sample("np-capital", "what is the capital?", ("Kathmandu",), "picture", "capital", "np", ("np",), png("red")),
        Sample(f"q{bad}", f"who? {bad}", (f"me {bad}",), "name", f"who {bad}", "x", ("x",)),
    ]
    predictions = [
        Prediction("np-capital", "Kathmandu", ("np", "in"), (0.9, 0.25), 1),
        Prediction(f"q{bad}", f"you {bad}", ("evil",), (0.5,), 1),
    ]
    documents = [
        [Document("np", "Nepal", {"capital": "Kathmandu"}, png("blue")), Document("in", "India", {})],
        [Document("evil", bad, {"a": bad}, None, passage=bad)],
    ]
    parts = [(Contribution(-0.5, 1.0),), (Contribution(-2.25, 1.0),)]
    return [
        report.make_example(scored, own, part, others={"other": bad})
        for scored, own, part in zip(score(samples, predictions, frozenset()), documents, parts, strict=True)
    ]


def result(**changes: Any) -> dict[str, Any]:
    samples = [Sample(f"q{i}", "?", ("x",), "name", "capital", f"c{i}", ()) for i in range(4)]
    answers = [Prediction(s.id, "x" if i else "y") for i, s in enumerate(samples)]
    rows = [make_row("joint", score(samples, answers, frozenset()))]
    about = {"run_dir": f"runs/{EVIL}", "step": 3, "steps": 5, "split": "test", "fold": 0, "num_questions": 4}
    about |= {
        "num_documents": 9,
        "store_version": "abc+0",
        "index": {"version": 7},
        "k": 2,
        "intervals": "of countries",
    }
    return {"rows": rows, "comparisons": [], "definitions": {"em": "exact match"}, **about, **changes}


def test_figures_examples_and_contributions_are_there() -> None:
    page = Page(report.page(result(), examples(), row="joint", curves=None))
    text = " ".join(page.text.split())
    assert "em 0.750 0.25–1.00, n 4" in text  # three of four right; as make_row has the interval
    assert "k = 2" in text and "store abc+0, index version 7" in text and "The run has no metrics to draw." in text
    assert "what is the capital? Kathmandu right gold: Kathmandu" in text
    assert "Nepal right document score 0.900 contribution -0.50 nats, 100 % capital: Kathmandu" in text
    articles = page.all("article")
    assert [a["class"] for a in articles] == ["example right", "example wrong"]
    images = [a["src"] for a in page.all("img")]
    assert len(images) == 2 and all(str(src).startswith("data:image/png;base64,") for src in images)
    classes = [a["class"] for a in page.all("div") if str(a.get("class", "")).startswith("document")]
    assert classes == ["documents", "document", "document unread", "documents", "document"]


def test_texts_stay_texts_and_nothing_is_fetched() -> None:
    text = report.page(result(), examples(), row="joint", curves=None)
    page = Page(text)
    assert text.count("<script>") == 1 and EVIL in page.text  # shown, not run
    for tag, attributes in page.elements:
        assert tag not in ("link", "iframe", "object", "embed", "base", "source")
        for name in ("src", "href", "xlink:href", "srcset", "data", "action"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:", "#")), (tag, value)
        assert not any(name.startswith("on") for name in attributes)
    assert "@import" not in text and "url(" not in text
    (policy,) = [a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None and policy.startswith("default-src 'none'; img-src data:;")


def test_large_pictures_are_shrunk_and_broken_ones_left_out() -> None:
    large, broken = report.data_uri(png("green", (3000, 1000))), report.data_uri(b"no picture")
    assert broken is None and report.data_uri(None) is None
    assert large is not None and len(large) < 4000


def test_wrong_ones_are_added_and_marked() -> None:
    samples = [Sample(f"q{i}", "?", ("x",), "name", "f", f"c{i}", ()) for i in range(300)]
    answers = [Prediction(s.id, "y" if i % 4 == 0 else "x") for i, s in enumerate(samples)]
    shown = report.choose(score(samples, answers, frozenset()))
    assert [drawn for _, drawn in shown] == [True] * 40 + [False] * 20
    assert not any(item.em for item, drawn in shown if not drawn)
    assert len({item.sample.id for item, _ in shown}) == 60
    again = report.choose(score(samples[::-1], answers[::-1], frozenset()))
    assert [item.sample.id for item, _ in again] == [item.sample.id for item, _ in shown]  # whatever the order


@pytest.fixture(scope="module")
def evaluated(run: Run) -> Evaluated:
    return evaluate_run(run, ["pixels", "joint"], QuestionsConfig("test", 8), console=Console(quiet=True))


def test_of_a_run(run: Run, evaluated: Evaluated, tmp_path: Path) -> None:
    path = report.write_report(run, evaluated, tmp_path / "deep" / "report.html")
    page = Page(path.read_text(encoding="utf-8"))
    articles = page.all("article")
    assert len(articles) == 8 and {a["id"] for a in articles} == {s.sample.id for s in evaluated.scored["joint"]}
    read = run.config.retriever.k * len(articles)
    assert len(page.all("meter")) == read and page.text.count("contribution ") == read
    assert not (run.directory / "eval" / "test-8.html").exists()
    assert report.write_report(run, evaluated) == run.directory / "eval" / "test-8.html"
    assert (run.directory / "eval" / "test-8.html").read_bytes() == path.read_bytes()


def test_rows_that_only_retrieve_have_no_answers_to_show(run: Run, evaluated: Evaluated, tmp_path: Path) -> None:
    scored: dict[str, list[Scored]] = {"pixels": evaluated.scored["pixels"]}
    path = report.write_report(
        run, Evaluated(scored, evaluated.header, evaluated.path, evaluated.questions), tmp_path / "r.html"
    )
    assert "No row of this evaluation answers." in path.read_text()


def metrics_of_a_run(folder: Path) -> Path:
    losses = [
        {"step": i, "losses": {"generation": 2 / i}, "hit_at_k": 1 - 1 / i, "token_accuracy": 0.5} for i in (1, 2)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in losses))
    return folder


def test_curves_are_an_element_without_links(tmp_path: Path) -> None:
    svg = figures.curves_svg(metrics_of_a_run(tmp_path), title="a < b")
    page = Page(svg)
    assert svg.startswith("<svg") and page.elements[0][0] == "svg" and len(page.all("path")) > 4
    assert all(str(a["xlink:href"]).startswith("#") for a in page.all("use"))
    assert svg == figures.curves_svg(tmp_path, title="a < b")


class Seen(http.server.BaseHTTPRequestHandler):
    """Notes what is asked for."""

    paths: list[str]

    def do_GET(self) -> None:
        self.paths.append(self.path)
        self.send_response(404)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    paths: list[str] = []
    handler = type("Handler", (Seen,), {"paths": paths})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_port}", paths
        listening.shutdown()


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium or chrome here")
def test_in_a_browser(tmp_path: Path, server: tuple[str, list[str]]) -> None:
    """Run by a real browser: the filter works, the script of a title does not, and nothing is fetched."""
    url, asked = server
    curves = figures.curves_svg(metrics_of_a_run(tmp_path), title="")
    path = tmp_path / "report.html"
    path.write_text(report.page(result(), examples(url), row="joint", curves=curves), encoding="utf-8")
    everything = Page(browser(path.as_uri(), tmp_path))
    assert "2 of 2 shown" in everything.text and "hidden" not in everything.all("fieldset")[0]
    assert "owned" not in everything.text.replace(EVIL, "")
    wrong = Page(browser(f"{path.as_uri()}#wrong", tmp_path))
    assert "1 of 2 shown" in wrong.text
    assert ["hidden" in a for a in wrong.all("article")] == [True, False]
    control = tmp_path / "control.html"  # the server is reachable, and notes it
    control.write_text(f"<img src={url}/control>")
    browser(control.as_uri(), tmp_path)
    assert asked == ["/control"]


def browser(url: str, folder: Path) -> str:
    """The document as the browser has it after loading."""
    assert CHROMIUM is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
    done = subprocess.run([CHROMIUM, *flags, url], capture_output=True, text=True, timeout=240, check=True)
    return done.stdout
