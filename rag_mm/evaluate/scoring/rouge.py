"""ROUGE-L of long answers, as KILT's scorer has it from the PyPI package `rouge` (1.0, summary level).

It is another figure than the ROUGE-L of captions (`scoring.captions`): nothing is normalised, a text is split into
sentences at every full stop, and *different* words are counted, so a word said ten times counts once. For each sentence
of the gold answer and each of the answer, the words of one longest common subsequence are found; how many different
words that are in all, over the different words of the answer and of the gold answer, are precision and recall, and the
figure is their harmonic mean.

Details that move the figure and are kept: "3.5" is two sentences; spaces between two full stops are a sentence of one
empty word; of several longest common subsequences it is the one that is found from the ends backwards, dropping the
answer's word where dropping either would do.

Not taken from the package: its recursion, which a sentence of a thousand words ends with an error.
"""

from __future__ import annotations

from collections.abc import Sequence

_NEVER_ZERO = 1e-8  # part of the published formula, so that 1 comes out as 0.999999995


def rouge_l(answer: str, gold: str) -> float:
    """F-measure of the words of longest common subsequences; 0 where either text is nothing but full stops."""
    mine, right = _sentences(answer), _sentences(gold)
    if not mine or not right:
        return 0.0
    common: set[str] = set()
    for sentence in right:
        for other in mine:
            common |= _common_words(sentence, other)
    precision = len(common) / len({word for sentence in mine for word in sentence})
    recall = len(common) / len({word for sentence in right for word in sentence})
    return 2 * precision * recall / (precision + recall + _NEVER_ZERO)


def _sentences(text: str) -> list[list[str]]:
    """Words of each sentence; one empty word where there are only spaces."""
    return [part.split() or [""] for part in text.split(".") if part]


def _common_words(gold: Sequence[str], answer: Sequence[str]) -> set[str]:
    """The words of one longest common subsequence (see the module for which)."""
    if set(gold).isdisjoint(answer):
        return set()
    length = [[0] * (len(answer) + 1) for _ in range(len(gold) + 1)]
    for i, word in enumerate(gold, start=1):
        row, above = length[i], length[i - 1]
        for j, other in enumerate(answer, start=1):
            row[j] = above[j - 1] + 1 if word == other else max(above[j], row[j - 1])
    found: set[str] = set()
    i, j = len(gold), len(answer)
    while i and j:
        if gold[i - 1] == answer[j - 1]:
            found.add(gold[i - 1])
            i, j = i - 1, j - 1
        elif length[i - 1][j] > length[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found
