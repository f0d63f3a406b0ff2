"""The pointer head against loops written from its definition."""

import pytest
import torch

from rag_mm.reader.config import ReaderConfig
from rag_mm.reader.embedding import TokenEmbedding
from rag_mm.reader.pointer import MATCH_LENGTHS, PointerHead

VOCABULARY, WIDTH = 11, 8


@pytest.fixture
def head() -> PointerHead:
    torch.manual_seed(0)
    config = ReaderConfig(width=WIDTH, heads=2)
    return PointerHead(config, TokenEmbedding(config, vocabulary=VOCABULARY)).double()


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    token = torch.randint(1, VOCABULARY, (2, 9), generator=g)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, 6:] = False
    return {
        "answer_NTD": torch.randn(2, 4, WIDTH, generator=g, dtype=torch.float64),
        "key_NJD": torch.randn(2, 9, WIDTH, generator=g, dtype=torch.float64),
        "mask_NJ": mask,
        "token_NJ": token,
        "answer_in_NS": torch.randint(1, VOCABULARY, (2, 4), generator=g),
        "prior_NJ": torch.randn(2, 9, generator=g, dtype=torch.float64),
    }


def test_the_distribution_sums_to_one_and_agrees_with_the_likelihood(head, inputs):
    parts = head.parts(**inputs)
    p = head.distribution(parts, inputs["token_NJ"])
    torch.testing.assert_close(p.sum(-1), torch.ones(2, 4, dtype=torch.float64))
    for v in range(VOCABULARY):
        target = torch.full((2, 4), v)
        found = head.log_likelihood(parts, inputs["token_NJ"], target).exp()
        torch.testing.assert_close(found, p[..., v], atol=1e-12, rtol=1e-9)


def test_masked_positions_are_never_copied(head, inputs):
    _, _, pointer = head.parts(**inputs)
    assert pointer[1, :, 6:].exp().max() == 0.0


def test_match_bonus_against_a_loop(head, inputs):
    token, answer = inputs["token_NJ"], inputs["answer_in_NS"]
    answer[0, 1:4] = token[0, 2:5]  # a copy that has begun
    bonus = head._match_bonus(token, answer)
    for n in range(2):
        for t in range(4):
            for j in range(9):
                right = 0.0
                for length in range(1, MATCH_LENGTHS + 1):
                    pairs = [(j - i, t - i + 1) for i in range(1, length + 1)]
                    if all(a >= 0 and b >= 0 and token[n, a] == answer[n, b] for a, b in pairs):
                        right += head.match[length - 1].item()
                assert bonus[n, t, j].item() == pytest.approx(right)


def test_prior_moves_weight_between_documents(head, inputs):
    flat = head.parts(**{**inputs, "prior_NJ": torch.zeros(2, 9).double()})[2].exp()
    prior = torch.zeros(2, 9).double()
    prior[:, :3] = 5.0
    tilted = head.parts(**{**inputs, "prior_NJ": prior})[2].exp()
    assert (tilted[:, :, :3].sum(-1) > flat[:, :, :3].sum(-1)).all()


def test_the_last_position_alone_is_what_it_is_among_all(head, inputs):
    inputs["answer_in_NS"][0] = inputs["token_NJ"][0, 1:5]  # so that matches of every length count
    whole = head.parts(**inputs)
    last = head.parts(**{**inputs, "answer_NTD": inputs["answer_NTD"][:, -1:]})
    for a, b in zip(whole, last, strict=True):
        torch.testing.assert_close(a[:, -1:], b)
