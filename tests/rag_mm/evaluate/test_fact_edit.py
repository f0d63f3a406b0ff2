import os
from pathlib import Path

import pytest
import torch
from rich.console import Console

from data.document_store import DocumentStore
from rag_mm.evaluate import answer as answering
from rag_mm.evaluate.answer import Run, load_run
from rag_mm.evaluate.fact_edit import Fact, change_fact, copy_dataset, parse_fact


@pytest.fixture
def store(factbook_dir: Path) -> DocumentStore:
    return DocumentStore(factbook_dir / "documents")


def test_parse_fact(store: DocumentStore) -> None:
    assert parse_fact("np.capital=Pokhara", store) == Fact("np", "capital", "Pokhara")
    assert parse_fact("nepal.highest point = K2 = a peak", store) == Fact("np", "highest point", "K2 = a peak")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("capital=Pokhara", "write document.field=value"),
        ("np.capital", "write document.field=value"),
        ("np.capital=", "write document.field=value"),
        ("nepall.capital=x", r"'nepall', which does not exist; did you mean np \(Nepal\)"),
        ("np.capitol=x", "'capitol', which Nepal does not have; did you mean 'capital'"),
    ],
)
def test_mistakes_name_the_nearest(store: DocumentStore, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_fact(text, store)


def test_a_fact_changes_under_the_same_weights(
    run: Run, factbook_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a reader that recites the capital's line: what it is given has changed, and nothing else."""
    copy = tmp_path / "copy"
    copy_dataset(factbook_dir, copy)
    edited = load_run(run.directory, data_dir=copy)
    tokenizer, end = run.model.collator.tokenizer, run.model.collator.end

    def recite(program: object, context: dict[str, torch.Tensor], **options: int) -> torch.Tensor:
        rows = context["question"].shape[0]
        lines = []
        for tokens in context["document"].view(rows, -1, context["document"].shape[1])[:, 0].tolist():
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            lines.append(tokenizer(text.partition("capital: ")[2].partition("\n")[0])["input_ids"] + [end])
        width = max(map(len, lines))
        return torch.tensor([line + [end] * (width - len(line)) for line in lines])

    monkeypatch.setattr(answering, "decode", recite)
    quiet = Console(quiet=True)
    change = change_fact(edited, Fact("np", "capital", "Pokhara"), index_dir=copy / "index", console=quiet)
    found = {
        s.kind: (before.answer, after.answer)
        for s, before, after in zip(change.samples, change.before, change.after, strict=True)
        if before.document_ids[0] == "np"
    }
    assert found["name"] == ("Kathmandu", "Pokhara")
    assert [s.id for s in change.samples] == ["np-capital-name", "np-capital-picture"]
    assert change.old_value == "Kathmandu" and change.index == (0, 1)
    assert [version.rpartition("+")[2] for version in change.store] == ["0", "1"]
    assert DocumentStore(factbook_dir / "documents").num_edits == 0
    assert DocumentStore(copy / "documents").num_edits == 1
    copy_dataset(factbook_dir, copy)  # there already: used as it is, with its edit
    assert DocumentStore(copy / "documents").num_edits == 1


def test_a_field_that_is_never_asked_for_is_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no question asks for it; asked are capital"):
        change_fact(run, Fact("np", "area", "1"), index_dir=tmp_path, console=Console(quiet=True))


def test_a_copy_shares_no_file_that_is_written_in_place(factbook_dir: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    copy_dataset(factbook_dir, source)
    DocumentStore(source / "documents").edit("np", "capital", "Pokhara")
    copy_dataset(source, tmp_path / "copy")
    log = Path("documents") / "edits.jsonl"
    assert not os.path.samefile(source / log, tmp_path / "copy" / log)
    DocumentStore(tmp_path / "copy" / "documents").edit("np", "capital", "Lumbini")
    assert DocumentStore(source / "documents").fetch(["np"])[0].fields["capital"] == "Pokhara"
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="holds something else"):
        copy_dataset(factbook_dir, tmp_path / "other")
