import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from rag_mm.evaluate import answer as answering
from rag_mm.evaluate import baselines
from rag_mm.evaluate.answer import Answerer, Run, load_run, weights
from rag_mm.mesh import Mesh
from rag_mm.saver import save
from retriever.embed import embed_documents


def test_load_run_takes_the_weights_of_the_checkpoint(run: Run, tmp_path: Path) -> None:
    """What is loaded is what was saved, also where fresh weights of the seed would differ."""
    for name in ("config.yaml",):
        (tmp_path / name).write_text((run.directory / name).read_text())
    changed = {name: tensor + 0.5 for name, tensor in weights(run.model).items()}
    mesh = Mesh(num_stages=1, num_replicas=1)
    for step, tensors in ((1, changed), (2, weights(run.model))):
        save(tmp_path, step, tensors=tensors, state={}, mesh=mesh, keep=5)
    loaded = load_run(tmp_path, step=1)
    assert loaded.step == 1 and load_run(tmp_path).step == 2
    for name, tensor in weights(loaded.model).items():
        assert torch.equal(tensor, changed[name]), name


def test_what_is_missing_is_named_with_the_command_that_makes_it(run: Run, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no run at .*nowhere; train one with `python train.py"):
        load_run(tmp_path / "nowhere")
    (tmp_path / "config.yaml").write_text((run.directory / "config.yaml").read_text())
    with pytest.raises(FileNotFoundError, match="no checkpoint yet"):
        load_run(tmp_path)
    with pytest.raises(FileNotFoundError, match="--step is 7"):
        load_run(run.directory, step=7)


def test_retrieved_documents_are_the_best_of_all(run: Run) -> None:
    """Against scoring every document with the encoder, one question at a time."""
    samples = list(run.dataset.questions("test"))[:6]
    predictions = Answerer(run.config, run.dataset, run.model, run.index()).answer(samples)
    encoder, collator = run.model.encoder, run.model.collator
    ids = run.dataset.store.ids
    size = run.config.data.image_size
    memory = embed_documents(encoder, run.dataset.store, ids, image_size=size, batch_size=7)
    for sample, prediction in zip(samples, predictions, strict=True):
        features = encoder.features([sample.question], *collator.images([sample.image]))
        with torch.no_grad():
            score = (encoder(features) @ memory.T)[0]
        best = sorted(range(len(ids)), key=lambda i: -score[i].item())[:4]
        assert prediction.document_ids == tuple(ids[i] for i in best)
        assert torch.allclose(torch.tensor(prediction.scores), score[best], atol=1e-5)
        assert prediction.num_read == run.config.retriever.k


@pytest.mark.parametrize("how", ["none", "reciprocal_rank", "weighted_sum"])
def test_what_a_question_must_not_be_given_is_not(run: Run, how: Any) -> None:
    """By embeddings, by words, by both and by pixels; as many are found as without it."""
    config = dataclasses.replace(run.config, retriever=dataclasses.replace(run.config.retriever, hybrid=how))
    answerer = Answerer(config, run.dataset, run.model, run.index())
    samples = [sample for sample in run.dataset.questions("test") if sample.image is not None][:3]
    for rows in (
        functools.partial(answerer.answer, documents="retrieved"),
        functools.partial(answerer.answer, documents="bm25"),
        functools.partial(baselines.pixels, run.dataset),
        functools.partial(baselines.bm25, run.dataset),
    ):
        before = rows(samples)
        barred = [dataclasses.replace(s, forbidden=p.document_ids[:2]) for s, p in zip(samples, before, strict=True)]
        for old, new in zip(before, rows([*barred]), strict=True):
            assert len(new.document_ids) == 4 and not set(new.document_ids) & set(old.document_ids[:2])
            assert how != "none" or new.document_ids[:2] == old.document_ids[2:]


def test_answers_do_not_depend_on_the_batch(run: Run) -> None:
    samples = list(run.dataset.questions("test"))[:9]
    index = run.index()
    together = Answerer(run.config, run.dataset, run.model, index).answer(samples)
    alone = Answerer(run.config, run.dataset, run.model, index, batch_size=1).answer(samples)
    assert [p.id for p in together] == [s.id for s in samples]
    assert [(p.id, p.answer, p.document_ids) for p in together] == [(p.id, p.answer, p.document_ids) for p in alone]


@pytest.mark.parametrize("documents", ["retrieved", "gold", "none"])
def test_the_reader_is_given_the_documents(
    run: Run, monkeypatch: pytest.MonkeyPatch, documents: answering.Documents
) -> None:
    """A reader that only recites the first document it is given."""
    tokenizer = run.model.collator.tokenizer
    seen: list[torch.Tensor] = []

    def recite(reader: object, context: dict[str, torch.Tensor], **options: int) -> torch.Tensor:
        rows = context["question"].shape[0]
        seen.append(context["document_embedding"])
        return context["document"].view(rows, -1, context["document"].shape[1])[:, 0]

    monkeypatch.setattr(answering, "decode", recite)
    samples = [s for s in run.dataset.questions("test") if s.field == "capital"]
    index = run.index() if documents == "retrieved" else None
    predictions = Answerer(run.config, run.dataset, run.model, index, batch_size=100).answer(samples, documents)
    titles = {d.id: d.title for d in run.dataset.store.fetch(run.dataset.store.ids)}
    for sample, prediction in zip(samples, predictions, strict=True):
        if documents == "none":
            assert (prediction.answer, prediction.document_ids, prediction.num_read) == ("", (), 0)
        else:
            first = prediction.document_ids[0]
            assert prediction.answer == tokenizer.decode(tokenizer(titles[first])["input_ids"])
            assert documents == "retrieved" or first == sample.subject
    assert (seen[0] == 0).all() == (documents == "none")


def test_an_index_of_other_weights_is_refused(run: Run) -> None:
    other = load_run(run.directory)
    with torch.no_grad():
        other.model.encoder.log_scale += 1
    with pytest.raises(ValueError, match="does not fit: its weights is"):
        Answerer(other.config, other.dataset, other.model, run.index())
