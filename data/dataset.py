"""A prepared data set: the memory, the questions of each split, and the image-text pairs.

Samples are read by position when they are asked for, each with one ``pread``; only the shard index and the
owner of each sample are held. Which samples a split has follows either from the entity a sample belongs to, so that
four folds share one set of shards (the factbook), or from the folder it lies in, where the source has splits of its
own (every converted format). A sample that turns out to be broken keeps its place in the batch, with weight
0, and is counted by reason: dropping it would shift every later sample of every layout.

Whether a picture is whole takes decoding it. Reading looks at it (``read``, iteration); who decodes it anyway, or needs
none, reads unlooked (``read_unlooked``, ``scan``) and condemns what turns out to be broken. Pictures that nobody here
wants are not even read (`data.image_formats.Unread`).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeGuard

from data import images
from data.bad_data import BadData
from data.config import DataConfig
from data.decoding import UndecodableError
from data.document_store import DocumentStore
from data.image_formats import Unread
from data.json_files import read_json
from data.sample_ids import from_key
from data.samples import Item, Pair, Sample, emptied, read_pair, read_question
from data.shard_set import RawSample, ShardSet
from data.tokenizers import load_tokenizer

SPLITS = ("train", "dev", "test")
KEPT, KEPT_BYTES = 16384, 256 << 20  # samples of a split that are kept parsed, and their bytes in the shards
ANEW = "prepare the data set anew, or restore the file from a copy"
TOGETHER = 256  # samples that are read together when all are asked for


class _Part:
    """The samples of one folder of shards by position, whichever split they belong to."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.samples = ShardSet(directory) if any(directory.glob("*.tar")) else None

    def __len__(self) -> int:
        return 0 if self.samples is None else len(self.samples)

    @functools.cached_property
    def entities(self) -> list[str | None]:
        """The entity of each sample."""
        path = self.directory / "entities.json"
        entities: list[str | None] = read_json(path, kind=list, advice=ANEW)
        if len(entities) != len(self):
            raise ValueError(f"{path} names {len(entities)} entities, but the shards hold {len(self)} samples")
        return entities

    def key(self, position: int) -> str:
        assert self.samples is not None
        return self.samples.key(position)

    def place(self, position: int) -> tuple[str, Path]:
        """A sample's key and shard."""
        assert self.samples is not None
        return self.samples.key(position), self.samples.shard(position)

    def read(self, positions: Sequence[int], *, pictures: Sequence[bool] | None = None) -> list[RawSample]:
        assert self.samples is not None
        return self.samples.read(positions, pictures=pictures)

    def will_need(self, positions: range, *, pictures: bool) -> None:
        assert self.samples is not None
        self.samples.will_need(positions, pictures=pictures)


class Read(NamedTuple, Generic[Item]):
    """A sample, and what is known of it beside.

    Attributes:
        problem: why it is broken, or None.
        num_bytes: of its members that were read.
        is_looked_at: whether its picture, if it has one, was decoded.
        picture_problem: why that failed, or None.
    """

    item: Item
    problem: str | None
    key: str
    shard: Path
    num_bytes: int
    is_looked_at: bool
    picture_problem: str | None = None


