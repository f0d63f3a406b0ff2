"""The command, as it is called: output, exit status, messages; and the example of the documentation."""

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rag_mm.evaluate import score
from rag_mm.evaluate.tasks import registry
from rag_mm.evaluate.tasks.task import Task
from tests.rag_mm.evaluate.tasks.files import write
from tests.rag_mm.evaluate.tasks.test_broken_files import FILES

ROOT = Path(__file__).resolve().parents[3]
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs the command in this process; exit status, stdout, stderr."""

    def run(*argv: str | Path) -> tuple[int, str, str]:
        try:
            status = score.main([str(word) for word in argv])
        except SystemExit as error:
            status = int(error.code or 0)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Twenty questions, seven of them answered right, and the options that name the files."""
    references = write(tmp_path / "r.jsonl", [{"id": i, "answers": [f"answer {i}"]} for i in range(20)])
    answers = [{"id": i, "answer": f"the answer {i}" if i < 7 else "?"} for i in range(20)]
    predictions = write(tmp_path / "p.jsonl", answers)
    return ["--task", "qa", "--predictions", str(predictions), "--references", str(references)]


def test_json_is_one_object_of_fractions(call: Call, files: list[str]) -> None:
    status, out, err = call(*files, "--json", "-")
    assert (status, err) == (0, "")
    assert json.loads(out) == {"em": 0.35, "f1": 0.35}


