"""Random reads of documents by other libraries, in an environment of their own (their pins are not ours).

    python -m benchmarks.data.peers --make FOLDER            # once: the environment
    python -m benchmarks.data.document_peers --make FOLDER   # once: wids on top of it

`benchmarks.data.documents --peers FOLDER` then starts ``FOLDER/bin/python -m benchmarks.data.document_peers`` for
each, which brings the documents into the peer's own format if it needs one and reads those it is told, in one
process, with the same decode work. They are told positions (energon: keys), not ids: none of them but energon can find
an id, so that part is free for them.
"""

from __future__ import annotations

import argparse
import functools
import io
import itertools
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.data.peers import PeerProcess

NAMES = ("wids", "wids, 10 tars open", "litdata", "mosaicml-streaming", "megatron-energon")
MORE = ("wids, 128 tars open",)  # of `benchmarks.data.many_tars`
Reader = Callable[[Sequence[int]], Sequence[Any]]  # positions -> documents


def make(folder: Path) -> None:
    """Add wids, the random access of webdataset's author, which webdataset 1 does not contain any more."""
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    if not site.is_dir():
        raise SystemExit(
            f"{folder} is no environment of this Python; run python -m benchmarks.data.peers --make {folder}"
        )
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), "wids==0.1.11"]
    subprocess.run(command, check=True)


def wids(shards: Path, work: Path, *, num_open: int | None = None) -> Reader:
    """A copy of the tars, all of them open; at one that is not, it indexes the tar anew.

    A copy, because it maps them, and no mapped page leaves the page cache.
    """
    import mmap

    from wids import ShardListDataset

    from data.document import from_members
    from data.shards import load_index, shard_paths

    if not (work / "wids").exists():
        shutil.copytree(shards, work / "wids")
    tars = shard_paths(work / "wids")
    described = [{"url": str(tar), "nsamples": len(load_index(tar))} for tar in tars]
    dataset = ShardListDataset(
        described, lru_size=num_open or len(tars), keep=True, localname=lambda url: url, transformations=[]
    )
    for last in itertools.accumulate(entry["nsamples"] for entry in described):
        dataset[last - 1]  # so that all are indexed before the first batch

    def read(places: Sequence[int]) -> Sequence[Any]:
        if not places:
            for tar in dataset.cache.lru.values():
                tar.reader.mmapped_file.madvise(mmap.MADV_DONTNEED)
        return [from_members("", dataset[i][".json"].read(), None) for i in places]

    return read


def litdata(shards: Path, work: Path) -> Reader:
    """Its own chunks of bytes; ``StreamingDataset[i]``."""
    import litdata as library
    from litdata.streaming.cache import Cache

    from data.document import from_members

    target = work / "litdata"
    if not (target / "index.json").exists():
        cache = Cache(str(target), chunk_bytes="64MB")
        for i, body in enumerate(_bodies(shards)):
            cache._add_item(i, body)
        cache.done()
        cache.merge()
    dataset = library.StreamingDataset(str(target))
    return lambda places: [from_members("", bytes(dataset[i]), None) for i in places]


def mosaicml_streaming(shards: Path, work: Path) -> Reader:
    """Its own MDS shards; ``StreamingDataset[i]``."""
    from streaming import MDSWriter, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    from data.document import from_members

    target = work / "streaming"
    if not (target / "index.json").exists():
        with MDSWriter(out=str(target), columns={"json": "bytes"}) as writer:
            for body in _bodies(shards):
                writer.write({"json": body})
    clean_stale_shared_memory()
    dataset = StreamingDataset(local=str(target), shuffle=False, batch_size=1)
    return lambda places: [from_members("", dataset[i]["json"], None) for i in places]


def megatron_energon(shards: Path, work: Path) -> Reader:
    """The same tars, by its own index beside links to them; ``WebdatasetFileStore[name]``."""
    from megatron.energon.cache.file_store import WebdatasetFileStore
    from megatron.energon.epathlib import EPath
    from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

    from data.document import from_members
    from data.shards import load_index, shard_paths

    target, tars = work / "energon", shard_paths(shards)
    if not (target / ".nv-meta").exists():
        target.mkdir(parents=True)
        for tar in tars:
            (target / tar.name).symlink_to(tar)
        WebdatasetPreparator.prepare_dataset(
            target, [tar.name for tar in tars], split_parts_ratio=[("train", 1.0)],
            progress_fn=lambda items, _: items, workers=1,
        )  # fmt: skip
    store = WebdatasetFileStore(EPath(target))
    keys = [key for tar in tars for key in load_index(tar).samples]

    def read(places: Sequence[int]) -> Sequence[Any]:
        found = (store[f"{keys[i]}.json"] for i in places)
        return [from_members("", data[0] if isinstance(data, tuple) else data, None) for data in found]

    return read


def _bodies(shards: Path) -> Any:
    from data.shard_set import ShardSet

    samples = ShardSet(shards)
    for first in range(0, len(samples), 1000):
        for sample in samples.read(range(first, min(first + 1000, len(samples)))):
            yield sample.members["json"]


def run(name: str, shards: Path, work: Path) -> None:
    """Read the positions of each line on stdin; answer with seconds and titles as JSON, or with what went wrong."""
    few, more = functools.partial(wids, num_open=10), functools.partial(wids, num_open=128)  # 10 is its default
    made = (wids, few, litdata, mosaicml_streaming, megatron_energon, more)
    makers = dict(zip(NAMES + MORE, made, strict=True))
    answers = io.open(1, "w", buffering=1, closefd=False)  # noqa: SIM115, UP020
    try:
        read = makers[name](shards, work)
        answers.write(json.dumps({"ready": True}) + "\n")
        for line in sys.stdin:
            places = json.loads(line)
            start = time.perf_counter()
            documents = read(places)
            seconds = time.perf_counter() - start
            answers.write(json.dumps({"seconds": seconds, "titles": [d.title for d in documents]}) + "\n")
    except Exception as error:
        answers.write(json.dumps({"problem": f"{type(error).__name__}: {error}"[:300]}) + "\n")


class Peer(PeerProcess):
    """A peer that reads documents in its own process."""

    def __init__(self, folder: Path, name: str, shards: Path, work: Path) -> None:
        super().__init__(folder, "benchmarks.data.document_peers", name, shards, work)

    def read(self, places: Sequence[int], titles: Sequence[str]) -> float:
        """Seconds to read these documents, which must have these titles; nan once there is a problem."""
        answer = self.ask(json.dumps(list(places)))
        if answer and answer["titles"] != list(titles):
            self.problem = "it read other documents"
        return float(answer["seconds"]) if answer and self.problem is None else float("nan")

    def unmap(self) -> None:
        """Let go of what it has mapped, so that the page cache can be emptied (told by reading nothing)."""
        self.read([], [])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.data.document_peers", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("--make", type=Path, metavar="FOLDER", help="complete the environment and end")
    parser.add_argument("--run", choices=NAMES + MORE, help="read as one of them")
    parser.add_argument("--shards", type=Path)
    parser.add_argument("--work", type=Path)
    given = parser.parse_args()
    if given.make is not None:
        make(given.make)
    elif given.run is not None:
        run(given.run, given.shards, given.work)
    else:
        parser.error("give --make FOLDER, or --run NAME with --shards and --work")


if __name__ == "__main__":
    main()
