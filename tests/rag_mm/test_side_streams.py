"""What adist and loop ask of a reader, against slow twins: loops over heads and tokens, and runs without a document."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.verify import whole_batch_gradients
from rag_mm.objectives import ObjectivesConfig
from rag_mm.reader.config import ReaderConfig
from rag_mm.reader.document_attention import document_attention
from rag_mm.reader.fusion import answering_program, reader_program
from rag_mm.reader.layers import Attention, DecoderLayer
from rag_mm.reader.side_streams import SideStreams, others, without_each
from tests.rag_mm.reader_batch import reader, reader_batch

PAIRS = ("document", "document_match", "document_image", "context_mask", "context_token", "document_embedding")
EXACT = {"atol": 1e-12, "rtol": 1e-10}


def kl(worth_Bk: Tensor, score_Bk: Tensor, weight_B: Tensor, *, target: float, temperature: float) -> Tensor:
    p, q = (worth_Bk / target).softmax(1), (score_Bk / temperature).softmax(1)
    return weight_B * (p * (p.log() - q.log())).sum(1)


def scores(batch: dict[str, Tensor], k: int) -> Tensor:
    documents = batch["document_embedding"].detach().unflatten(0, (-1, k))
    return torch.einsum("be,bke->bk", batch["query_embedding"].detach(), documents)


@pytest.mark.parametrize("fusion", ["fid", "prepend"])
def test_loop_is_a_run_of_the_reader_without_each_document(fusion: str) -> None:
    """Those runs have no dropout, whatever the answer's stream has; fid's context has some, so none there."""
    k, batch = 3, reader_batch(k=3)
    weight, plain = (batch["target"] != 0).double(), reader(fusion).eval()
    worth = []
    for left_out in range(k):
        kept = [i for i in range(batch["document"].shape[0]) if i % k != left_out]
        rows = {n: t[kept] if n in PAIRS else t for n, t in batch.items()}
        with torch.no_grad():
            loss = plain.run({**rows, "target_weight": weight})["losses"][:, 0]
        worth.append(loss / weight.sum(1))  # minus the mean log-likelihood
    right = kl(torch.stack(worth, 1), scores(batch, k), batch["distill_weight"], target=0.5, temperature=0.1)
    program = reader(fusion, loop=2.0, dropout=0.0 if fusion == "fid" else 0.5).train()
    found = whole_batch_gradients(program, batch, seed=0, step=0)
    torch.testing.assert_close(found.outputs["losses"][:, 1], 2.0 * right, **EXACT)
    assert right[[0, 1, 3]].min() > 1e-3


def attended(batch: dict[str, Tensor], k: int, kind: str) -> Tensor:
    """Attention to each document (B, k) by loops over what the decoder layers were given."""
    program, calls = reader("fid").eval(), []
    for block in program.blocks:
        if isinstance(block.module, DecoderLayer):
            cross = block.module.cross_attention

            def watched(x: Tensor, context: Any, mask: Tensor, cross: Attention = cross) -> Tensor:
                calls.append((cross.query(x), *context, mask[:, 0]))
                return Attention.forward(cross, x, context, mask)

            cross.forward = watched  # type: ignore[method-assign]
    with torch.no_grad():
        program.run(batch)
    assert len(calls) == 2
    num_samples, is_target = batch["target"].shape[0], batch["target"] != 0
    found = torch.zeros(num_samples, k, dtype=torch.float64)
    for query, key, value, mask in calls:
        heads, length, width = key.shape[1], key.shape[2] // k, key.shape[3]
        for b in range(num_samples):
            for head in range(heads):
                asked = query[b, :, head * width : (head + 1) * width]
                logits = [[float(q @ key[b, head, j]) / math.sqrt(width) for j in range(k * length)] for q in asked]
                for document in range(k):
                    places = [j for j in range(document * length, (document + 1) * length) if mask[b, j]]
                    if kind == "logits":
                        value_of_it = sum(logits[0][j] for j in places) / len(places)
                    else:
                        value_of_it = 0.0
                        for t in is_target[b].nonzero().flatten().tolist():
                            total = sum(math.exp(logits[t][j]) for j in range(k * length) if mask[b, j])
                            shares = [math.exp(logits[t][j]) / total * float(value[b, head, j].norm()) for j in places]
                            value_of_it += sum(shares) / int(is_target[b].sum())
                    found[b, document] += value_of_it / heads / len(calls)
    return found


@pytest.mark.parametrize("kind", ["logits", "values"])
def test_adist_is_the_readers_attention_by_loops(kind: str) -> None:
    k, batch = 3, reader_batch(k=3)
    target = attended(batch, k, kind)
    right = kl(target, scores(batch, k), batch["distill_weight"], target=0.1, temperature=0.1)
    torch.manual_seed(0)
    found = whole_batch_gradients(reader("fid", adist=2.0, adist_from=kind).train(), batch, seed=0, step=0)
    torch.testing.assert_close(found.outputs["losses"][:, 1], 2.0 * right, **EXACT)
    assert target.std(1).min() > 1e-3  # documents differ


@pytest.mark.parametrize("kind", ["logits", "values"])
def test_adist_sees_no_dropout_of_the_decoder(kind: str) -> None:
    """The context's own dropout is what all streams read, so it is switched off here."""
    batch, found = reader_batch(), []
    for p in (0.5, 0.0):
        program = reader("fid", dropout=0.5, adist=1.0, adist_from=kind, emdr2=1.0).train()
        for block in program.blocks:
            if isinstance(block.module, DecoderLayer):
                block.module.dropout.p = p
            elif block.name == "embed":
                block.module.dropout.p = 0.0
        found.append(whole_batch_gradients(program, batch, seed=0, step=0).outputs["losses"])
    names = ObjectivesConfig(pdist=0, adist=1, emdr2=1).reader_names
    dropped, plain = (dict(zip(names, losses.unbind(1), strict=True)) for losses in found)
    assert torch.equal(dropped["adist"], plain["adist"]) and torch.equal(dropped["emdr2"], plain["emdr2"])
    assert not torch.allclose(dropped["generation"], plain["generation"])


