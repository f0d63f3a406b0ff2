"""Passages that questions carry with them (DPR's and FiD's files), each once, as a source of documents.

The same passage stands under many questions. One pass writes every passage the first time its id is met; what is kept
in memory is a 64-bit hash of the id and one of the text for each different passage.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from data.formats.format import Work
from data.formats.id_tables import hash_of
from data.formats.lines import SourceFile
from data.formats.rows import Row, json_row


def unique_contexts(
    work: Work, sources: Iterable[str], contexts_of: Callable[[Row], Iterator[Row]], id_of: Callable[[Row], str]
) -> SourceFile:
    """A source ``contexts`` of JSON lines: the contexts of all questions, each id once.

    Raises:
        ValueError: an id stands for two texts; the message names both places.
    """
    target = work.folder / "contexts.jsonl"
    if not target.exists():
        temporary = target.with_name("contexts.tmp")
        known: dict[int, int] = {}
        with temporary.open("w", encoding="utf-8") as out:
            for source in sources:
                for context in _all(work, source, contexts_of):
                    name, text = hash_of(id_of(context)), hash_of(context.text("text"))
                    if name not in known:
                        known[name] = text
                        out.write(json.dumps(context.values, ensure_ascii=False) + "\n")
                    elif known[name] != text:
                        context.fail(f"passage {id_of(context)!r} has another text than where it was first met")
        os.replace(temporary, target)
    return SourceFile("contexts", Path(target))


def _all(work: Work, source: str, contexts_of: Callable[[Row], Iterator[Row]]) -> Iterator[Row]:
    lines = work.lines[source]
    for number, text in lines.read_all():
        yield from contexts_of(json_row(text, lines.place(number)))
