"""WordNet 3.0 as a reverse dictionary: find the entry that a gloss, or a sentence, is about.

Read are ``data.noun``, ``data.verb``, ``data.adj`` and ``data.adv`` as wndb(5WN) lays them out (Debian has them in
``wordnet-base``). An entry (synset) is a document: its words are the title. What else it says depends on what asks,
because a document that holds its own query is found by any search:

- ``--queries glosses``: the definition with the entry's words taken out asks; the document has its domain and the words
  of the entries around it (kinds of what, what kinds of it, parts, what it is derived from), and no gloss.
- ``--queries examples``: each example sentence asks as it is; the document has the definition, and no example.

Entries are split by a hash of their id: 5 % test, 5 % dev. All are in the memory. Words around an entry are read
where its pointers say (byte offsets of the same files), so the files cannot be gzip.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from data.document_store import Document
from data.formats.format import SPLITS, Format, Item, Piece, Work, option
from data.formats.lines import Lines, SourceFile, decode
from data.samples import Sample

FILES = {"n": "noun", "v": "verb", "a": "adj", "r": "adv"}
PARTS_OF_SPEECH = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}
# lexnames(5WN), by number.
DOMAINS = (
    "all", "pert", "all", "tops", "act", "animal", "artifact", "attribute", "body", "cognition", "communication",
    "event", "feeling", "food", "group", "location", "motive", "object", "person", "phenomenon", "plant", "possession",
    "process", "quantity", "relation", "shape", "state", "substance", "time", "body", "change", "cognition",
    "communication", "competition", "consumption", "contact", "creation", "emotion", "motion", "perception",
    "possession", "social", "stative", "weather", "ppl",
)  # fmt: skip
# What a document says of the entries that its pointers name (wninput(5WN)), and how many of a kind.
AROUND = {
    "kind of": ("@", "@i"), "kinds": ("~", "~i"), "part of": ("#p", "#m", "#s"), "parts": ("%p", "%m", "%s"),
    "similar": ("&",), "opposite": ("!",), "related": ("+", "\\", "=", "^"), "entails": ("*", ">"),
    "topic": (";c", ";r", ";u"),
}  # fmt: skip
MOST_AROUND = 6
MARKER = re.compile(r"\((?:p|a|ip)\)$")  # where an adjective may stand
EXAMPLE = re.compile(r'(?:^|;)\s*"([^"]+)"')  # quotation marks elsewhere belong to the definition
ENDINGS = r"(?:'s|s|es|ed|d|ing|ly)?"


@dataclass(frozen=True)
class Entry:
    """A line of a data file.

    Attributes:
        id: part of speech and offset, such as "n00001740".
        part_of_speech: in full.
        domain: lexicographer file without its part of speech.
        words: blanks for underscores, without markers.
        pointers: symbol, part of speech and offset of the entries it names.
        definition: the gloss without examples.
        examples: sentences.
    """

    id: str
    part_of_speech: str
    domain: str
    words: tuple[str, ...]
    pointers: tuple[tuple[str, str, int], ...]
    definition: str
    examples: tuple[str, ...]

    @classmethod
    def read(cls, text: str, place: str) -> Entry:
        """Raises ValueError, beginning with the place, if the line is no entry."""
        head, bar, gloss = text.partition(" | ")
        tokens = iter(head.split())
        try:
            if not bar:
                raise ValueError("there is no '|' before a gloss")
            offset, domain, kind, count = next(tokens), int(next(tokens)), next(tokens), int(next(tokens), 16)
            part_of_speech, domain_name = PARTS_OF_SPEECH[kind], DOMAINS[domain]
            words = []
            for _ in range(count):
                words.append(MARKER.sub("", next(tokens)).replace("_", " "))
                next(tokens)  # lex_id
            pointers = []
            for _ in range(int(next(tokens))):
                symbol, target, where, _ = (next(tokens) for _ in range(4))
                pointers.append((symbol, where, int(target)))
                PARTS_OF_SPEECH[where]
            if not words or not offset.isdigit():
                raise ValueError("it has no words")
        except (KeyError, IndexError, StopIteration, RuntimeError, ValueError) as error:
            reason = str(error) if type(error) is ValueError else "fields are missing or unknown"
            raise ValueError(f"{place}: not an entry as wndb(5WN) describes it ({reason}): {text[:40]!r}") from None
        examples = tuple(" ".join(found.split()) for found in EXAMPLE.findall(gloss))
        definition = " ".join(EXAMPLE.sub(" ", gloss).split()).strip("; ")
        letter = "a" if kind == "s" else kind
        return cls(
            f"{letter}{offset}", part_of_speech, domain_name, tuple(words), tuple(pointers), definition, examples
        )

    @property
    def split(self) -> str:
        """Of all that is asked about the entry: a hash of its id decides."""
        share = int.from_bytes(hashlib.sha256(self.id.encode()).digest()[:4], "big") / 2**32
        return "test" if share < 0.05 else "dev" if share < 0.10 else "train"

    @property
    def clue(self) -> str:
        """The definition without the entry's words and their regular forms; empty if nothing but them is there."""
        forms = "|".join(re.escape(word) for word in sorted(self.words, key=len, reverse=True))
        without = re.sub(rf"(?<!\w)(?:{forms}){ENDINGS}(?!\w)", " ", self.definition, flags=re.IGNORECASE)
        without = " ".join(without.split())
        return without if any(letter.isalnum() for letter in without) else ""