@pytest.mark.parametrize("kind", ["logits", "values"])
def test_document_attention_does_not_depend_on_what_is_masked(kind: Any) -> None:
    g = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 2, n, 4, generator=g, dtype=torch.float64) for n in (3, 10, 10))
    mask = torch.rand(2, 10, generator=g) > 0.4
    mask[:, [0, 5]] = True
    found = document_attention(query, key, value, mask, k=2, kind=kind)
    assert found.shape == (2, 2, 3)
    key, value = (t.masked_fill(~mask[:, None, :, None], 1e3) for t in (key, value))
    torch.testing.assert_close(document_attention(query, key, value, mask, k=2, kind=kind), found, **EXACT)


@pytest.mark.parametrize(
    "fusion, objective", [("fid", "adist"), ("fid", "loop"), ("prepend", "loop"), ("fid", "emdr2_token")]
)
def test_the_reader_is_not_moved_and_the_scores_are(fusion: str, objective: str) -> None:
    batch = reader_batch()
    batch["target_weight"] = batch["target_weight"] * 1e-300  # still says which tokens are targets
    if objective == "emdr2_token":
        batch["target_weight"] = reader_batch()["target_weight"]
    weights = {"generation": 0.0 if objective == "emdr2_token" else 1.0, objective: 1.0}
    found = whole_batch_gradients(reader(fusion, **weights), batch, seed=0, step=0)
    assert max(g.abs().max().item() for g in found.gradients.values()) < 1e-3 / 1e3
    assert all(g.abs().max() > 1e-4 for g in found.input_gradients.values())


@pytest.mark.parametrize("fusion", ["fid", "prepend"])
def test_emdr2_token_is_rag_token_without_the_readers_gradient(fusion: str) -> None:
    batch = reader_batch()
    same = {"emdr2_token_score_temperature": 1.0, "generation": 0.0}
    ours = whole_batch_gradients(reader(fusion, emdr2_token=1.0, **same), batch, seed=0, step=0)
    rag = whole_batch_gradients(reader(fusion, rag_token=1.0, **same), batch, seed=0, step=0)
    torch.testing.assert_close(ours.outputs["losses"], rag.outputs["losses"], **EXACT)
    for name in ("query_embedding", "document_embedding"):
        torch.testing.assert_close(ours.input_gradients[name], rag.input_gradients[name], **EXACT)


def test_what_reaches_the_retriever_is_a_choice() -> None:
    batch = reader_batch()

    def largest(**objectives: Any) -> tuple[float, float]:
        found = whole_batch_gradients(reader("fid", **objectives), batch, seed=0, step=0)
        return tuple(  # type: ignore[return-value]
            max(g.abs().max().item() for g in gradients.values())
            for gradients in (found.gradients, found.input_gradients)
        )

    assert min(largest()) > 1e-4
    reader_only = largest(generation_trains="reader")
    assert reader_only[0] > 1e-4 and reader_only[1] == 0
    for name in ("rag_sequence", "rag_token"):
        found = largest(**{"generation": 0.0, name: 1.0, f"{name}_trains": "reader"})
        assert found[0] > 1e-4 and found[1] == 0


def test_answering_has_no_side_streams() -> None:
    everything: dict[str, Any] = {"pdist": 1.0, "rag_token": 1.0, "loop": 1.0}
    for fusion, more in (("fid", {"adist": 1.0}), ("prepend", {})):
        program = answering_program(reader(fusion, **everything, **more))
        plain = answering_program(reader(fusion))
        assert [(b.reads, b.writes) for b in program.blocks] == [(b.reads, b.writes) for b in plain.blocks]
        batch = {n: t for n, t in reader_batch().items() if n in program.inputs}
        with torch.no_grad():
            assert torch.equal(program.run(batch)["logits"], plain.run(batch)["logits"])


def test_prepend_refuses_adist_and_says_what_to_use() -> None:
    with pytest.raises(ValueError, match=r"objectives\.adist .*reader\.fusion fid, or pdist or loop"):
        reader_program(ReaderConfig(fusion="prepend"), ObjectivesConfig(adist=1), vocabulary=50, image_size=24)


def test_order_of_streams_and_rows_without_a_document() -> None:
    side = SideStreams.of(ObjectivesConfig(rag_token=1, adist=1, loop=1))
    assert side.names == ("alone", "marginal", "without", "probe", "attention") and "probe" not in side.pairs
    assert SideStreams.of(ObjectivesConfig(pdist=0)) == SideStreams()
    assert others(3).tolist() == [[1, 2], [0, 2], [0, 1]]
    pairs = torch.arange(6).view(6, 1)  # two samples of three documents with one token
    assert without_each(pairs, 2).tolist() == [[1, 2], [0, 2], [0, 1], [4, 5], [3, 5], [3, 4]]
