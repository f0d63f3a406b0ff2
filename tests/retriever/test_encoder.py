"""The dual encoder: rows do not mix, missing parts count nothing, untrained it is a lexical matcher."""

import pytest
import torch

from retriever.config import RetrieverConfig
from retriever.encoder import DualEncoder
from retriever.trigrams import hashed, idf_weights, trigrams

CONFIG = RetrieverConfig()


def encoder() -> DualEncoder:
    torch.manual_seed(0)
    return DualEncoder(CONFIG, image_size=24)


def embed(model: DualEncoder, texts: list[str], *, pictures: bool) -> torch.Tensor:
    image = torch.rand(len(texts), 3, 24, 24, generator=torch.Generator().manual_seed(1))
    return model(model.features(texts, image, torch.full((len(texts),), float(pictures))))


def test_trigrams_fold_case_and_accents_and_mark_word_ends():
    assert trigrams("São X") == [" sa", "sao", "ao ", " x "]


def test_idf_of_what_all_say_and_what_one_says():
    texts = ["what is nepal", "what is peru", "what is chad", "what is oman"]
    weights = idf_weights(texts, num_buckets=4096)
    ids, _ = hashed(["what", "nepal"], num_buckets=4096)
    assert weights[ids[0, 0]] == 1e-3  # in every text: log(4/4) = 0, kept above 0
    assert weights[ids[1, 0]] == 1.0  # in one text


def test_a_missing_picture_contributes_nothing():
    model = encoder()
    without, with_picture = embed(model, ["nepal"], pictures=False), embed(model, ["nepal"], pictures=True)
    assert torch.equal(without[:, CONFIG.text_dim :], torch.zeros(1, CONFIG.image_dim))
    score = (without @ with_picture.T).item()
    alone = (without[:, : CONFIG.text_dim] @ with_picture[:, : CONFIG.text_dim].T).item()
    assert score == pytest.approx(alone, rel=1e-6)  # zeros add nothing, but sum in another order


def test_an_empty_text_contributes_nothing():
    model = encoder()
    assert torch.equal(embed(model, [""], pictures=True)[:, : CONFIG.text_dim], torch.zeros(1, CONFIG.text_dim))


def test_rows_do_not_depend_on_their_batch():
    model = encoder()
    together = embed(model, ["nepal", "a far longer name than that"], pictures=False)
    alone = embed(model, ["nepal"], pictures=False)
    torch.testing.assert_close(together[:1], alone)


def test_untrained_names_find_their_titles():
    model = encoder()
    titles = ["Nepal", "Guinea", "Equatorial Guinea", "Guinea-Bissau", "Niger", "Nigeria", "France"]
    questions = [f"what is the capital of {title}?" for title in titles]
    model.text.fit(titles + questions)
    scores = embed(model, questions, pictures=False) @ embed(model, titles, pictures=False).T
    assert scores.argmax(1).tolist() == list(range(len(titles)))


def test_the_bag_is_the_gated_sum_of_its_vectors():
    model = encoder()
    model.text.fit(["nepal", "what is", "what else"])
    ids, mask = hashed(["what is nepal", "nepal"], num_buckets=CONFIG.text_buckets)
    gate = model.text.gate[ids] * mask
    bag = torch.einsum("nl,nle->ne", gate, model.text.vector[ids])
    torch.testing.assert_close(model.text(ids, mask), bag / (bag.square().sum(1, keepdim=True) + 1).sqrt())


def test_frozen_parts_have_no_gradient():
    model = encoder()
    embed(model, ["nepal"], pictures=True).sum().backward()
    assert model.text.vector.grad is None and not model.text.vector.requires_grad
    assert model.text.gate.grad is not None and model.image.out.weight.grad is not None