class _Around:
    """Words of the entries that pointers name, each read once."""

    def __init__(self, lines: dict[str, Lines]) -> None:
        self._lines = lines
        self._words: dict[tuple[str, int], str] = {}

    def text(self, entry: Entry, place: str) -> str:
        """What is around an entry, in words."""
        said = []
        for name, symbols in AROUND.items():
            named = [(where, offset) for symbol, where, offset in entry.pointers if symbol in symbols]
            first = [self._word(where, offset, place) for where, offset in list(dict.fromkeys(named))[:MOST_AROUND]]
            said += [f"{name}: {', '.join(first)}."] if first else []
        return " ".join(said)

    def _word(self, where: str, offset: int, place: str) -> str:
        source = FILES["a" if where == "s" else where]
        key = (source, offset)
        if key not in self._words:
            lines = self._lines[source]
            with open(lines.file, "rb") as file:
                file.seek(offset)
                line = file.readline()
            if not line.startswith(f"{offset:08d} ".encode()):
                raise ValueError(f"{place}: points to {offset:08d} {where}, but no entry begins there in {lines.path}")
            self._words[key] = Entry.read(decode(line, f"{lines.path}, byte {offset}"), lines.path).words[0]
        return self._words[key]


@dataclass(frozen=True, kw_only=True)
class WordNet(Format):
    """Entries, and what asks for them."""

    name: ClassVar[str] = "wordnet"
    summary: ClassVar[str] = "WordNet 3.0: a folder with data.noun, data.verb, data.adj and data.adv"
    rows_per_shard: ClassVar[int] = 20_000

    source: Path = option("the folder", type=Path, metavar="DIR")
    queries: str = option(
        "what asks: definitions without the entry's words, or example sentences",
        default="glosses", choices=("glosses", "examples"),
    )  # fmt: skip

    def sources(self) -> list[SourceFile]:
        return [SourceFile(name, self.source / f"data.{name}") for name in FILES.values()]

    def pieces(self, work: Work) -> list[Piece]:
        documents = [p for name in FILES.values() for p in work.pieces_of("documents", name)]
        asked = [
            p for split in SPLITS for name in FILES.values() for p in work.pieces_of(f"questions/{split}", name)
        ]  # fmt: skip
        return documents + asked

    def read(self, piece: Piece, work: Work) -> Iterator[Item]:
        around = _Around(work.lines)
        for number, text, place in work.read(piece):
            if text.startswith("  "):  # the licence, in front
                continue
            entry = Entry.read(text, place)
            if piece.folder == "documents":
                yield number, self._document(entry, around, place)
            elif entry.split == piece.split:
                for sample in self._asked(entry, work, place):
                    yield number, sample

    def _document(self, entry: Entry, around: _Around, place: str) -> Document:
        if self.queries == "examples":
            said = entry.definition
        else:
            said = f"{entry.part_of_speech}, {entry.domain}. {around.text(entry, place)}".strip()
        meta = {"words": list(entry.words), "definition": entry.definition, "examples": list(entry.examples)}
        return Document(entry.id, ", ".join(entry.words), {}, meta=meta, passage=said)

    def _asked(self, entry: Entry, work: Work, place: str) -> Iterator[Sample]:
        if self.queries == "examples":
            texts = {f"{entry.id}.{i}": text for i, text in enumerate(entry.examples)}
        else:
            texts = {entry.id: entry.clue} if entry.clue else {}
            if not texts:
                work.report.note("definition of nothing but the entry's own words, not asked", place)
        for name, text in texts.items():
            yield Sample(name, text, entry.words, "name", entry.part_of_speech, entry.id, gold=(entry.id,))
