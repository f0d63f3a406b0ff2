"""Sides of the dual encoder: shared or separate, frozen or not, told apart where it matters."""

import copy

import pytest
import torch

from retriever.config import RetrieverConfig
from retriever.embed import architecture, weights_hash
from retriever.encoder import DualEncoder, rows

SMALL = {"text_buckets": 256, "text_dim": 32, "image_dim": 16, "image_width": 8, "learned_text": True}


def encoder(**config) -> DualEncoder:
    torch.manual_seed(0)
    return DualEncoder(RetrieverConfig(**{**SMALL, **config}), image_size=24)


def given(model: DualEncoder, side):
    image = torch.rand(3, 3, 24, 24, generator=torch.Generator().manual_seed(1))
    return model.features(["nepal", "peru", "chad"], image, torch.tensor([1.0, 0.0, 1.0]), side=side)


def train(model: DualEncoder, *, steps: int = 3) -> None:
    """With weight decay, and an optimiser that is given everything that wants gradients."""
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.5)
    for _ in range(steps):
        loss = (model(given(model, "query")) - model(given(model, "document")).roll(1, 0)).square().sum()
        optimizer.zero_grad()
        (loss * model.scale()).backward()
        optimizer.step()


def test_shared_sides_have_the_names_and_weights_of_one_encoder():
    model = encoder()
    assert not [name for name in model.state_dict() if name.startswith("document")]
    assert torch.equal(model(given(model, "query")), model(given(model, "document")))


def test_separate_sides_start_equal_and_part():
    shared, model = encoder(), encoder(towers="separate")
    assert torch.equal(model(given(model, "query")), model(given(model, "document")))
    assert torch.equal(model(given(model, "query")), shared(given(shared, "query")))
    assert architecture(model, image_size=24) != architecture(shared, image_size=24)
    train(model)
    assert not torch.equal(model(given(model, "query")), model(given(model, "document")))


@pytest.mark.parametrize("kept, moved", [("document", ""), ("query", "document.")])
def test_a_frozen_side_keeps_its_bits_while_the_other_trains(kept: str, moved: str):
    model = encoder(towers="separate", freeze=kept)
    before = copy.deepcopy(model.state_dict())
    train(model)
    after = model.state_dict()
    still = [n for n in after if n.startswith("document.") == (kept == "document") and n != "log_scale"]
    assert len(still) == 9 and all(torch.equal(before[name], after[name]) for name in still)
    for name in ("text.gate", "text.vector", "image.out.weight", "log_weight"):
        assert not torch.equal(before[moved + name], after[moved + name]), name


@pytest.mark.parametrize("towers", ["shared", "separate"])
@pytest.mark.parametrize("kept", ["text", "image", "all"])
def test_a_frozen_part_keeps_its_bits_on_both_sides(kept: str, towers: str):
    model = encoder(towers=towers, freeze=kept)
    before = copy.deepcopy(model.state_dict())
    train(model)
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(before[name], tensor)}
    assert not [name for name in changed if f"{kept}." in name]
    assert "log_scale" in changed
    assert (changed == {"log_scale"}) == (kept == "all")


def test_a_shared_side_is_copied_before_half_of_it_is_frozen():
    model = encoder()
    with pytest.raises(ValueError, match=r"retriever.freeze is 'document'.*have one side"):
        model.freeze("document")
    train(model)
    kept = model(given(model, "document")).detach()
    query = model(given(model, "query")).detach()
    side = model.separate()
    assert model.separate() is side  # a second time, nothing happens
    model.freeze("document")
    train(model)
    assert torch.equal(model(given(model, "document")), kept)
    assert not torch.equal(model(given(model, "query")), query)
    with pytest.raises(ValueError, match="side"):
        given(model, None)


def test_rows_of_two_sides_are_told_apart_or_refused():
    model = encoder(towers="separate")
    train(model)
    query, document = given(model, "query"), given(model, "document")
    assert torch.equal(model(rows(document, torch.tensor([1])))[0], model(document)[1])
    assert model(rows(document, torch.zeros(0, dtype=torch.int64))).shape == (0, model.dim)
    with pytest.raises(ValueError, match="mixed"):
        model({name: torch.cat([query[name], document[name]]) for name in query})
    with pytest.raises(ValueError, match="do not say whether"):
        model({name: tensor for name, tensor in query.items() if name != "is_document"})


def test_prefixes_are_part_of_the_text_and_of_the_architecture_but_not_of_an_empty_text():
    model = encoder(query_prefix="query: ", document_prefix="passage: ")
    plain = encoder()
    image, none = torch.ones(2, 3, 24, 24), torch.zeros(2)
    with_prefix = model.features(["nepal", ""], image, none, side="query")
    assert torch.equal(model(with_prefix)[0], plain(plain.features(["query: nepal"], image[:1], none[:1]))[0])
    assert torch.equal(model(with_prefix)[1], torch.zeros(model.dim))
    assert "passage: " in architecture(model, image_size=24)


def test_an_empty_encoder_takes_a_checkpoint():
    model = encoder(towers="separate", fusion="learned", shared_dim=8)
    train(model)
    config = RetrieverConfig(**SMALL, towers="separate", fusion="learned", shared_dim=8)
    empty = DualEncoder.empty(config, image_size=24)
    assert all(tensor.is_meta for tensor in empty.state_dict().values())
    empty.load_state_dict(model.state_dict(), assign=True)
    assert weights_hash(empty) == weights_hash(model)
    assert torch.equal(empty(given(empty, "document")), model(given(model, "document")))


def test_freezing_a_side_of_shared_towers_is_refused_in_the_configuration():
    with pytest.raises(ValueError, match=r"retriever.freeze is 'query', but retriever.towers is 'shared'"):
        RetrieverConfig(freeze="query")