def test_as_a_process(files: list[str]) -> None:
    command = [sys.executable, "-m", "rag_mm.evaluate.score", *files, "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert json.loads(done.stdout) == {"em": 0.35, "f1": 0.35}


def test_intervals_context_and_files(call: Call, files: list[str], tmp_path: Path) -> None:
    out = tmp_path / "deep" / "result.json"
    options = ["--intervals", "--full", "--draws", "2000", "--json", out, "--per_example", tmp_path / "each.jsonl"]
    assert call(*files, *options) == (0, "", "")
    found = json.loads(out.read_text())
    low, high = found["intervals"]["em"]
    # 20 independent answers, .35 right: the exact binomial percentiles of 20 draws at .35 are 3/20 and 11/20
    assert (low, high) == pytest.approx((0.15, 0.55), abs=0.051)
    context = found["context"]
    assert context["num_examples"] == 20 and "SQuAD" in context["definitions"]["em"]
    assert context["sha256"][files[3]] == hashlib.sha256(Path(files[3]).read_bytes()).hexdigest()
    assert context["missing"] == [] and "2000 draws, seed 0" in context["interval"]
    each = [json.loads(line) for line in (tmp_path / "each.jsonl").read_text().splitlines()]
    assert each[0] == {"id": "0", "em": 1.0, "f1": 1.0} and each[7]["em"] == 0.0


def test_the_same_files_give_the_same_intervals(call: Call, files: list[str], tmp_path: Path) -> None:
    answers = {str(i): f"answer {i}{' more' * i}" for i in range(20)}  # every F1 is another: 4 / (4 + i)
    files = [*files[:3], str(write(tmp_path / "q.json", answers)), *files[4:]]
    first, again = (call(*files, "--json", "-", "--intervals", "--draws", "300")[1] for _ in range(2))
    assert first == again
    assert first != call(*files, "--json", "-", "--intervals", "--draws", "300", "--seed", "1")[1]


def test_comparison(call: Call, files: list[str], tmp_path: Path) -> None:
    """Two more right, none less: difference .1; a sign-flip test of two non-zero differences has p = 1/2."""
    better = write(tmp_path / "q.json", {str(i): f"answer {i}" if i < 9 else "?" for i in range(20)})
    swapped = [*files, "--compare", better, "--json", "-", "--draws", "4000"]
    found = json.loads(call(*swapped)[1])["comparison"]["em"]
    assert (found["difference"], found["other"]) == (pytest.approx(-0.1), 0.45)
    assert found["p"] == pytest.approx(0.5, abs=0.03)
    assert found["low"] <= -0.1 <= found["high"] <= 0
    status, out, _ = call(*files, "--compare", better, "--draws", "300")
    assert status == 0 and "-0.1000" in out


def test_table_for_people(call: Call, files: list[str]) -> None:
    status, out, _ = call(*files, "--intervals", "--draws", "300")
    assert status == 0 and re.search(r"em +0\.3500 +0\.\d+–0\.\d+", out)


def test_list_of_tasks(call: Call) -> None:
    status, out, _ = call("--task", "list")
    assert status == 0 and all(name in out for name in registry.TASKS)


def test_missing_and_extra_ids_are_said(call: Call, files: list[str], tmp_path: Path) -> None:
    few = write(tmp_path / "few.json", {"0": "answer 0", "x": "?"})
    arguments = [*files[:3], str(few), *files[4:], "--json", "-"]
    status, out, err = call(*arguments)
    assert (status, json.loads(out)) == (0, {"em": 0.05, "f1": 0.05})
    assert "missing: 19 of 20 references have no prediction and count as wrong: 1, 2, 3, 4, 5 and 14 more" in err
    assert "extra: 1 predictions have no reference and are ignored: x" in err
    assert json.loads(call(*arguments, "--missing", "leave_out")[1])["em"] == 1.0
    status, out, err = call(*arguments, "--missing", "refuse")
    assert (status, out) == (2, "") and "19 references have no prediction" in err
    full = json.loads(call(*arguments, "--full")[1])["context"]
    assert len(full["missing"]) == 19 and full["extra"] == ["x"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "qaa"], "task is 'qaa'; did you mean qa?"),
        (["--task", "qa"], "--predictions is not set"),
        ([], "--task is not set; it must be one of qa, kilt, vqa"),
        (["--task", "qa", "--variant", "official"], "--variant does not apply to task qa, whose options are: k, row"),
        (["--task", "qa", "--k", "1,x"], "--k is '1,x'; it must be whole numbers"),
        (["--task", "qa", "--k", "0"], "k is 0; it must be whole numbers from 1"),
        (["--task", "vqa", "--variant", "x"], "variant is 'x'; it must be one of official"),
        (["--task", "qa", "--draws", "3"], "--draws is 3; it must be at least 100"),
        (["--task", "qa", "--full"], "--full adds to the JSON; say where that goes with --json"),
        (["--task", "qa", "--missing", "skip"], "missing is 'skip'; it must be one of zero, leave_out, refuse"),
        (["--task", "nowhere:Task"], "cannot be imported"),
        (["--task", "json:JSONDecoder"], "is no subclass of"),
        (["--task", "qa", "--prediction", "x"], "did you mean --predictions?"),
        (["--task", "qa", "--references", "/nowhere.jsonl"], "/nowhere.jsonl does not exist"),
    ],
)
def test_mistakes_end_with_status_2_and_a_sentence(
    call: Call, files: list[str], arguments: list[str], message: str
) -> None:
    given = arguments if message.startswith("--") and "not set" in message else [*files[2:], *arguments]
    status, out, err = call(*given)
    assert (status, out) == (2, "") and message in err and len(err.splitlines()) == 1


def test_a_bad_line_is_named(call: Call, files: list[str], tmp_path: Path) -> None:
    bad = write(tmp_path / "bad.jsonl", '{"id": 1, "answer": "x"}\n{"id": 2, "answer": ["x"]}\n')
    status, _, err = call(*files[:3], bad, *files[4:])
    assert status == 2 and f"{bad}:2: field answer is ['x']; it must be text" in err


@pytest.mark.parametrize("option", ["--json", "--per_example"])
def test_where_nothing_can_be_written(call: Call, files: list[str], tmp_path: Path, option: str) -> None:
    (tmp_path / "file").write_text("")
    for path, message in (
        (tmp_path, "which is a folder; name a file"),
        (tmp_path / "file" / "r.json", f"nothing can be written into {tmp_path / 'file'}"),
    ):
        status, out, err = call(*files, option, path)
        assert (status, out) == (2, "") and f"{option} is '{path}'" in err and message in err


