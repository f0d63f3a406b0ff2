"""ROUGE-L of KILT: by hand from its rules, and against the package that KILT's scorer calls."""

import random

import pytest
import rouge

from rag_mm.evaluate.scoring.rouge import rouge_l
from tests.rag_mm.evaluate.scoring.nasty import TEXTS, sentence


@pytest.mark.parametrize(
    ("answer", "gold", "expected", "why"),
    [
        ("the cat is on the mat", "the cat sat on the mat", 4 / 5, "the, cat, on, mat of 5 different words each"),
        ("no no no no", "no", 1.0, "a word said four times counts once"),
        ("b a", "a b", 1 / 2, "in the same order only one of two"),
        ("Cat, dog", "cat dog", 1 / 2, "nothing is normalised: Cat is another word, and so would be dog,"),
        ("cat.", "cat", 1.0, "a full stop ends a sentence and is in no word"),
        ("3.5", "3.7", 1 / 2, "two sentences each: 3 and 5, 3 and 7"),
        # The example of the ROUGE paper (Lin 2004, 3.2): w1 w2 of the first sentence and w1 w3 w5 of the second are
        # four words of the five; the answer has eight different ones. 2 * 4/8 * 4/5 / (4/8 + 4/5)
        ("w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5", 0.8 / 1.3, "the union over the answer's sentences"),
        ("w1 w2", "w1 x. y w2", 2 * 2 / 2 * 2 / 4 / (1 + 2 / 4), "and over those of the gold answer"),
        ("b a", "a b. b", 1 / 2, "b of both sentences is one word: 1 of 2, 1 of 2"),
        # {b} of "a b" and "b a" (from the ends: dropping the answer's last word), then a: both words
        ("b a. a", "a b", 1.0, "of two common subsequences of one word, b"),
        ("a. . b", "a b", 2 * 2 / 3 / (1 + 2 / 3), "between the full stops is a sentence of one empty word: 2 of 3"),
        ("東京 。", "東京", 2 / 3, "only ASCII full stops end sentences: 1 of 2, 1 of 1"),
        ("...", "...", 0.0, "nothing but full stops"),
        ("a", "...", 0.0, "also where only the gold answer is"),
        ("a", "b", 0.0, "no word in common"),
    ],
)
def test_by_hand(answer: str, gold: str, expected: float, why: str) -> None:
    assert rouge_l(answer, gold) == pytest.approx(expected, abs=1e-7), why


def theirs(answer: str, gold: str) -> float:
    """As KILT's scorer calls it, with the errors that it takes for 0."""
    try:
        return float(rouge.Rouge().get_scores(answer, gold, avg=True)["rouge-l"]["f"])
    except ValueError:
        return 0.0


def test_agrees_with_the_package_on_nasty_texts() -> None:
    texts = [text for text in TEXTS if len(text) < 40]
    for answer in texts:
        for gold in texts:
            assert rouge_l(answer, gold) == pytest.approx(theirs(answer, gold), abs=1e-12), (answer, gold)


def test_agrees_with_the_package_on_random_texts() -> None:
    generator, values = random.Random(0), set()
    for _ in range(400):
        answer, gold = (" ".join(sentence(generator) for _ in range(generator.randint(1, 3))) for _ in range(2))
        values.add(rouge_l(answer, gold))
        assert rouge_l(answer, gold) == pytest.approx(theirs(answer, gold), abs=1e-12), (answer, gold)
    assert len(values) > 100


def test_a_sentence_of_thousands_of_words() -> None:
    """Which the package ends with a RecursionError."""
    words = [f"w{i}" for i in range(1500)]
    assert rouge_l(" ".join(words[::2]), " ".join(words)) == pytest.approx(2 * 0.5 / 1.5)
