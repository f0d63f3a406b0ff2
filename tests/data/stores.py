"""Document stores for tests, and the slow, obvious twin that reads every shard anew with tarfile."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import fsspec

from data import shards
from data.document import Document, to_sample
from data.document_store import DocumentStore


def make_documents(count: int = 30) -> list[Document]:
    """Every third without a picture, some with a passage and awkward ids."""
    names = ("q/{}", "ü{}", "a b.{}", "n{}")
    return [
        Document(
            names[i % 4].format(i),
            f"Title {i}",
            {"capital": f"City {i}", "code": f"c{i}"},
            None if i % 3 == 0 else bytes([i % 256]) * (i % 7 * 300 + 1),
            {"n": i},
            f"first line\nsecond of {i}" if i % 2 else "",
        )
        for i in range(count)
    ]


def write_store(directory: Path, documents: list[Document], *, samples_per_shard: int = 10) -> Path:
    shards.write_shards(directory, map(to_sample, documents), samples_per_shard=samples_per_shard)
    return directory


def to_memory(directory: Path, url: str) -> str:
    """A copy of the folder under a memory:// URL."""
    filesystem, path = fsspec.core.url_to_fs(url)
    for file in directory.iterdir():
        filesystem.pipe_file(f"{path}/{file.name}", file.read_bytes())
    return url


class SlowTwin:
    """What a store must be: all documents in a dictionary, read with tarfile, changed in place."""

    def __init__(self, directory: Path) -> None:
        self.documents: dict[str, Document] = {}
        for tar in sorted(directory.glob("*.tar")):
            members: dict[str, dict[str, bytes]] = {}
            with tarfile.open(tar) as archive:
                for member in archive:
                    key, _, extension = member.name.partition(".")
                    file = archive.extractfile(member)
                    assert file is not None
                    members.setdefault(key, {})[extension] = file.read()
            for key, found in members.items():
                body = json.loads(found.pop("json"))
                name = key.replace("%2F", "/").replace("%2E", ".")
                image = next(iter(found.values()), None)
                self.documents[name] = Document(
                    name, body["title"], body["fields"], image, body["meta"], body.get("passage", "")
                )

    def edit(self, name: str, field: str, value: str) -> None:
        old = self.documents[name]
        fields = {**old.fields, field: value}
        self.documents[name] = Document(name, old.title, fields, old.image, old.meta, old.passage)

    def add(self, document: Document) -> None:
        self.documents[document.id] = document

    def delete(self, name: str) -> None:
        del self.documents[name]


def assert_is(store: DocumentStore, twin: SlowTwin) -> None:
    """All of it: ids in order, members, contents."""
    assert store.ids == list(twin.documents) and len(store) == len(twin.documents)
    assert store.fetch(store.ids) == list(twin.documents.values())
