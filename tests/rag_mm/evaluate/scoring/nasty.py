"""Answers, texts and captions that break scorers: made by hand, and drawn at random from parts that do."""

from __future__ import annotations

import random

TEXTS = (
    "", " ", "the", "The", "a", "A an the", "...", "?!", "«El Aaiún»", "N'Djamena", "N’Djamena", "U.S.", "U.S.A",
    "1,000", "1000", "1.000", "one thousand", "two", "2", "ten o'clock", "don't", "dont", "do n't", "São Tomé",
    "Sa\u0303o Tome\u0301", "İstanbul", "ﬁsh", "東京", "東 京", "A\u00a0B", "tab\there", "new\nline", "the the",
    "theatre", "an apple a day", "x" * 50, "🙂", "🇳🇵 flag", "100%", "$5", "a/b", "a-b", "“quoted”", "¿qué?",
    "\u200bzero width",
)  # fmt: skip

_WORDS = (
    "a an the cat dog sits on mat red two 2 three , . ! ? ; don't isn't man's o'clock 1,000 U.S. blue-green (left) é "
    "the the of and & street"
)
WORDS = _WORDS.split()


def sentence(generator: random.Random, *, most: int = 12) -> str:
    """Up to ``most`` words, marks among them, sometimes none."""
    return " ".join(generator.choice(WORDS) for _ in range(generator.randint(0, most)))