class SplitView(Generic[Item]):
    """A sequence of samples of one split.

    Attributes:
        name: for messages, such as "questions/train".
        bad: broken samples met in this epoch.
    """

    def __init__(self, part: _Part, positions: Sequence[int], *, name: str, item_type: type[Item]) -> None:
        self.name = name
        self.bad = BadData(name, total=len(positions))
        self._part = part
        self._positions = positions
        self._item_type: type[Item] = item_type
        self._kept: OrderedDict[int, Read[Item]] = OrderedDict()
        self._kept_bytes = 0

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, i: int) -> Item:
        return self.read([i])[0]

    def __iter__(self) -> Iterator[Item]:
        for start in range(0, len(self), TOGETHER):
            yield from self.read(range(start, min(start + TOGETHER, len(self))))

    def scan(self) -> Iterator[Item]:
        """All samples, for what they say: no picture is read, and nothing is counted or kept."""
        for start in range(0, len(self), TOGETHER):
            positions = [self._positions[i] for i in range(start, min(start + TOGETHER, len(self)))]
            for raw in self._part.read(positions, pictures=[False] * len(positions)):
                yield self._parsed(raw).item

    def read(self, places: Sequence[int]) -> list[Item]:
        """Several samples, in the order asked; those that are not kept in one batched read."""
        return [read.item for read in self.read_with_reasons(places)]

    def read_unlooked(self, places: Sequence[int], *, pictures: Sequence[bool] | None = None) -> list[Item]:
        """The same without a look at their pictures.

        Args:
            pictures: whose pictures are read, a bool each; those of the others are `Unread`, and so is one that
                alone cannot be read. None: all.
        """
        return [read.item for read in self.read_with_reasons(places, look=False, pictures=pictures)]

    def place(self, place: int) -> tuple[str, Path]:
        """A sample's key and shard."""
        return self._part.place(self._positions[place])

    def condemn(self, place: int, problem: str) -> None:
        """Count a sample as bad whose picture turned out to be broken."""
        key, shard = self.place(place)
        self.bad.record(place, problem, key=key, shard=shard)

    def read_with_reasons(
        self, places: Sequence[int], *, look: bool = True, pictures: Sequence[bool] | None = None
    ) -> list[Read[Item]]:
        """Several samples, each with its key, its shard and what is wrong with it; arguments as of `read_unlooked`.

        What is kept of a sample is what was read, not what a look made of it: unlooked, it is the same on every rank,
        whatever that has looked at or keeps.
        """
        assert not look or pictures is None, "a look at pictures that are not read"
        wanted = [range(len(self))[i] for i in places]
        with_picture = set(wanted if pictures is None else itertools.compress(wanted, pictures))
        missing = [
            i for i in dict.fromkeys(wanted)
            if i not in self._kept or (i in with_picture and isinstance(self._kept[i].item.image, Unread))
        ]  # fmt: skip
        found: dict[int, Read[Item]] = {}
        if missing:
            positions, read_with = [self._positions[i] for i in missing], [i in with_picture for i in missing]
            raws = self._part.read(positions, pictures=read_with)
            found = {i: self._parsed(raw) for i, raw in zip(missing, raws, strict=True)}
        reads = {i: found[i] if i in found else self._kept[i] for i in wanted}
        if look:
            reads = {i: _look(read) for i, read in reads.items()}
        for i in wanted:
            self._keep(i, reads[i])
        while len(self._kept) > KEPT or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= self._kept.popitem(last=False)[1].num_bytes
        given = [_judged(reads[i]) if look else reads[i] for i in wanted]
        for i, read in zip(wanted, given, strict=True):
            self.bad.record(i, read.problem, key=read.key, shard=read.shard)
        return given

    def _keep(self, place: int, read: Read[Item]) -> None:
        self._kept_bytes += read.num_bytes - (self._kept[place].num_bytes if place in self._kept else 0)
        self._kept[place] = read
        self._kept.move_to_end(place)

    def will_need(self, places: range, *, pictures: bool = True) -> None:
        """Have the samples at consecutive places read ahead, with their pictures or without."""
        positions = range(self._positions[places.start], self._positions[places.stop - 1] + 1)
        self._part.will_need(positions, pictures=pictures)

    @property
    def ids(self) -> list[str]:
        return [from_key(self._part.key(position)) for position in self._positions]

    @property
    def bad_samples(self) -> Counter[str]:
        """Broken samples met in this epoch, by reason."""
        return self.bad.reasons

    def _parsed(self, raw: RawSample) -> Read[Item]:
        """A sample as far as it can be told without its picture."""
        item, problem = self._parse(raw)
        num_bytes = sum(map(len, raw.members.values()))
        if item is None:
            return Read(self._broken(raw.key), problem, raw.key, raw.shard, num_bytes, True)
        return Read(item, None, raw.key, raw.shard, num_bytes, item.image is None)

    def _parse(self, raw: RawSample) -> tuple[Item | None, str | None]:
        """The sample, or None and why it is broken."""
        if raw.problem is not None:
            return None, raw.problem
        if "json" not in raw.members:
            return None, "missing member json"
        try:
            read = read_pair if self._item_type is Pair else read_question
            item: Item = read(raw.key, raw.members)  # type: ignore[assignment]
        except UndecodableError as error:
            return None, str(error)
        except (KeyError, TypeError, ValueError) as error:
            return None, f"malformed json: {type(error).__name__}"
        return item, None

    def _broken(self, key: str) -> Item:
        sample_id = from_key(key)
        if self._item_type is Pair:
            return emptied(Pair(sample_id, "", None, ()))  # type: ignore[return-value]
        return emptied(Sample(sample_id, "", (), "name", "", "", ()))  # type: ignore[return-value]


