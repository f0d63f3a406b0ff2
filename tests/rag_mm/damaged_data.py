"""Copies of a data set in which some samples or documents are damaged, and their slow twins.

In a twin the same samples and documents are as training has to take them, where everybody can see it: without a
question, a text or a picture.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from data import shards
from data.document_table import FILE
from data.sample_ids import from_key
from data.shard_set import ShardSet

Members = dict[str, bytes]
JPEG = b"\xff\xd8\xff\xe0" + bytes(40)


def changed_copy(
    source: Path, folder: Path, part: str, ids: Collection[str], change: Callable[[Members], Members]
) -> Path:
    """``source`` at ``folder`` with other members of some samples of a part."""
    if not folder.exists():
        shutil.copytree(source, folder)
    directory = folder / part
    samples = ShardSet(directory).read(range(len(ShardSet(directory))))
    for old in (*directory.glob("*.tar"), *directory.glob("*.index.*"), *directory.glob(FILE)):
        old.unlink()
    shards.write_shards(
        directory, ((s.key, change(s.members) if from_key(s.key) in ids else s.members) for s in samples)
    )
    return folder


def broken_picture(members: Members) -> Members:
    return {**members, "png": JPEG}


def no_json(members: Members) -> Members:
    return {"json": b"{"}


def not_utf8(members: Members) -> Members:
    return {**members, "json": b'{"title": "\xff", "fields": {}}'}


def without_picture(members: Members) -> Members:
    return {name: data for name, data in members.items() if name == "json"}


def empty_document(members: Members) -> Members:
    return {"json": json.dumps({"title": "", "fields": {}, "meta": {}}).encode()}
