"""A run's answers by the rules of tasks: what converted data sets keep is what counts as right; values by hand."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, cast

import pytest

from data.dataset import Sample
from data.document import Document
from rag_mm.evaluate.__main__ import main
from rag_mm.evaluate.answer import Prediction, Run
from rag_mm.evaluate.judging import score
from rag_mm.evaluate.task_scores import find_tasks, references_by_task, score_tasks
from rag_mm.evaluate.tasks.captions import Captions
from rag_mm.evaluate.tasks.infoseek import InfoSeek
from rag_mm.evaluate.tasks.kilt import Kilt
from rag_mm.evaluate.tasks.task import Task, align
from rag_mm.evaluate.tasks.vqa import Vqa


class FromFiles(Captions):
    """A task of a user's own that knows files only."""

    name = "from_files"
    references_of = Task.references_of
    predictions_of = Task.predictions_of


def question(key: str, accepted: tuple[str, ...], *, gold: tuple[str, ...] = (), **meta: Any) -> Sample:
    return Sample(key, "?", accepted, "name", "", "", gold, meta=meta)


def results(task: Task[Any, Any], samples: list[Sample], predictions: list[Prediction], *documents: Document) -> Any:
    by_id = {document.id: document for document in documents}
    found = task.score(align(task.predictions_of(predictions, by_id), task.references_of(samples)))
    return found.results()


def test_vqa_counts_annotators_not_different_answers() -> None:
    """Converted VQA accepts each answer once and keeps all ten. Two of ten said red: .6; "blue", eight of ten: 1."""
    ten = [{"answer": "blue", "answer_id": i} for i in range(8)] + [{"answer": "red", "answer_id": i} for i in (8, 9)]
    samples = [question(key, ("blue", "red"), answers=ten, answer_type="other") for key in ("1", "2")]
    found = results(Vqa(), samples, [Prediction("1", "red"), Prediction("2", "Blue.")])
    assert found == {"vqa_accuracy": pytest.approx((0.6 + 1) / 2)}
    assert Vqa().references_of(samples)["1"].answer_type == "other"


def test_kilt_evidence_and_passages_of_pages() -> None:
    """Right answers both; of 1 the page is first (as a passage of it), of 2 it is not: KILT-EM one half."""
    outputs = {
        "1": [{"answer": "Ada", "provenance": [{"wikipedia_id": "5"}]}],
        "2": [{"answer": "Rome", "provenance": [{"wikipedia_id": "9"}]}, {"answer": "Roma"}],
    }
    samples = [question(key, ("?",), output=output) for key, output in outputs.items()]
    documents = [
        Document("5#3", "Ada", {}, meta={"document": "5", "passage": 3}, passage="she wrote"),
        Document("8", "Rome", {}, passage="a city"),
    ]
    predictions = [Prediction("1", "ada", ("5#3",), (1.0,), 1), Prediction("2", "Roma", ("8",), (1.0,), 1)]
    found = results(Kilt(k=(1,)), samples, predictions, *documents)
    assert (found["em"], found["kilt_em"], found["r_precision"], found["recall@1"]) == (1.0, 0.5, 0.5, 0.5)
    assert found["answer_recall_substring@1"] == 0.0  # "Ada" and "Rome" stand in titles only


def test_infoseek_ranges_and_splits() -> None:
    height = [{"wikidata": 4808.0, "range": [4327.2, 5288.8]}]
    samples = [
        question("1", ("4808",), answer_eval=height, data_split="val_unseen_question"),
        question("2", ("Alps",), answer_eval=["Alps", "the alps"], data_split="val_unseen_entity"),
        question("3", ("Po",), answer_eval=["Po"], data_split="val_unseen_entity"),
    ]
    found = results(InfoSeek(), samples, [Prediction("1", "5000 m"), Prediction("2", "alps"), Prediction("3", "?")])
    assert (found["unseen_question"], found["unseen_entity"]) == (1.0, 0.5)
    assert found["infoseek"] == pytest.approx(2 * 0.5 / 1.5)
    assert (found["correct[numerical]"], found["correct[text]"]) == (1.0, 0.5)


