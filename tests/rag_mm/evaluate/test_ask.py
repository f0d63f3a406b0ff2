"""One question: the answer is evaluation's, and the record names what it came from."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from rag_mm.evaluate.__main__ import main
from rag_mm.evaluate.answer import Answerer, Run, load_run
from rag_mm.evaluate.ask import Asker
from rag_mm.evaluate.fact_edit import copy_dataset


@pytest.fixture(scope="module")
def asker(run: Run) -> Asker:
    return Asker(run)


def test_the_answer_is_that_of_evaluation(run: Run, asker: Asker) -> None:
    picture = next(s for s in run.dataset.questions("test") if s.image is not None)
    name = next(s for s in run.dataset.questions("test") if s.image is None)
    answerer = Answerer(run.config, run.dataset, run.model, run.index())
    for sample in (picture, name):
        (expected,) = answerer.answer([sample])
        asked = asker.ask(sample.question, image=sample.image)
        assert asked.answer == expected.answer
        assert [d.id for d in asked.documents] == list(expected.document_ids)
        assert [d.score for d in asked.documents] == pytest.approx(expected.scores, abs=1e-6)
        assert [d.read for d in asked.documents] == [i < run.config.retriever.k for i in range(4)]


def test_the_record_names_weights_index_and_documents(run: Run, asker: Asker) -> None:
    picture = next(s for s in run.dataset.questions("test") if s.image is not None)
    assert picture.image is not None
    record = json.loads(json.dumps(asker.ask("what is this?", image=picture.image).record()))
    assert record["image_sha256"] == hashlib.sha256(picture.image).hexdigest()
    assert record["store"]["version"] == run.dataset.store.version
    assert record["index"]["weights"] == run.layout.document_hash() and record["index"]["num_edits"] == 0
    by = record["answered_by"]
    assert (by["step"], by["row"], by["k"], by["decoding"]) == (run.step, "joint", 2, {"decoding": "greedy"})
    (document,) = run.dataset.store.fetch([record["documents"][0]["id"]])
    assert record["documents"][0]["text_sha256"] == hashlib.sha256(document.text.encode()).hexdigest()
    assert record["documents"][0]["last_edit"] == 0
    for said, document in zip(
        record["documents"], run.dataset.store.fetch([d["id"] for d in record["documents"]]), strict=True
    ):
        of_image = None if document.image is None else hashlib.sha256(document.image).hexdigest()
        assert said["image_sha256"] == of_image
    read = [d for d in record["documents"] if d["read"]]
    assert sum(d["share"] for d in read) == pytest.approx(1) and all(d["log_likelihood"] < 0 for d in read)
    assert all(d["share"] is None for d in record["documents"] if not d["read"])


def test_an_edited_document_has_another_version(run: Run, asker: Asker, tmp_path: Path) -> None:
    copy_dataset(Path(run.config.data.dir), tmp_path / "data")
    shutil.copytree(run.directory, tmp_path / "run", ignore=shutil.ignore_patterns("index-eval", "eval"))
    edited = load_run(tmp_path / "run", data_dir=tmp_path / "data")
    edited.dataset.store.edit("ke", "capital", "Mombasa")
    edited.dataset.store.edit("np", "capital", "Pokhara")
    edited.dataset.store.edit("ke", "currency", "gold")
    store = edited.dataset.store
    assert [store.last_edit_of(name) for name in ("np", "ke", "jp")] == [2, 3, 0]
    before = asker.ask("what is the capital of Nepal?")
    after = Asker(edited).ask("what is the capital of Nepal?")
    (old,), (new,) = ([d for d in asked.documents if d.id == "np"] for asked in (before, after))
    assert (old.last_edit, new.last_edit) == (0, 2)
    assert old.text_sha256 != new.text_sha256 and old.image_sha256 == new.image_sha256
    assert new.fields["capital"] == "Pokhara"
    assert after.store["version"].endswith("+3") and after.index is not None and after.index["num_edits"] == 3
    assert after.answered_by["weights"] == before.answered_by["weights"]


def test_json_of_the_command(run: Run, asker: Asker, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    question = "what is the capital of Nepal?"
    arguments = ["--run-dir", str(run.directory), "--ask", question]
    assert main([*arguments, "--json", "-"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["answered_by"] == asker.ask(question).record()["answered_by"]
    assert main([*arguments, "--json", str(tmp_path / "deep" / "answer.json")]) == 0
    assert json.loads((tmp_path / "deep" / "answer.json").read_text()) == printed
    assert "weights" in capsys.readouterr().out  # the table is still shown


def test_an_empty_question_is_refused(asker: Asker) -> None:
    with pytest.raises(ValueError, match="the question is empty"):
        asker.ask("  ")
    with pytest.raises(ValueError, match="not an image"):
        asker.ask("what is this?", image=b"GIF?")
