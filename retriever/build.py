"""The index build job: ``python -m retriever.build --config C``, alone or under torchrun.

Embeds every document of the store with the retriever of a checkpoint (``index.checkpoint``; the untrained one if
empty) and publishes a new index version. A version that already covers this store, these weights and these edits
is left as it is; if only some documents were edited since, only those are embedded again (but untrained trigrams have
gates that are fitted to the memory: of another one, other weights); else it is built in stages (`retriever.build_job`).
``--dry-run`` says what that will take and writes nothing.

It reads the sections ``data``, ``retriever`` and ``index`` (and ``train.seed``, which decides the untrained
weights) of a run's configuration.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from data.bad_data import BadDataError
from data.command_line import fail, parse
from data.config import DataConfig
from data.dataset import Dataset
from data.document_store import DocumentStore
from data.progress import progress
from retriever import index as index_files
from retriever.build_job import BuildJob
from retriever.config import IndexConfig, RetrieverConfig, encoder_config
from retriever.embed import embed_documents, embedded_batches, make_manifest
from retriever.encoder import DualEncoder
from retriever.estimate import estimate
from retriever.index import Index, Manifest
from retriever.manifest import read_manifest
from retriever.versions import current, named_by_checkpoints, only_writer
from retriever.weights import load_weights

LONGEST = timedelta(days=7)  # that a rank may work while the others wait for it
FETCHED = 1024  # documents read at once to fit the gates
Taken = TypeVar("Taken")
Embed = Callable[[Sequence[str], Callable[[int], None]], Tensor]  # ids, progress -> (len(ids), E)


@dataclass(frozen=True)
class SeedConfig:
    """The one training option that an untrained retriever depends on.

    Attributes:
        seed: of the untrained weights.
    """

    seed: int = 0


@dataclass(frozen=True)
class BuildConfig:
    """What a build job reads of a run's configuration.

    Attributes:
        data: the data set.
        retriever: the dual encoder.
        index: the index.
        train: the seed.
        dry_run: say what the build would take in time, memory and disk, and write nothing.
    """

    data: DataConfig = field(default_factory=DataConfig)
    retriever: RetrieverConfig = field(default_factory=RetrieverConfig)
    index: IndexConfig = field(default_factory=IndexConfig)
    train: SeedConfig = field(default_factory=SeedConfig)
    dry_run: bool = False


def fresh_encoder(
    config: RetrieverConfig,
    dataset: Dataset,
    *,
    image_size: int,
    seed: int,
    image_transform: str = "square",
    weights: bool = True,
) -> DualEncoder:
    """The untrained retriever of a seed; trigram gates start at the idf of titles and training questions.

    Args:
        weights: False: a checkpoint is about to replace them, so neither texts nor the towers' own files are read.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = DualEncoder(config, image_size=image_size, image_transform=image_transform, weights=weights)
    if weights:
        encoder.fit(_titles_and_questions(dataset))
    return encoder


def _titles_and_questions(dataset: Dataset) -> Iterator[str]:
    """One after another, so that a memory of any size can be read."""
    ids = dataset.store.ids
    for start in range(0, len(ids), FETCHED):
        for document in dataset.store.read(ids[start : start + FETCHED], pictures=()):
            yield document.search_text
    for sample in dataset.questions("train").scan():
        yield sample.question


