"""Questions about countries, and which of them may be trained on.

Each field is asked in several wordings, chosen by a hash of what is asked, so that adding a country or a
field changes no other question. Countries are held out whole: a fold's test and dev countries give no
training question and no training pair. Countries whose flags cannot be told apart are one group and stay
together, or a training picture would show a test flag.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

NUM_FOLDS = 4
NUM_DEV_COUNTRIES = 23

TEMPLATES: dict[str, tuple[str, ...]] = {
    "capital": (
        "what is the capital of {x}?",
        "name the capital city of {x}.",
        "which city is the capital of {x}?",
        "{x} has which capital?",
    ),
    "nationality": (
        "what is the nationality of {x}?",
        "what do you call somebody from {x}?",
        "which nationality belongs to {x}?",
    ),
    "currency": (
        "what is the currency code of {x}?",
        "which currency is used in {x}?",
        "name the currency code of {x}.",
    ),
    "domain": (
        "what is the internet domain of {x}?",
        "which top-level domain does {x} have?",
        "web addresses in {x} end in what?",
    ),
    "independence": (
        "in what year did {x} become independent?",
        "what is the independence year of {x}?",
        "since which year has {x} been independent?",
    ),
    "holiday": (
        "when is the national holiday of {x}?",
        "on what date is the holiday of {x}?",
        "what date is the national holiday in {x}?",
    ),
    "highest point": (
        "what is the highest point of {x}?",
        "which peak is the highest point in {x}?",
        "name the highest point of {x}.",
    ),
    "aircraft code": (
        "what is the aircraft code of {x}?",
        "aircraft of {x} carry which code?",
        "which code do aircraft of {x} have?",
    ),
    "anthem": (
        "what is the national anthem of {x}?",
        "which anthem does {x} have?",
        "name the anthem of {x}.",
    ),
    "symbol": (
        "what is the national symbol of {x}?",
        "which symbol stands for {x}?",
        "name the national symbol of {x}.",
    ),
    "government": (
        "what type of government does {x} have?",
        "how is {x} governed?",
        "name the government type of {x}.",
    ),
    "climate": (
        "what is the climate of {x}?",
        "what climate does {x} have?",
        "how is the climate in {x}?",
    ),
    "region": (
        "in which region of the world is {x}?",
        "what region does {x} belong to?",
        "where in the world is {x}?",
    ),
    "suffrage": (
        "what is the voting age in {x}?",
        "what is the age of suffrage in {x}?",
        "how old must voters be in {x}?",
    ),
}
PICTURED = ("this country", "the country shown here", "the country pictured")


def stable_hash(*parts: object) -> int:
    """The same number in every process and on every machine."""
    joined = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(joined.encode(), digest_size=8).digest(), "big")


def with_article(title: str) -> str:
    """A country's name as it stands inside a sentence: "the Netherlands", but "Nepal"."""
    if title.startswith("The "):
        return "the " + title[4:]
    needs = r"^United|Republic\b|Islands$|Lands$|^(?:Netherlands|Philippines|Maldives|Comoros|Isle of|West Bank)"
    return f"the {title}" if re.search(needs, title) else title


def name_question(field: str, *, country: str, title: str) -> str:
    wordings = TEMPLATES[field]
    return wordings[stable_hash("name", field, country) % len(wordings)].format(x=with_article(title))


def picture_question(field: str, *, country: str) -> str:
    """Depends on the country's id only through the choice of wording, so it cannot leak the name."""
    wordings = TEMPLATES[field]
    number = stable_hash("picture", field, country)
    return wordings[number % len(wordings)].format(x=PICTURED[number // len(wordings) % len(PICTURED)])


def template_texts() -> list[str]:
    """Every wording, for the tokenizer."""
    every = [wording for wordings in TEMPLATES.values() for wording in wordings]
    return [wording.format(x=phrase) for wording in every for phrase in PICTURED]


@dataclass(frozen=True)
class Fold:
    """One way to hold countries out; the rest trains.

    Attributes:
        dev: countries on which choices are made.
        test: countries on which results are reported.
    """

    dev: tuple[str, ...]
    test: tuple[str, ...]


def make_folds(groups: Sequence[Sequence[str]], *, num_dev: int = NUM_DEV_COUNTRIES) -> list[Fold]:
    """Cut groups of countries into NUM_FOLDS test sets of near equal size, each with a dev set beside it.

    Large groups are dealt first, in hashed order, each to the smallest fold; no group is ever divided.
    """
    ordered = sorted(groups, key=lambda group: (-len(group), stable_hash("fold", *sorted(group))))
    tests: list[list[str]] = [[] for _ in range(NUM_FOLDS)]
    for group in ordered:
        min(tests, key=len).extend(group)
    folds = []
    for number, test in enumerate(tests):
        dev: list[str] = []
        rest = [group for group in groups if group[0] not in test]
        for group in sorted(rest, key=lambda group: stable_hash("dev", number, *sorted(group))):
            if len(dev) < min(num_dev, sum(map(len, rest)) // 4):
                dev.extend(group)
        folds.append(Fold(dev=tuple(sorted(dev)), test=tuple(sorted(test))))
    return folds