@pytest.mark.parametrize("name", FILES)
def test_every_task_from_its_own_files(call: Call, tmp_path: Path, name: str) -> None:
    """Fractions, ranks of image-text pools, or CIDEr-D; nothing else is in the object."""
    first, predictions, second, references = FILES[name]
    paths = write(tmp_path / first, predictions), write(tmp_path / second, references)
    arguments = ["--task", name, "--predictions", paths[0], "--references", paths[1], "--json", "-"]
    status, out, _ = call(*arguments, "--intervals", "--compare", paths[0], "--draws", "100")
    found = json.loads(out)
    intervals, comparison = found.pop("intervals"), found.pop("comparison")
    assert status == 0 and found and set(comparison) == set(intervals) <= set(found)
    for metric, value in found.items():
        assert 0 <= value <= (10 if "rank" in metric or "cider" in metric else 1), metric
    for metric, (low, high) in intervals.items():
        assert low <= high and comparison[metric]["difference"] == 0 and comparison[metric]["p"] == 1


def test_references_in_two_files_and_a_name_with_a_comma(call: Call, tmp_path: Path) -> None:
    gold = [write(tmp_path / f"r{i}.jsonl", [{"id": i, "answers": ["x"]}]) for i in (1, 2)]
    predictions = write(tmp_path / "p.json", {"1": "x", "2": "y"})
    arguments = ["--task", "qa", "--predictions", predictions, "--json", "-", "--references"]
    assert json.loads(call(*arguments, f"{gold[0]},{gold[1]}")[1])["em"] == 0.5
    comma = write(tmp_path / "a,b.jsonl", [{"id": 1, "answers": ["x"]}])
    assert json.loads(call(*arguments, comma)[1])["em"] == 1.0


def test_short_names_of_caption_metrics(call: Call, tmp_path: Path) -> None:
    captions = [{"image_id": 1, "captions": ["a b c d e"]}, {"image_id": 2, "captions": ["v w x y z"]}]
    predictions = write(
        tmp_path / "p.jsonl", [{"image_id": 1, "caption": "a b c d e"}, {"image_id": 2, "caption": "v w"}]
    )
    references = write(tmp_path / "r.jsonl", captions)
    _, out, _ = call("--task", "captions", "--predictions", predictions, "--references", references, "--json", "-")
    found = json.loads(out)
    assert found["cider_d"] == found["cider_d_ptb_like"] > 0
    assert set(found) == {f"{m}{t}" for m in ("cider_d", "bleu_4", "rouge_l") for t in ("", "_ptb_like")}


@pytest.fixture
def example() -> Iterator[str]:
    """The documentation's own task, taken out of the text; the registry as it was afterwards."""
    before = dict(registry.TASKS)
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8"), re.DOTALL
    )
    (block,) = [b for b in blocks if "ExampleTask" in b]
    yield block
    registry.TASKS.clear()
    registry.TASKS.update(before)


def test_the_example_of_the_documentation_runs(
    call: Call, example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(example.splitlines()) <= 40
    (tmp_path / "my_year_task.py").write_text(example, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    references = write(
        tmp_path / "r.jsonl", [{"id": 1, "question": "?", "year": 1969}, {"id": 2, "question": "?", "year": 800}]
    )
    predictions = write(tmp_path / "p.jsonl", [{"id": 1, "answer": "in 1970"}, {"id": 2, "answer": "?"}])
    arguments = [
        "--task",
        "my_year_task:Years",
        "--predictions",
        predictions,
        "--references",
        references,
        "--json",
        "-",
    ]
    status, out, err = call(*arguments)
    assert (status, json.loads(out), err) == (0, {"exact": 0.0, "near": 0.5}, "")
    bad = write(tmp_path / "bad.jsonl", [{"id": 1, "question": "?", "year": "MCM"}])
    status, _, err = call(*arguments[:5], bad)
    assert status == 2 and "bad.jsonl:1: field year is 'MCM'; it must be a finite number" in err


def test_registry_refuses_a_name_twice() -> None:
    class Other(registry.TASKS["qa"]):  # type: ignore[misc, name-defined]
        pass

    with pytest.raises(ValueError, match="task 'qa' is there already: OpenDomainQa"):
        registry.register(Other)
    assert registry.register(registry.TASKS["qa"]) is registry.TASKS["qa"]


def test_every_task_says_what_it_reads() -> None:
    tasks: list[type[Task[Any, Any]]] = list(registry.TASKS.values())
    assert len(tasks) == 12
    for task in tasks:
        assert task.about and task.references_are and task.predictions_are
        assert registry.make(task.name, {}).name == task.name