def build_index(
    encoder: DualEncoder,
    dataset: Dataset,
    *,
    directory: str | Path,
    image_size: int,
    batch_size: int,
    keep: int,
    console: Console | None = None,
    embed: Embed | None = None,
    weights: str | None = None,
    max_bad_share: float = 1.0,
) -> Index:
    """The index of the store as it is now, from the folder if it is there already, else embedded and published.

    Made in memory, flat and in full precision: what a run answers with. `retriever.build_job` is for any size.

    Args:
        embed: makes the embeddings of documents where several ranks share the work or the encoder, and then
            ``weights`` is the hash of its weights.
        max_bad_share: largest share of the documents that may be damaged; they are said, and embedded as empty ones.

    Raises:
        BadDataError: more are damaged; nothing is published.
    """
    store = dataset.store
    manifest = make_manifest(encoder, store, image_size=image_size, weights=weights)
    console = console or Console(stderr=True)
    old = _usable(
        directory, manifest, console, fits=lambda found: found.factory == "Flat",
        take=lambda version, _: index_files.load(directory, version=version),
    )  # fmt: skip
    touched = list(store.ids) if old is None else store.edited_ids_since(old.manifest.num_edits)
    todo = touched if old is None else [name for name in touched if name in store]
    gone = set(touched) - set(todo)
    if old is not None and not touched:
        console.print(f"index {directory}: version {index_files.list_versions(directory)[-1]} is up to date")
        return old
    before = encoder.featurizer.truncated
    with progress(console, "index", len(todo), "documents") as advance:
        if embed is None or not todo:  # only deletions
            embedding = embed_documents(
                encoder, store, todo, image_size=image_size, batch_size=batch_size, progress=advance
            )
        else:
            embedding = embed(todo, advance)
    if old is None:
        index = Index.from_embeddings(embedding, todo, manifest)
    else:
        index = old.replaced(todo, embedding, num_edits=store.num_edits, gone=gone)
    _say_what_was_lost(store, encoder, before, console)
    if complaint := store.bad.complaint(max_bad_share, whole=True):
        raise BadDataError(complaint)
    version = index.publish(directory)
    index_files.prune(directory, keep=keep)
    console.print(
        f"index {directory}: version {version}, {len(todo)} of {len(store)} documents embedded, {store.version}"
    )
    return index


def _usable(
    directory: str | Path,
    manifest: Manifest,
    console: Console,
    *,
    fits: Callable[[Manifest], bool],
    take: Callable[[int, Manifest], Taken],
) -> Taken | None:
    """What ``take`` makes of the current version, if it is whole and of the same weights and store; else says why not.

    The manifest is judged before ``take`` reads the other files.
    """
    if not (Path(directory) / "CURRENT").exists():
        return None
    try:
        version = current(Path(directory))
        found = read_manifest(Path(directory) / "versions" / str(version) / "manifest.json")
        found.check(manifest, where=str(directory))
        if not fits(found):
            raise ValueError(f"the index at {directory} is of another kind, {found.factory}")
        return take(version, found)
    except (FileNotFoundError, ValueError) as error:
        console.print(f"not used, a new version replaces it: {error}", highlight=False, soft_wrap=True, markup=False)
        return None


def _say_what_was_lost(store: DocumentStore, encoder: DualEncoder, before: int, console: Console) -> None:
    """Damaged documents, and texts that were cut off since ``before`` had been."""
    lines, truncated = store.bad.report(), encoder.featurizer.truncated - before
    if truncated:
        lines = [*lines, encoder.featurizer.said_truncated(truncated, "documents")]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def update_index(job: BuildJob, old: Index) -> int | None:
    """Bring an index of the same weights and store up to the store's last edit; gives the version's number.

    None, and nothing is published: too many documents may be damaged, of those that did not change; only a build that
    reads them all can tell.

    Raises:
        BadDataError: too many are, as for `BuildJob`; nothing is published.
    """
    store, config, directory = job.store, job.config, job.directory
    touched = store.edited_ids_since(old.manifest.num_edits)
    if not touched and old.overhead <= config.max_overhead:
        version = index_files.list_versions(directory)[-1]
        _say_up_to_date(job, version)
        return version
    todo, before = [name for name in touched if name in store], job.encoder.featurizer.truncated
    batches = embedded_batches(job.encoder, store, todo, image_size=job.image_size, batch_size=config.batch_size)
    index = old.replaced(todo, batches, num_edits=store.num_edits, gone=set(touched) - set(todo))
    store.bad.count_all()
    _say_what_was_lost(store, job.encoder, before, job.console)
    if complaint := store.bad.complaint(job.max_bad_share, whole=True):
        raise BadDataError(complaint)
    num_damaged = old.manifest.num_damaged + store.bad.num_bad
    if num_damaged > max(job.max_bad_share * store.bad.num_read, store.bad.num_bad):
        job.console.print("built anew: too many documents may be damaged, which only reading them all can tell")
        return None
    index.manifest = replace(index.manifest, num_damaged=num_damaged)
    overhead = index.overhead
    if overhead > config.max_overhead:
        index = index.compacted()
        job.console.print(f"compacted: {overhead:.0%} of the index were deleted or added since it was built")
    with only_writer(directory):
        version = index.publish(directory)
        index_files.prune(directory, keep=config.keep_versions, named=named_by_checkpoints(directory))
    job.console.print(
        f"index {directory}: version {version}, {len(todo)} of {len(store)} documents embedded, {store.version}"
    )
    return version


