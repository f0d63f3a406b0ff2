"""The emoji that the benchmark retrieves among, and the data set of those that it trains on.

Held out are whole families: emoji that look alike in one of the drawings, or whose names differ in man, woman and the
like only ("woman running" tells too much about "man running"). The data set holds nothing of them. Its documents are
OpenMoji's drawings without a word: a document with its name beside the drawing would be found by name alone.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from data.dataset import Dataset
from data.document_store import Document, to_sample
from data.emoji_pictures import same_picture_groups
from data.factbook_questions import stable_hash
from data.samples import Pair, to_members
from data.shards import fingerprint, write_shards

HELD_OUT = 0.2
PEOPLE = {"man", "woman", "person", "men", "women", "people", "boy", "girl"}


@dataclass(frozen=True)
class Drawn:
    """An emoji: its name, and both drawings as PNG."""

    id: str
    name: str
    twemoji: bytes
    openmoji: bytes


def read_emoji(data_dir: Path) -> list[Drawn]:
    """All emoji of the memory but flags, with the drawing that asks for each."""
    dataset = Dataset(str(data_dir))
    asked = {p.id.removesuffix("-picture"): p.image for p in dataset.pairs("train") if p.image is not None}
    ids = [name for name in sorted(dataset.store.ids) if name.startswith("emoji-")]
    found = []
    for document in dataset.store.fetch(ids):
        twemoji = asked[document.id]
        assert twemoji is not None and document.image is not None
        found.append(Drawn(document.id, document.title, twemoji, document.image))
    return found


def families(emoji: Sequence[Drawn]) -> list[list[Drawn]]:
    """Emoji that tell too much about each other, together."""
    ids, by_id = [one.id for one in emoji], {one.id: one for one in emoji}
    groups = same_picture_groups(ids, [[one.twemoji for one in emoji], [one.openmoji for one in emoji]])
    alike: defaultdict[str, set[str]] = defaultdict(set)
    for one in emoji:
        words = [word for word in one.name.replace("’", "'").split() if word.lower() not in PEOPLE]
        alike[" ".join(words) or one.name].add(one.id)
    parent = {name: name for name in ids}

    def root(name: str) -> str:
        while parent[name] != name:
            name = parent[name]
        return name

    for group in (*groups, *(sorted(names) for names in alike.values())):
        for name in group[1:]:
            parent[root(name)] = root(group[0])
    members: defaultdict[str, list[Drawn]] = defaultdict(list)
    for name in ids:
        members[root(name)].append(by_id[name])
    return list(members.values())


def split(groups: Sequence[Sequence[Drawn]]) -> tuple[list[Drawn], list[Drawn]]:
    """All emoji of the families to train on; of the held-out families one each (by a hash of its id)."""
    order = sorted(groups, key=lambda group: stable_hash("emoji held out", min(one.id for one in group)))
    num_held = round(HELD_OUT * len(order))
    held = [min(group, key=lambda one: stable_hash("emoji", one.id)) for group in order[:num_held]]
    return [one for group in order[num_held:] for one in group], held


def write_dataset(emoji: Sequence[Drawn], directory: Path, *, tokenizer: Path) -> None:
    """A data set of ``emoji``: drawings as documents, and two pairs each that ask for them, by name and by drawing.

    Args:
        tokenizer: folder of one; a data set has to have it, though nothing here is read.
    """
    shutil.rmtree(directory, ignore_errors=True)
    documents = (to_sample(Document(one.id, "", {}, one.openmoji)) for one in emoji)
    written = [*write_shards(directory / "documents", documents)]
    written += write_shards(directory / "pairs" / "train", map(to_members, _pairs(emoji)))
    (directory / "questions").mkdir()
    shutil.copytree(tokenizer, directory / "tokenizer")
    splits = {"splits": {"questions": {}, "pairs": {"train": 2 * len(emoji)}}}
    (directory / "splits.json").write_text(json.dumps(splits))
    info = {
        "name": "emoji", "format": 1, "fields": [], "fingerprint": fingerprint(shard.sha256 for shard in written),
        "counts": {"documents": len(emoji), "pairs": 2 * len(emoji)},
    }  # fmt: skip
    (directory / "dataset.json").write_text(json.dumps(info, indent=2))  # last: a folder that has it is whole


def _pairs(emoji: Iterable[Drawn]) -> Iterable[Pair]:
    for one in emoji:
        yield Pair(f"{one.id}-name", one.name, None, (one.id,))
        yield Pair(f"{one.id}-twemoji", "", one.twemoji, (one.id,))
