"""The prepend reader: causal, blind to padding, and able to learn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from data.config import DataConfig
from data.dataset import Dataset
from pipeline import Pipeline, Plan, trace
from pipeline.lineage import require_sample_lineage
from rag_mm.batch import Collator
from rag_mm.config import Config
from rag_mm.evaluate.answer import Answerer, Documents
from rag_mm.model import build_model
from rag_mm.objectives import ObjectivesConfig
from rag_mm.reader.config import ReaderConfig
from rag_mm.reader.fusion import reader_program
from rag_mm.reader.sequence import CausalLayer, Layout, Reach
from tests.rag_mm.reader_batch import PATCHES, reader, reader_batch
from tests.rag_mm.test_trainer import train

OBJECTIVES = {"generation": 1.0, "pdist": 1.0, "rag_sequence": 1.0}


def test_reach_against_a_loop() -> None:
    mask = torch.tensor([[True, False, True], [False, False, True]])
    reach = Reach.of(mask, 2)
    for n in range(2):
        there = [*mask[n].tolist(), True, True]
        for i in range(5):
            right = [(there[j] and j <= i) or j == i for j in range(5)]
            assert reach.allowed_NSS[n, i].tolist() == right
            if there[i]:
                assert reach.position_NS[n, i].item() == sum(there[:i])


def test_a_layer_with_kept_places_equals_the_whole_sequence() -> None:
    """In one piece, answer token by answer token, and several tokens at once."""
    torch.manual_seed(0)
    layer = CausalLayer(ReaderConfig(width=16, heads=2), Layout(4)).double().eval()
    batch = reader_batch(2)
    question, mask = batch["question"], torch.rand(4, 8 + 4 + 4 + 5) > 0.3
    context = 2 * (4 + 5) + (4 + 8)
    x = torch.randn(2, context + 3, 16).double()
    (whole,) = layer(x, question, mask)
    for cuts in ([context, context + 1, context + 2], [context], [context + 1]):
        cache: dict[str, Tensor] = {}
        parts = [layer.extend(cache, part, question, mask)[0] for part in x.tensor_split(cuts, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), whole)


def test_what_is_masked_moves_nothing() -> None:
    """Tokens where there are none, and pictures that do not exist."""
    batch, program = reader_batch(), reader("prepend", **OBJECTIVES).eval()
    right = program.run(batch)["losses"]
    changed = {name: tensor.detach().clone() for name, tensor in batch.items()}
    has_P = batch["context_mask"][:, 8 : 8 + PATCHES].any(1)
    changed["question_image"][~has_P[::2]] += 5.0
    document_has_P = batch["context_mask"][:, 8 + PATCHES : 8 + 2 * PATCHES].any(1)
    changed["document_image"][~document_has_P] += 5.0
    assert not has_P.all() and not document_has_P.all()
    padded = batch["document"] == 0
    changed["document_match"][padded] = 7.0
    torch.testing.assert_close(program.run(changed)["losses"], right, atol=1e-12, rtol=1e-10)


def test_a_document_reaches_only_what_comes_after_it() -> None:
    batch, program = reader_batch(k=2), reader("prepend").eval()
    head = program.index("head")
    one = program.run(batch, 0, head)["sequence"]
    changed = {**batch, "document": batch["document"].clone()}
    changed["document"][1, 5] = changed["document"][1, 5] % 40 + 1  # second document of sample 0
    other = program.run(changed, 0, head)["sequence"]
    place = (PATCHES + 20) + PATCHES + 5
    assert torch.equal(one[0, :place], other[0, :place]) and torch.equal(one[1:], other[1:])
    assert not torch.allclose(one[0, -1], other[0, -1])


def test_losses_do_not_depend_on_the_bucket(factbook: Dataset) -> None:
    """A sample by itself, and beside one with longer texts, gets the same contribution."""
    torch.manual_seed(0)
    config = ReaderConfig(fusion="prepend", width=16, heads=2, ffn_width=24)
    objective = ObjectivesConfig(pdist=1.0, rag_sequence=1.0)
    program = reader_program(config, objective, vocabulary=len(factbook.tokenizer), image_size=24).eval().double()
    collator = Collator(factbook.tokenizer, DataConfig(), num_patches=9)
    questions = ["capital of Japan?", "which is the very highest of all the points in the country of Nepal, please?"]
    answers = ["Tokyo", "Sagarmatha, also known as Mount Everest"]
    documents = [factbook.store.fetch(["jp", "cl"]), factbook.store.fetch(["us", "np"])]

    def losses(rows: int) -> Tensor:
        read = documents[:rows]
        pictures = collator.images([d.image for row in read for d in row])
        batch = collator.context(questions[:rows], read, collator.images([None] * rows), pictures)
        batch |= collator.answers(answers[:rows], torch.ones(rows))
        is_target = batch["target"] != 0
        ones = torch.ones(rows)
        batch |= {"target_weight": is_target.double(), "sample_weight": ones, "distill_weight": ones}
        g = torch.Generator().manual_seed(0)
        batch |= {
            "query_embedding": torch.randn(2, 4, generator=g)[:rows],
            "document_embedding": torch.randn(4, 4, generator=g)[: 2 * rows],
            "sample_id": torch.arange(rows),
        }
        batch = {n: t.double() if t.is_floating_point() else t for n, t in batch.items()}
        return program.run(batch)["losses"]

    alone, together = losses(1), losses(2)
    torch.testing.assert_close(together[0], alone[0], atol=1e-9, rtol=1e-9)


def test_it_learns_a_handful_of_samples() -> None:
    program = reader("prepend", dropout=0.1, pdist=0.1).float().train()
    batch = {n: t.detach().float() if t.is_floating_point() else t for n, t in reader_batch().items()}
    pipeline = Pipeline(program, Plan.from_cuts(program, [], num_microbatches=2))
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-2)
    losses = []
    for step in range(80):
        optimizer.zero_grad()
        losses.append(pipeline.step(batch, seed=0, step=step).outputs["losses"][:, 0].sum().item())
        optimizer.step()
    assert losses[0] > 3.5 and sum(losses[-5:]) / 5 < 0.5


@pytest.mark.parametrize("name", ["pdist", "rag_sequence"])
def test_blocks_do_not_mix_samples(name: str) -> None:
    program = reader("prepend", dropout=0.2, **{name: 1.0}).train()
    require_sample_lineage(trace(program, reader_batch(), num_microbatches=2, repeats=1))


@pytest.mark.parametrize("documents", ["gold", "none"])
def test_answers_do_not_depend_on_the_batch(factbook: Dataset, documents: Documents) -> None:
    """Evaluation reads with this reader as with fid: padding and batch mates change no answer."""
    config = Config(reader=ReaderConfig(fusion="prepend", width=16, heads=2, ffn_width=24))
    model = build_model(config, factbook)
    model.reader.eval()
    with torch.no_grad():  # an untrained reader says little; let it copy what stands out
        model.reader.blocks[-1].module.pointer.query.weight.mul_(20.0)
    samples = list(factbook.questions("test"))[:7]
    together = Answerer(config, factbook, model, None).answer(samples, documents)
    alone = Answerer(config, factbook, model, None, batch_size=1).answer(samples, documents)
    assert [p.answer for p in together] == [p.answer for p in alone]
    assert [p.num_read for p in together] == [1 if documents == "gold" else 0] * 7
    if documents == "gold":
        assert len({p.answer for p in together}) > 1


@pytest.mark.slow
def test_two_stages_follow_one_on_the_marginal_alone(factbook_dir: Path, tmp_path: Path) -> None:
    """`train.py` from proof to checkpoint: no generation loss, the reader trains on rag_sequence."""
    options = (
        "--reader.fusion", "prepend", "--objectives.generation", "0", "--objectives.rag_sequence", "1",
        "--objectives.pdist", "0", "--train.steps", "12",
    )  # fmt: skip
    one = train(factbook_dir, tmp_path / "one", *options)
    two = train(factbook_dir, tmp_path / "two", *options, "--parallel.pipeline_stages", "2")
    for a, b in zip(one, two, strict=True):
        assert a["retrieved_digest"] == b["retrieved_digest"]
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
    assert set(one[-1]["losses"]) == {"rag_sequence", "contrastive"}
    assert one[-1]["losses"]["rag_sequence"] < one[2]["losses"]["rag_sequence"]