def _say_up_to_date(job: BuildJob, version: int) -> None:
    job.console.print(f"index {job.directory}: version {version} is up to date")


def _run(job: BuildJob) -> None:
    """Update what is there, or build.

    Raises:
        BadDataError: too many documents are damaged, on every rank; nothing is published.
    """
    config, ranks = job.config, job.ranks

    def fits(found: Manifest) -> bool:
        return found.factory == job.factory or (config.factory == "auto" and _kind(found.factory) == _kind(job.factory))

    def take(version: int, found: Manifest) -> Index | int | None:
        """The index where few documents changed, or it is to be compacted; its number where there is nothing to do."""
        touched = len(job.store.edited_ids_since(found.num_edits))
        if 2 * touched > len(job.store):
            return None
        if touched or found.overhead > job.config.max_overhead:
            return index_files.load(job.directory, version=version, mapped=True)
        index_files.check_files(job.directory, version, found)
        return version

    done, problem = False, ""
    if ranks.rank == 0:
        old = _usable(job.directory, job.manifest, job.console, fits=fits, take=take)
        if isinstance(old, int):
            _say_up_to_date(job, old)
            done = True
        elif old is not None:
            try:
                done = update_index(job, old) is not None
            except BadDataError as error:
                problem = str(error)
    done, problem = ranks.gather((done, problem))[0]
    if problem:
        raise BadDataError(problem)
    if not done:
        job.run()


def _kind(factory: str) -> str:
    return re.sub(r"\d+", "", factory)


def main(argv: Sequence[str]) -> int:
    """Entry point; the exit status."""
    config = parse(
        BuildConfig,
        argv,
        prog="python -m retriever.build",
        description="Embed the documents of a store and publish them as a new index version.",
        sections=("data", "retriever", "index", "train.seed"),
    )
    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo", timeout=LONGEST)
    try:
        dataset = Dataset.of(config.data)
        encoder = fresh_encoder(
            encoder_config(config.retriever, config.index), dataset, image_size=config.data.image_size,
            seed=config.train.seed, image_transform=config.data.image_transform, weights=not config.index.checkpoint,
        )  # fmt: skip
        if config.index.checkpoint:
            load_weights(encoder, config.index.checkpoint)
        encoder.eval()
        job = BuildJob(
            encoder, dataset, config.index, image_size=config.data.image_size, max_bad_share=config.data.max_bad_share
        )
        if not config.dry_run:
            _run(job)
        elif job.ranks.rank == 0:
            print(estimate(job).text(job))
    except BadDataError as error:
        print(error, file=sys.stderr)
        return 1
    except (FileNotFoundError, ValueError) as error:
        fail(str(error))
    except OSError as error:  # a full disk, one that cannot be written to, rights
        print(
            f"the index at {config.index.dir} could not be built: {' '.join(str(error).split())}; mend that and run "
            "the same command again, which goes on where this one ended",
            file=sys.stderr,
        )
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
