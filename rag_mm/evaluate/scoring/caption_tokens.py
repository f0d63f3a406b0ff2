"""Tokens of captions: the tokeniser is part of a caption metric's name.

``ptb``: Stanford's PTBTokenizer (CoreNLP 3.4.1), lower case, COCO's punctuation removed: what published figures use.
Needs Java, and `pycocoevalcap` for the archive (the extra ``captions``).

``ptb_like``: a few regular expressions after the same rules, without Java. It splits clitics (*do n't*, *man 's*) and
punctuation, keeps hyphenated words, numbers and abbreviations with inner periods whole, and drops the same punctuation.

``whitespace``: what is already tokenised, split at spaces, nothing removed.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import regex

Tokenizer = Literal["ptb_like", "ptb", "whitespace"]

# Removed after tokenising. The published list also has brackets as -LRB- and so on, in capitals, which lower-cased
# output never matches: brackets stay, as -lrb-.
PUNCTUATION = frozenset(["''", "'", "``", "`", ".", "?", "!", ",", ":", "-", "--", "...", ";"])

_JAR = "stanford-corenlp-3.4.1.jar"

_BRACKETS = {"(": "-lrb-", ")": "-rrb-", "[": "-lsb-", "]": "-rsb-", "{": "-lcb-", "}": "-rcb-"}
_QUOTES = regex.compile(r"[\u2018\u2019\u201b]")
_ABBREVIATION = (
    r"(?:mr|mrs|ms|dr|st|jr|sr|vs|prof|gen|col|sgt|lt|rev|hon|gov|sen|rep|mt|inc|ltd|co|corp|dept|est|etc|ave)\."
)
_DROPPED = regex.compile(r"[\"“”…—–]|\p{So}|\.+|-+")  # PTB writes them as marks of the list, or not at all
_CLITIC = r"'(?:s|m|d|re|ve|ll)\b"
_WORD = r"[\p{L}\p{M}\p{N}_]+"
_NUMBER = r"(?:(?<![\p{L}\p{N}])[-+])?(?:\d++(?:[.,:/]\d++)*+|(?<!\d)\.\d++)(?![\p{L}_])"
_TOKEN = regex.compile(
    rf"""
    (?:\p{{L}}\.){{2,}}                         # u.s., a.m.
  | {_ABBREVIATION}
  | [\p{{L}}\p{{M}}]+(?=n't\b) | n't\b          # do n't
  | {_CLITIC}                                   # man 's
  | {_NUMBER}(?:-{_WORD})*                      # 1,000, .5, 3-year-old
  | {_WORD}(?:(?!{_CLITIC})['&/-]{_WORD})*      # black-and-white, and/or, o'clock
  | \.\.\.+ | --+ | \S
    """,
    regex.VERBOSE,
)
_SPLIT = {"cannot": ("can", "not"), "gonna": ("gon", "na"), "wanna": ("wan", "na"), "gotta": ("got", "ta")}


def tokenize(texts: Sequence[str], tokenizer: Tokenizer) -> list[list[str]]:
    """Tokens of every text.

    Raises:
        ValueError: if ``ptb`` is asked for and Java or the archive is missing; says which.
    """
    if tokenizer == "ptb":
        return _ptb(texts)
    if tokenizer == "whitespace":
        return [text.split() for text in texts]
    return [ptb_like(text) for text in texts]


def ptb_like(text: str) -> list[str]:
    """Tokens by regular expressions."""
    text = _QUOTES.sub("'", text.lower())
    found: list[str] = []
    for token in _TOKEN.findall(text):
        found.extend(_SPLIT.get(token, (_BRACKETS.get(token, token),)))
    return [token for token in found if token not in PUNCTUATION and not _DROPPED.fullmatch(token)]


def ptb_archive() -> Path | None:
    """The tokeniser's Java archive, None if `pycocoevalcap` is not installed."""
    spec = importlib.util.find_spec("pycocoevalcap")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(next(iter(spec.submodule_search_locations))) / "tokenizer" / _JAR
    return path if path.exists() else None


def has_ptb() -> bool:
    """Whether ``ptb`` can run here."""
    return shutil.which("java") is not None and ptb_archive() is not None


def _ptb(texts: Sequence[str]) -> list[list[str]]:
    archive = ptb_archive()
    if archive is None:
        raise ValueError(
            "tokenizer ptb needs the archive in pycocoevalcap; `pip install 'rag-mm[captions]'`, or ptb_like"
        )
    if shutil.which("java") is None:
        raise ValueError("tokenizer ptb needs Java, and there is no `java` on the path; install a JRE, or use ptb_like")
    lines = [" ".join(text.split()) for text in texts]
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "captions.txt"
        source.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        command = ["java", "-cp", str(archive), "edu.stanford.nlp.process.PTBTokenizer"]
        command += ["-preserveLines", "-lowerCase", "-encoding", "UTF-8", str(source)]
        done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise ValueError(f"the PTB tokeniser failed: {done.stderr.decode(errors='replace').strip()[-300:]}")
    output = done.stdout.decode("utf-8").split("\n")
    tokens = [[word for word in line.split(" ") if word and word not in PUNCTUATION] for line in output]
    if len(tokens) < len(lines):
        raise ValueError(f"the PTB tokeniser gave {len(tokens)} lines for {len(lines)} captions")
    return tokens[: len(lines)]