class Store:
    def read(self, ids: list[str], *, pictures: Collection[str]) -> list[Document]:
        assert not pictures
        return [Document(name, name, {}, image=b"png", passage=f"text of {name}") for name in ids]


def test_rows_that_say_nothing_and_documents_that_were_given() -> None:
    """A closed book retrieves nothing; the given document of gold_document is no hit."""
    samples = [question("q1", ("x",), gold=("d",)), question("q2", ("y",), gold=("e",))]
    said = {
        "joint": [Prediction("q1", "x", ("c", "d"), (2.0, 1.0), 1), Prediction("q2", "z", ("e", "c"), (2.0, 1.0), 1)],
        "gold_document": [Prediction(key, "x", (name,), (1.0,), 1) for key, name in (("q1", "d"), ("q2", "e"))],
        "closed_book": [Prediction("q1", "x"), Prediction("q2", "y")],
    }
    scored = {row: score(samples, predictions, frozenset()) for row, predictions in said.items()}
    tasks = find_tasks(["qa", "retrieval"])
    found = score_tasks(tasks, references_by_task(tasks, samples), scored, cast(Any, Store()))
    assert list(found["qa"]["rows"]) == ["joint", "gold_document", "closed_book"]
    assert found["qa"]["rows"]["closed_book"]["figures"]["em"]["value"] == 1.0
    assert "hit@1" not in found["qa"]["rows"]["gold_document"]["figures"]
    assert list(found["retrieval"]["rows"]) == ["joint"]
    figures = found["retrieval"]["rows"]["joint"]["figures"]
    assert figures["mrr"] == {"value": 0.75, "low": 0.5, "high": 1.0, "num": 2}
    assert "hit@1" in found["retrieval"]["definitions"]


@pytest.fixture(scope="module")
def result(run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("tasks")
    options = ["--num", "5", "--rows", "joint,pixels", "--tasks", "qa,retrieval", "--depth", "6"]
    arguments = [
        "--run-dir",
        str(run.directory),
        *options,
        "--json",
        str(out / "r.json"),
        "--report",
        str(out / "r.html"),
    ]
    assert main(arguments) == 0
    return {**json.loads((out / "r.json").read_text()), "page": (out / "r.html").read_text(encoding="utf-8")}


def test_the_command(run: Run, result: dict[str, Any]) -> None:
    """Figures that rows have too are the same; the depth is that of the lists, not of the page."""
    (row,) = [row for row in result["rows"] if row["name"] == "joint"]
    qa = result["tasks"]["qa"]["rows"]["joint"]["figures"]
    for name in ("em", "f1"):
        assert {**qa[name]} == pytest.approx(row["figures"][name])
    assert qa["hit@1"]["value"] == row["figures"]["hit@1"]["value"]
    assert result["depth"] == 6
    assert result["tasks"]["retrieval"]["rows"]["joint"]["context"]["documents_per_query"] == [6, 6]
    assert "pixels" in result["tasks"]["retrieval"]["rows"] and "ndcg@5" in result["page"]
    assert result["page"].count('class="document') - result["page"].count('class="documents"') == 4 * 5


def test_mistakes_are_one_sentence(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    start = ["--run-dir", str(run.directory), "--num", "2"]
    for options, message in (
        (["--tasks", f"{__name__}:FromFiles"], "FromFiles, which is scored from files"),
        (["--tasks", "qaa"], "did you mean qa?"),
        (["--tasks", "kilt"], "these questions are none of its: questions:0 "),
        (["--report", str(run.directory)], "which is a folder; name a file"),
        (["--depth", "3"], "--depth is 3; it must be at least 4"),
        (["--tasks", "qa", "--ask", "?"], "--tasks is given, but --ask scores no questions"),
    ):
        with pytest.raises(SystemExit) as ended:
            main([*start, *options])
        said = capsys.readouterr().err.strip()
        assert ended.value.code == 2 and message in said and len(said.splitlines()) == 1, said