def _look(read: Read[Item]) -> Read[Item]:
    """The same with its picture decoded."""
    if read.is_looked_at:
        return read
    assert read.item.image is not None
    try:
        images.load_rgba(read.item.image)
    except images.ImageError as error:
        read = read._replace(picture_problem=error.reason)
    return read._replace(is_looked_at=True)


def _judged(read: Read[Item]) -> Read[Item]:
    """The same where a broken picture makes a broken sample."""
    if read.picture_problem is None:
        return read
    return read._replace(item=emptied(read.item), problem=read.picture_problem)


QuestionSet = SplitView[Sample]
PairSet = SplitView[Pair]


class Dataset:
    """A folder that `data.prepare` wrote, seen in one fold.

    Attributes:
        store: the memory.
        info: the contents of ``dataset.json``.
        fields: labels that questions ask for.
        has_folds: whether entities decide which split a sample is in; if not, the source has splits of its own.
        held_out: of folds, the entities of dev and test.
        fingerprint: of everything but edits.
    """

    @classmethod
    def of(cls, config: DataConfig, *, directory: str | Path = "") -> Dataset:
        """The data set that ``config`` names (or the one in ``directory``, with its own documents)."""
        return cls(
            directory or config.dir, config.fold, documents="" if directory else config.documents,
            at_edit=None if directory else config.at_edit, cache_dir=config.cache_dir,
            cache_bytes=int(config.cache_gib * 2**30), tokenizer=config.tokenizer,
        )  # fmt: skip

    def __init__(
        self,
        directory: str | Path,
        fold: int = 0,
        *,
        documents: str = "",
        at_edit: int | None = None,
        cache_dir: str = "",
        cache_bytes: int = 1 << 40,
        tokenizer: str = "",
    ) -> None:
        self._tokenizer_dir, self._has_other_documents = tokenizer, bool(documents)
        self.directory = Path(directory)
        path = self.directory / "dataset.json"
        try:
            self.info: dict[str, Any] = read_json(path, advice=ANEW)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"no data set at {self.directory}; make one with "
                f"`python -m data.prepare factbook --out {self.directory}`"
            ) from None
        folds = _read_folds(self.directory / "splits.json")
        if folds is None and fold:
            raise ValueError(f"data.fold is {fold}; {self.directory} has the splits of its source, which is fold 0")
        if folds is not None and not 0 <= fold < len(folds):
            raise ValueError(f"data.fold is {fold}; this data set has folds 0 to {len(folds) - 1}")
        self.fold, self.has_folds = fold, folds is not None
        self.fields, self.fingerprint = _fields_and_fingerprint(self.info, path)
        held_out = {"dev": (), "test": ()} if folds is None else folds[fold]
        self.held_out: dict[str, tuple[str, ...]] = {s: tuple(held_out[s]) for s in ("dev", "test")}
        self.store = DocumentStore(
            documents or self.directory / "documents", at_edit=at_edit, cache_dir=cache_dir or None,
            cache_dir_bytes=cache_bytes,
        )  # fmt: skip

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The data set's own tokenizer, a ``transformers.PreTrainedTokenizerFast``, or the one that was named."""
        from transformers import PreTrainedTokenizerFast

        if self._tokenizer_dir:
            return load_tokenizer(self._tokenizer_dir)
        if not (self.directory / "tokenizer").is_dir():
            raise ValueError(f"{self.directory} has no tokenizer; prepare it with --vocabulary, or set data.tokenizer")
        folder = self.directory / "tokenizer"
        try:
            return PreTrainedTokenizerFast.from_pretrained(str(folder))
        except Exception as error:  # the tokenizers library raises bare exceptions for a damaged file
            raise ValueError(f"{folder} cannot be read ({error}); {ANEW}") from None

    def questions(self, split: str) -> QuestionSet:
        """The questions of ``split`` in this fold, in the order of the shards."""
        return self._view("questions", split, Sample)

    def pairs(self, split: str = "train") -> PairSet:
        """The image-text pairs of ``split``; what belongs to no entity (other emoji) is in train."""
        return self._view("pairs", split, Pair)

    def asked_documents(self) -> list[str]:
        """Documents that training questions ask about, sorted; of converted data without a look at the questions."""
        path = self.directory / "asked.json"
        if path.exists():
            asked: list[str] = read_json(path, kind=list, advice=ANEW)
            return asked
        return sorted({sample.subject for sample in self.questions("train").scan() if sample.weight and sample.subject})

    def has_labels(self) -> bool:
        """Whether a training question names a right document; reads no further, and not if converted data has none."""
        if "made_by" in self.info and not self.asked_documents():
            return False
        return any(sample.gold for sample in self.questions("train").scan())

    def fields_of(self, ids: Sequence[str]) -> Iterator[dict[str, str]]:
        """The fields of documents, few of which are held at a time."""
        for start in range(0, len(ids), 1024):
            yield from (document.fields for document in self.store.read(ids[start : start + 1024], pictures=()))

    def check_documents(self, memory: DocumentStore | None = None) -> None:
        """Whether every document that training names is in the store.

        Converted data was checked when it was made, so it is read only if the store was edited since, or is another.

        Args:
            memory: the store of another data set, whose run reads the questions of this one (and not its pairs).

        Raises:
            ValueError: names the first question or pair with a document that is not there.
        """
        store = self.store if memory is None else memory
        same = store.fingerprint == self.store.fingerprint and not self._has_other_documents
        if "made_by" in self.info and same and not store.num_edits:
            return
        pairs = self.pairs("train").scan() if memory is None else ()
        for item in itertools.chain[Sample | Pair](self.questions("train").scan(), pairs):
            subject = [item.subject] if isinstance(item, Sample) and item.weight and item.subject else []
            for name in (*item.gold, *item.hard_negatives, *subject):
                if name not in store:
                    raise ValueError(
                        f"{item.id} of {self.directory} names document {name!r}, which is not in the store "
                        f"{store.folder}"
                    )

    def check_subjects(self) -> None:
        """ValueError names the first training question that no document belongs to."""
        for sample in self.questions("train").scan():
            if sample.weight and not sample.subject:
                raise ValueError(
                    f"train.documents is gold, but {sample.id} of {self.directory} names no right document; "
                    "use retrieved or none"
                )

    def split_of(self, entity: str | None) -> str:
        return next((split for split, entities in self._held_out_sets.items() if entity in entities), "train")

    @functools.cached_property
    def _held_out_sets(self) -> dict[str, frozenset[str]]:
        return {split: frozenset(entities) for split, entities in self.held_out.items()}

    @functools.cached_property
    def _parts(self) -> dict[str, _Part]:
        return {name: _Part(self.directory / name) for name in ("questions", "pairs")}

    def _members_of(self, part_name: str, split: str) -> tuple[_Part, Sequence[int]]:
        """Where the samples of a split lie, and their positions there."""
        if not self.has_folds:
            part = _Part(self.directory / part_name / split)
            return part, range(len(part))
        part = self._parts[part_name]
        return part, [i for i, entity in enumerate(part.entities) if self.split_of(entity) == split]

    def _view(self, part_name: str, split: str, item_type: type[Item]) -> SplitView[Item]:
        if split not in SPLITS:
            raise ValueError(f"split is {split!r}; allowed are {', '.join(SPLITS)}")
        key = (part_name, split)
        views: dict[tuple[str, str], Any] = self.__dict__.setdefault("_views", {})
        if key not in views:
            part, positions = self._members_of(part_name, split)
            views[key] = SplitView(part, positions, name=f"{part_name}/{split}", item_type=item_type)
        return views[key]


def _fields_and_fingerprint(info: dict[str, Any], path: Path) -> tuple[list[str], str]:
    names, mark = info.get("fields", 0), info.get("fingerprint")
    if not _are_texts(names) or not isinstance(mark, str):
        raise ValueError(f"{path} is damaged: it must hold fields (a list of texts) and fingerprint (a text); {ANEW}")
    return names, mark


def _read_folds(path: Path) -> list[dict[str, list[str]]] | None:
    """The entities that each fold holds out, or None where the source has splits of its own."""
    folds = read_json(path, advice=ANEW).get("folds")
    if folds is None:
        return None
    if isinstance(folds, list) and all(
        isinstance(fold, dict) and all(_are_texts(fold.get(split)) for split in ("dev", "test")) for fold in folds
    ):
        return folds
    raise ValueError(f"{path} is damaged: folds must be a list, each with lists of texts, dev and test; {ANEW}")


def _are_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def digest(ids: Iterable[str]) -> str:
    """Short hash of the sample ids of a global batch, in order: equal digests, equal batches."""
    joined = "\n".join(ids)
    return hashlib.blake2b(joined.encode(), digest_size=8).hexdigest()
