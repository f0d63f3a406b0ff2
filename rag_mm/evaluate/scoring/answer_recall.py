"""Whether a retrieved text holds an answer, in the two definitions that papers report under one name.

``dpr``: text and answer are brought to Unicode NFD and cut into tokens, runs of letters, digits and marks, and every
other visible character by itself; the answer's tokens must stand in the text side by side, case aside. "art" is not
in "party", and "U.S." is five tokens. This is top-k accuracy of DPR (2004.04906) and of those who follow it.

``substring``: SQuAD's normalisation of both, then the answer anywhere in the text, also inside a word (KILT's
``answer_in_context``). It finds more, so figures of the two must not stand in one column.

An answer of which nothing is left (``""``; for ``substring`` also ``"The"``) would be found in every text, and is in
the original scripts. Here it is found nowhere; `is_searchable` lets callers count it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from functools import lru_cache

import regex

from rag_mm.evaluate.scoring.squad import normalise_answer

_TOKEN = regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]")


@lru_cache(maxsize=65536)
def dpr_tokens(text: str) -> tuple[str, ...]:
    """Lower-case tokens of a text in NFD; punctuation marks are tokens."""
    return tuple(token.lower() for token in _TOKEN.findall(unicodedata.normalize("NFD", text)))


def has_answer_dpr(text: str, answers: Iterable[str]) -> bool:
    """Whether the tokens of any answer are a contiguous part of the text's."""
    tokens = dpr_tokens(text)
    return any(_contains(tokens, dpr_tokens(answer)) for answer in answers)


def has_answer_substring(text: str, answers: Iterable[str]) -> bool:
    """Whether any answer, normalised, is a substring of the normalised text."""
    normalised = normalise_answer(text)
    return any(bool(answer) and answer in normalised for answer in map(normalise_answer, answers))


def is_searchable(answer: str) -> bool:
    """Whether both definitions have something to look for."""
    return bool(dpr_tokens(answer)) and bool(normalise_answer(answer))


def first_hit(hits: Iterable[bool]) -> int | None:
    """Rank, from 1, of the first document that is a hit: recall@k is 1 where it is at most k; None if none is."""
    return next((rank for rank, hit in enumerate(hits, start=1) if hit), None)


def _contains(tokens: Sequence[str], wanted: Sequence[str]) -> bool:
    size = len(wanted)
    if not size:
        return False
    return any(tokens[i : i + size] == wanted for i in range(len(tokens) - size + 1))
