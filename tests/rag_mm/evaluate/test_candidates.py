"""Answers that are ranked instead of written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from data.dataset import Dataset
from rag_mm.batch import END
from rag_mm.evaluate.answer import Answerer, Run
from rag_mm.evaluate.candidates import read_candidates, training_candidates
from rag_mm.evaluate.decoding import DecodingConfig
from rag_mm.model import build_model, weights


def test_candidates_of_a_field_are_what_training_questions_teach(factbook: Dataset) -> None:
    found = training_candidates(factbook)
    for field in ("capital", "climate"):
        taught = {s.answers[0] for s in factbook.questions("train") if s.field == field and s.weight}
        assert found.of(field) == tuple(sorted(taught))
    with pytest.raises(ValueError, match="no candidate for questions of field 'colour' in the training questions"):
        found.of("colour")


def test_files(tmp_path: Path) -> None:
    lines, fields, wrong = tmp_path / "a.txt", tmp_path / "b.json", tmp_path / "c.json"
    lines.write_text("Kathmandu\n\n Paris \nKathmandu\n")
    fields.write_text('{"capital": ["Rome", "Oslo", "Rome"]}')
    wrong.write_text('{"capital": ["Rome", 3]}')
    assert read_candidates(lines).of("whatever") == ("Kathmandu", "Paris")
    assert read_candidates(fields).of("capital") == ("Rome", "Oslo")
    with pytest.raises(ValueError, match="field 'climate'"):
        read_candidates(fields).of("climate")
    with pytest.raises(ValueError, match=r"c.json: capital must be a list of texts"):
        read_candidates(wrong)
    with pytest.raises(FileNotFoundError, match="which does not exist"):
        read_candidates(tmp_path / "nowhere.txt")
    wrong.write_text('{"capital":\n oops}')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        read_candidates(wrong)


@pytest.mark.parametrize("score_by", ["sum", "mean"])
def test_the_best_candidate_by_the_training_loss(run: Run, tmp_path: Path, score_by: str) -> None:
    """Each candidate's likelihood as the generation loss of the training program has it, one at a time."""
    own = (
        "Kathmandu",
        "Tokyo",
        "no",
        "Brasilia, in the middle of the country",
        "12 May 1968 (from the UK)",
        "Tokyo Bay",
    )
    (tmp_path / "own.txt").write_text("\n".join(own))
    samples = [s for s in run.dataset.questions("test") if s.field == "capital"][:5]
    decoding = DecodingConfig("score", candidates=str(tmp_path / "own.txt"), score_by=score_by)
    predictions = Answerer(run.config, run.dataset, run.model, None, decoding=decoding).answer(samples, "gold")

    training, encoder, collator = build_model(run.config, run.dataset), run.model.encoder, run.model.collator
    for name, tensor in weights(training).items():
        tensor.copy_(weights(run.model)[name])
    reader, chosen = training.reader.eval(), []
    for sample in samples:
        (document,) = run.dataset.store.fetch([sample.subject])
        image, theirs = collator.images([sample.image]), collator.images([document.image])
        given = collator.context([sample.question], [[document]], image, theirs)
        given["query_embedding"] = encoder(encoder.features([sample.question], *image)).detach()
        given["document_embedding"] = encoder(encoder.features([document.search_text], *theirs)).detach()
        values = []
        for text in own:
            tokens = collator.tokenizer(text + END, add_special_tokens=False)["input_ids"]
            target = torch.tensor([tokens[: run.config.data.max_answer_tokens]])
            answer_in = torch.cat([torch.full((1, 1), collator.bos), target[:, :-1]], dim=1)
            one = torch.ones(1)
            batch = {**given, "answer_in": answer_in, "target": target, "target_weight": torch.ones(target.shape)}
            batch |= {"sample_weight": one, "distill_weight": one, "sample_id": torch.zeros(1, dtype=torch.int64)}
            with torch.no_grad():
                likelihood = -reader.run(batch)["losses"][0, 0].item() / run.config.objectives.generation
            values.append(likelihood / (target.shape[1] if score_by == "mean" else 1))
        chosen.append(own[values.index(max(values))])
    assert [p.answer for p in predictions] == chosen


def test_candidates_that_are_cut_off_are_counted(run: Run, tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("no\na very long answer that nobody would ever want to read to its end\n")
    decoding = DecodingConfig("score", candidates=str(tmp_path / "own.txt"))
    samples = list(run.dataset.questions("test"))[:2]
    for prediction in Answerer(run.config, run.dataset, run.model, None, decoding=decoding).answer(samples, "gold"):
        assert prediction.truncated.count("candidates") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decoding": "beems"}, "evaluate.decoding is 'beems'; allowed: greedy, beam, score"),
        ({"num_beams": 3}, "evaluate.num_beams is 3, which evaluate.decoding greedy does not use; set .* to beam"),
        ({"decoding": "beam", "candidates": "x"}, "evaluate.candidates is 'x', which .* beam does not use"),
        ({"decoding": "beam", "num_beams": 0}, "evaluate.num_beams is 0; it must be at least 1"),
        ({"batch_size": 0}, "evaluate.batch_size is 0"),
    ],
)
def test_mistakes(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecodingConfig(**options)
