"""Expected values are worked by hand from the two definitions; DPR's tokeniser has a slow twin."""

import unicodedata

import pytest

from rag_mm.evaluate.scoring.answer_recall import (
    dpr_tokens,
    first_hit,
    has_answer_dpr,
    has_answer_substring,
    is_searchable,
)
from tests.rag_mm.evaluate.scoring.nasty import TEXTS


def slow_tokens(text: str) -> tuple[str, ...]:
    """Character by character: L, N and M run together, Z and C separate, all else stands alone."""
    tokens: list[str] = []
    inside = False
    for mark in unicodedata.normalize("NFD", text):
        category = unicodedata.category(mark)[0]
        if category in "LNM":
            tokens = [*tokens[:-1], tokens[-1] + mark] if inside else [*tokens, mark]
        elif category not in "ZC":
            tokens.append(mark)
        inside = category in "LNM"
    return tuple(token.lower() for token in tokens)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("U.S.", ("u", ".", "s", ".")),
        ("São Tomé", ("sa\u0303o", "tome\u0301")),  # NFD: accents are marks, inside the token
        ("1,000 €", ("1", ",", "000", "€")),
        ("don't", ("don", "'", "t")),
        ("a\u200bb", ("a", "b")),  # a format character separates and is no token
        ("東京タワー", ("東京タワー",)),
        ("", ()),
    ],
)
def test_dpr_tokens(text: str, tokens: tuple[str, ...]) -> None:
    assert dpr_tokens(text) == tokens


@pytest.mark.parametrize("text", TEXTS)
def test_dpr_tokens_are_those_of_the_slow_twin(text: str) -> None:
    assert dpr_tokens(text) == slow_tokens(text)
    assert dpr_tokens(f"x{text}y ({text})") == slow_tokens(f"x{text}y ({text})")


@pytest.mark.parametrize(
    ("text", "answer", "dpr", "substring"),
    [
        ("Kathmandu is the capital of Nepal.", "KATHMANDU", True, True),
        ("They had a party.", "art", False, True),  # inside a word
        ("born in the U.S.A.", "USA", False, True),  # five tokens u . s . a against one; stripped, usa is there
        ("the United States", "United the States", False, True),  # an article in between is dropped by KILT only
        ("São Tomé", "Sa\u0303o Tome\u0301", True, False),  # composed and decomposed: only DPR normalises Unicode
        ("Sao Tome", "São Tomé", False, False),  # accents are not dropped by either
        ("in 1,000 years", "1000", False, True),
        ("constitutional federal monarchy", "constitutional monarchy", False, False),  # side by side only
        ("anything", "", False, False),  # the original scripts find an empty answer everywhere
        ("anything", "the", False, False),
        ("", "x", False, False),
    ],
)
def test_both_definitions(text: str, answer: str, dpr: bool, substring: bool) -> None:
    assert has_answer_dpr(text, [answer]) is dpr
    assert has_answer_substring(text, [answer]) is substring
    assert has_answer_dpr(text, ["nothing of it", answer]) is dpr  # any of several


def test_first_hit_and_searchable() -> None:
    assert first_hit([False, True, True]) == 2
    assert first_hit([]) is None
    assert first_hit([False]) is None
    assert [is_searchable(a) for a in ("x", "", "the", "?", "\u200b")] == [True, False, False, False, False]
