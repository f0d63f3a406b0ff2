"""Files with bytes knocked out or over: every task either scores them or names the mistake; nothing else is raised."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from rag_mm.evaluate.tasks import registry
from tests.rag_mm.evaluate.tasks.files import write
from tests.rag_mm.evaluate.tasks.test_captions import COCO, COCO_RESULTS
from tests.rag_mm.evaluate.tasks.test_image_text import REFERENCES as IMAGES
from tests.rag_mm.evaluate.tasks.test_image_text import lists
from tests.rag_mm.evaluate.tasks.test_infoseek import ANSWERS, GOLD, TYPES
from tests.rag_mm.evaluate.tasks.test_kilt import GOLD as KILT
from tests.rag_mm.evaluate.tasks.test_kilt import guess
from tests.rag_mm.evaluate.tasks.test_retrieval import QRELS, RUN
from tests.rag_mm.evaluate.tasks.test_vqa import ANNOTATIONS

INFOSEEK = [{**gold, **kind} for gold, kind in zip(GOLD, TYPES, strict=True)]
DOCUMENTS = [{"id": "d", "text": "x", "score": 1.5}, {"id": "e", "text": "y", "score": 0.5}]
QA = [{"id": "a", "answer": "x", "documents": DOCUMENTS}]
FILES: dict[str, tuple[str, Any, str, Any]] = {
    "qa": ("p.jsonl", QA, "r.jsonl", [{"id": "a", "answers": ["x"], "gold_documents": ["d"]}]),
    "kilt": ("p.jsonl", [guess(1, "Ada", 5), guess(2, "Rome", 9)], "r.jsonl", KILT),
    "vqa": ("p.json", [{"question_id": 1, "answer": "yes"}], "r.json", ANNOTATIONS),
    "infoseek": ("p.jsonl", [{"data_id": k, "prediction": v} for k, v in ANSWERS.items()], "r.jsonl", INFOSEEK),
    "retrieval": ("p.run", RUN, "r.qrels", QRELS),
    "image_text": ("p.jsonl", lists(), "r.jsonl", IMAGES),
    "captions": ("p.json", COCO_RESULTS, "r.json", COCO),
    "zero_shot": ("p.jsonl", [{"id": 1, "scores": {"cat": 1.0, "dog": 0.5}}], "r.jsonl", [{"id": 1, "label": "cat"}]),
}


def damaged(raw: bytes, generator: random.Random) -> bytes:
    """A few bytes changed, dropped or doubled, or the end cut off."""
    data = bytearray(raw)
    for _ in range(generator.randint(1, 3)):
        at = generator.randrange(len(data))
        what = generator.random()
        if what < 0.4:
            data[at] = generator.choice(b'\x00\xff{}[]",:0a- \n')
        elif what < 0.7:
            del data[at : at + generator.randint(1, 6)]
        elif what < 0.9:
            data[at:at] = data[at : at + generator.randint(1, 20)]
        else:
            del data[max(1, at) :]
        if not data:
            break
    return bytes(data)


def replaced(value: Any, generator: random.Random) -> Any:
    """The same JSON with one value of another type somewhere."""
    if generator.random() < 0.25 or not isinstance(value, list | dict) or not value:
        return generator.choice([None, True, -1, 1.5, float("nan"), "", "x", [], {}, [None], {"a": 1}, [[]], [{}]])
    keys = list(range(len(value))) if isinstance(value, list) else list(value)
    copy, key = value.copy(), generator.choice(keys)
    copy[key] = replaced(value[key], generator)
    return copy


@pytest.mark.parametrize("name", FILES)
def test_only_mistakes_are_raised(tmp_path: Path, name: str) -> None:
    generator = random.Random(name)
    task = registry.make(name, {})
    first, predictions, second, references = FILES[name]
    good = write(tmp_path / first, predictions), write(tmp_path / second, references)
    assert task.score_files(good[0], [good[1]]).results()
    raws = [path.read_bytes() for path in good]
    named = 0
    for trial in range(250):
        side = trial % 2
        content = (predictions, references)[side]
        if isinstance(content, str) or generator.random() < 0.5:
            good[side].write_bytes(damaged(raws[side], generator))
        else:
            changed = replaced(content, generator)
            write(good[side], changed if good[side].suffix == ".json" or isinstance(changed, list) else [changed])
        try:
            task.score_files(good[0], [good[1]]).results()
        except ValueError as error:
            named += 1
            assert str(error)
        good[side].write_bytes(raws[side])
    assert named > 50


def test_every_task_is_damaged() -> None:
    assert {*FILES, "okvqa", "coco_5k", "coco_1k", "flickr30k_1k"} == set(registry.TASKS)
    assert json.dumps(FILES["vqa"][3])
