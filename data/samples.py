"""What a data set is made of: questions, and pairs of a picture or a text with its documents; and how they are stored.

A sample is one member ``json`` and, where there is one, the picture as it was encoded. Only the words that every
source has are fields; whatever else a source says stays in ``meta``, so that a converter loses nothing and no model is
ever shown what nobody decided to show it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from data.decoding import decode_member
from data.image_formats import extension_of, picture_member, to_store
from data.sample_ids import from_key, to_key


@dataclass(frozen=True)
class Sample:
    """One question.

    Attributes:
        id: unique in the data set.
        question: text of the question.
        answers: accepted answers, the one to train on first; none where the source keeps them secret (weight 0).
        kind: whether a picture belongs to the question ("picture") or words must do ("name").
        field: what the source sorts its questions by (of the factbook: label of the line that answers it), or empty.
        subject: id of the document it was made from, the first of ``gold`` unless the source says otherwise, or empty.
        gold: ids of all documents that count as right, duplicates included.
        image: the picture asked about as it was encoded (PNG, JPEG, ...), or None; `data.image_formats.Unread` where it
            was not read.
        weight: 1, or 0 for a sample that is broken or unanswered and only keeps its place.
        hard_negatives: ids of documents that look right and are not, as the source says.
        forbidden: ids of documents that it must not be given, such as the one that it was made of.
        meta: whatever else the source said; never shown to a model.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    kind: Literal["name", "picture"]
    field: str
    subject: str
    gold: tuple[str, ...]
    image: bytes | None = None
    weight: float = 1.0
    hard_negatives: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()
    meta: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Pair:
    """A picture or a text, and the documents it belongs to.

    Attributes:
        id: unique in the data set.
        text: a name, a caption or a search, or empty when a picture asks.
        image: the picture as it was encoded (or `data.image_formats.Unread`), or None when words ask.
        gold: ids of the matching documents, duplicates included.
        weight: 1, or 0 for a pair that is broken and only keeps its place.
        hard_negatives: ids of documents that look right and are not, as the source says.
        meta: whatever else the source said; never shown to a model.
    """

    id: str
    text: str
    image: bytes | None
    gold: tuple[str, ...]
    weight: float = 1.0
    hard_negatives: tuple[str, ...] = ()
    meta: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False)


Item = TypeVar("Item", Sample, Pair)


def emptied(item: Item) -> Item:
    """What keeps the place of a sample that is broken: its id, and weight 0."""
    if isinstance(item, Pair):
        return Pair(item.id, "", None, (), weight=0.0)  # type: ignore[return-value]  # as Item
    return Sample(item.id, "", ("",), "name", "", "", (), weight=0.0)


def to_members(sample: Sample | Pair) -> tuple[str, dict[str, bytes]]:
    """The key and the members of the shard sample that holds ``sample``."""
    body: dict[str, Any]
    if isinstance(sample, Sample):
        body = {"question": sample.question, "answers": sample.answers, "kind": sample.kind}
        body |= {"field": sample.field, "subject": sample.subject}
        if sample.forbidden:
            body["forbidden"] = sample.forbidden
    else:
        body = {"text": sample.text}
    body["gold"] = sample.gold
    if sample.hard_negatives:
        body["hard_negatives"] = sample.hard_negatives
    if sample.meta:
        body["meta"] = sample.meta
    members = {"json": json.dumps(body, ensure_ascii=False).encode()}
    if sample.image is not None:
        members[extension_of(sample.image) or "png"] = to_store(sample.image)
    return to_key(sample.id), members


def read_question(key: str, members: Mapping[str, bytes]) -> Sample:
    """The question that `to_members` stored; KeyError, TypeError or ValueError if the members hold none."""
    body = decode_member("json", members["json"])
    image, gold = picture_member(members), _texts(body["gold"])
    kind = body.get("kind", "name" if image is None else "picture")
    if kind not in ("name", "picture"):
        raise ValueError("a question's kind is name or picture")
    if kind == "picture" and image is None:
        raise ValueError("a picture question needs a picture")
    answers = _texts(body["answers"])
    subject = body.get("subject", body.get("country"))  # the factbook's subjects are countries
    return Sample(
        id=from_key(key),
        question=_text(body["question"]),
        answers=answers,
        kind=kind,
        field=_text(body.get("field", "")),
        subject=_text((gold or ("",))[0] if subject is None else subject),
        gold=gold,
        image=image,
        weight=1.0 if answers else 0.0,
        hard_negatives=_texts(body.get("hard_negatives", [])),
        forbidden=_texts(body.get("forbidden", [])),
        meta=body.get("meta", {}),
    )


def read_pair(key: str, members: Mapping[str, bytes]) -> Pair:
    """The pair that `to_members` stored; KeyError, TypeError or ValueError if the members hold none."""
    body = decode_member("json", members["json"])
    return Pair(
        id=from_key(key),
        text=_text(body["text"]),
        image=picture_member(members),
        gold=_texts(body["gold"]),
        hard_negatives=_texts(body.get("hard_negatives", [])),
        meta=body.get("meta", {}),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise TypeError(f"{values!r} is not a list of texts")
    return tuple(map(_text, values))


def forbidden_of(samples: Iterable[Sample]) -> list[tuple[str, ...]] | None:
    """What each question must not be given, as a search takes it; None if there is nothing for any of them."""
    found = [sample.forbidden for sample in samples]
    return found if any(found) else None
