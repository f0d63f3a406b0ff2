"""Small sources in the real form of each format: field names, nesting, quoting and file names as they are published."""

from __future__ import annotations

import base64
import csv
import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image


def picture(seed: int, kind: str = "JPEG", size: int = 32) -> bytes:
    """An encoded picture that differs for each seed."""
    image = Image.new("RGB", (size, size), (40 * seed % 256, 90, 255 - 30 * seed % 256))
    image.paste((seed * 17 % 256, 255, 0), (seed % size, 0, size, size // 2))
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


def write_pictures(folder: Path, names: list[str]) -> None:
    for seed, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(seed, "PNG" if name.endswith("png") else "JPEG"))


def write_lines(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def img2dataset(root: Path) -> list[str]:
    import pyarrow
    import pyarrow.parquet

    folder = root / "laion"
    folder.mkdir(parents=True)
    for number, keys in enumerate((["000000000", "000000002"], ["000010000"])):
        rows = []
        with tarfile.open(folder / f"{number:05d}.tar", "w") as archive:
            for key in keys:
                meta = {
                    "url": f"https://example.org/{key}.jpg",
                    "caption": f"a flag {key}",
                    "key": key,
                    "status": "success",
                    "error_message": None,
                    "width": 32,
                    "height": 32,
                    "original_width": 64,
                    "original_height": 64,
                    "exif": "{}",
                    "sha256": "0" * 64,
                    "LICENSE": "?",
                    "similarity": 0.31,
                }
                rows.append(meta)
                for ext, data in (
                    ("jpg", picture(int(key))),
                    ("json", json.dumps(meta).encode()),
                    ("txt", meta["caption"].encode()),
                ):
                    member = tarfile.TarInfo(f"{key}.{ext}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
        failed = {**rows[0], "key": "000000001", "status": "failed_to_download", "error_message": "HTTP Error 404"}
        table = pyarrow.Table.from_pylist([rows[0], failed, *rows[1:]])
        pyarrow.parquet.write_table(table, folder / f"{number:05d}.parquet")
        (folder / f"{number:05d}_stats.json").write_text(json.dumps({"count": len(rows) + 1, "successes": len(rows)}))
    return ["img2dataset", "--folder", str(folder)]


def kilt(root: Path) -> list[str]:
    pages = [
        {
            "_id": "290",
            "wikipedia_id": "290",
            "wikipedia_title": "A",
            "text": ["A\n", "A is the first letter of the alphabet.\n", "Section::::History.\n", "It is old.\n"],
            "anchors": [{"paragraph_id": 1, "start": 9, "end": 14, "text": "first", "href": "First"}],
            "categories": "ISO basic Latin letters",
            "wikidata_info": {"wikidata_id": "Q9659"},
            "history": {"pageid": 290, "revid": 907643411},
        },
        {
            "_id": "10.5",
            "wikipedia_id": "10.5",
            "wikipedia_title": "Nepal",
            "text": ["Nepal\n", "Its capital is Kathmandu.\n", "Section::::Etymology.\n"],
            "anchors": [],
            "categories": "",
            "history": {"pageid": 2},
        },
    ]
    write_lines(root / "kilt_knowledgesource.json", pages)
    train = {
        "id": "-1027463814348738734",
        "input": "which letter comes first?",
        "output": [
            {
                "answer": "A",
                "meta": {"score": 1},
                "provenance": [
                    {
                        "wikipedia_id": "290",
                        "title": "A",
                        "section": "Section::::Abstract.",
                        "start_paragraph_id": 1,
                        "start_character": 0,
                        "end_paragraph_id": 1,
                        "end_character": 38,
                        "bleu_score": 1.0,
                    }
                ],
            },
            {"answer": "the A"},
            {"provenance": [{"wikipedia_id": "777", "title": "Not here", "start_paragraph_id": 2}]},
        ],
        "meta": {"left_context": "", "mention": "", "right_context": ""},
    }
    dev = {
        "id": "d1",
        "input": "capital of Nepal?",
        "output": [{"answer": "Kathmandu", "provenance": [{"wikipedia_id": "10.5", "title": "Nepal"}]}],
    }
    write_lines(root / "nq-train-kilt.jsonl", [train])
    write_lines(root / "nq-dev-kilt.jsonl", [dev])
    write_lines(root / "nq-test_without_answers-kilt.jsonl", [{"id": "t1", "input": "what is B?"}])
    return [
        "kilt",
        "--knowledge",
        str(root / "kilt_knowledgesource.json"),
        "--train",
        str(root / "nq-train-kilt.jsonl"),
        "--dev",
        str(root / "nq-dev-kilt.jsonl"),
        "--test",
        str(root / "nq-test_without_answers-kilt.jsonl"),
    ]


PASSAGES = [
    ("1", 'Aaron ( or ; "Ahärôn") is a prophet, high priest, and the brother of Moses.', "Aaron"),
    ("2", "God at Sinai granted Aaron the priesthood.", "Aaron"),
    ("3", "The capital of Nepal is Kathmandu.", "Nepal"),
    ("4", "Its flag is not a rectangle.", "Flag of Nepal"),
]


def dpr(root: Path) -> list[str]:
    with (root / "psgs_w100.tsv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter="\t", lineterminator="\n").writerows([("id", "text", "title"), *PASSAGES])
    assert '"Aaron ( or ; ""Ahärôn"") is' in (root / "psgs_w100.tsv").read_text()
    (root / "biencoder-nq-train.json").write_text(json.dumps(dpr_questions(), indent=4))
    (root / "biencoder-nq-dev.json").write_text(json.dumps([dpr_questions()[1]]))
    return [
        "dpr",
        "--passages",
        str(root / "psgs_w100.tsv"),
        "--train",
        str(root / "biencoder-nq-train.json"),
        "--dev",
        str(root / "biencoder-nq-dev.json"),
    ]


def dpr_questions() -> list[dict[str, Any]]:
    contexts = {
        name: {"title": title, "text": text, "score": 12.5, "title_score": 0, "passage_id": name}
        for name, text, title in PASSAGES
    }
    return [
        {
            "dataset": "nq_train_psgs_w100",
            "question": "who was the brother of moses",
            "answers": ["Aaron", "aaron"],
            "positive_ctxs": [contexts["1"], contexts["2"]],
            "negative_ctxs": [contexts["4"]],
            "hard_negative_ctxs": [contexts["3"]],
        },
        {
            "dataset": "nq_train_psgs_w100",
            "question": "capital of nepal",
            "answers": ["Kathmandu"],
            "positive_ctxs": [contexts["3"]],
            "negative_ctxs": [],
            "hard_negative_ctxs": [contexts["4"], contexts["1"]],
        },
    ]


def atlas(root: Path) -> list[str]:
    passages = [
        {"id": "0", "title": "Nepal", "section": "Capital", "text": "Kathmandu is the capital."},
        {"id": "1", "title": "Nepal", "section": "", "text": "Nepal lies in Asia.", "hierarchy": ["Nepal"]},
    ]
    write_lines(root / "text-list-100-sec.jsonl", passages)
    write_lines(
        root / "train.jsonl", [{"question": "capital?", "answers": ["Kathmandu", "KTM"], "target": "<extra_id_0> KTM"}]
    )
    write_lines(root / "dev.jsonl", [{"question": "continent?", "answers": ["Asia"], "id": "q7", "metadata": {"x": 1}}])
    return [
        "atlas",
        "--passages",
        str(root / "text-list-100-sec.jsonl"),
        "--train",
        str(root / "train.jsonl"),
        "--dev",
        str(root / "dev.jsonl"),
    ]


def karpathy(root: Path, *, coco: bool) -> list[str]:
    images = []
    splits = ("train", "restval", "val", "test")
    for i, split in enumerate(splits):
        where = "train2014" if split == "train" else "val2014"
        entry: dict[str, Any] = {
            "filename": f"COCO_{where}_{i:012d}.jpg" if coco else f"{i}.jpg",
            "imgid": i,
            "split": split,
            "sentids": list(range(5 * i, 5 * i + 5)),
            "sentences": [
                {"tokens": ["flag", str(s)], "raw": f"Flag {s}.", "imgid": i, "sentid": s}
                for s in range(5 * i, 5 * i + 5)
            ],
        }
        images.append({"filepath": where, "cocoid": 1000 + i, **entry} if coco else entry)
    name = "coco" if coco else "flickr30k"
    (root / f"dataset_{name}.json").write_text(json.dumps({"images": images, "dataset": name}))
    files = [f"{e['filepath']}/{e['filename']}" if coco else e["filename"] for e in images]
    write_pictures(root / "images", files)
    return [name, "--karpathy", str(root / f"dataset_{name}.json"), "--images", str(root / "images")]


def vqa(root: Path) -> list[str]:
    head = {"info": {"year": 2015}, "license": {"name": "CC-BY"}, "data_type": "mscoco", "task_type": "Open-Ended"}
    for _, subtype, ids in (("train", "train2014", [1, 1, 2]), ("val", "val2014", [3])):
        questions, annotations = [], []
        for n, image in enumerate(ids):
            name = image * 1000 + n
            questions.append({"image_id": image, "question": f"What is shown ({n})?", "question_id": name})
            given = ["net"] * 6 + ["netting"] * 3 + ["the net"]
            answers = [{"answer": a, "answer_confidence": "yes", "answer_id": i + 1} for i, a in enumerate(given)]
            annotations.append(
                {
                    "question_type": "what is",
                    "multiple_choice_answer": "netting",
                    "answers": answers,
                    "image_id": image,
                    "answer_type": "other",
                    "question_id": name,
                }
            )
            write_pictures(root / "images" / subtype, [f"COCO_{subtype}_{image:012d}.jpg"])
        body = {**head, "questions": questions, "data_subtype": subtype}
        (root / f"v2_OpenEnded_mscoco_{subtype}_questions.json").write_text(json.dumps(body))
        body = {**head, "annotations": annotations[::-1], "data_subtype": subtype}
        (root / f"v2_mscoco_{subtype}_annotations.json").write_text(json.dumps(body))
    return [
        "vqa",
        "--images",
        str(root / "images"),
        "--train-questions",
        str(root / "v2_OpenEnded_mscoco_train2014_questions.json"),
        "--train-annotations",
        str(root / "v2_mscoco_train2014_annotations.json"),
        "--dev-questions",
        str(root / "v2_OpenEnded_mscoco_val2014_questions.json"),
        "--dev-annotations",
        str(root / "v2_mscoco_val2014_annotations.json"),
    ]


def folder(root: Path) -> list[str]:
    write_pictures(root / "pictures", ["a/1.jpg", "2.png", "3.jpg"])
    rows = [
        ("file_name", "caption", "photographer", "split"),
        ("a/1.jpg", 'the "first", red', "Ann", "train"),
        ("2.png", "second", "", "validation"),
        ("3.jpg", "", "Bo", "train"),
    ]
    with (root / "pictures" / "metadata.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return ["folder", "--table", str(root / "pictures" / "metadata.csv")]


def beir(root: Path) -> list[str]:
    folder = root / "scifact"
    (folder / "qrels").mkdir(parents=True)
    write_lines(
        folder / "corpus.jsonl",
        [
            {"_id": "MED-10", "title": "Statins", "text": "Statin use\nand survival.", "metadata": {"url": "http://x"}},
            {"_id": "10.1000/b", "title": "", "text": "Second."},
            {"_id": "3", "title": "Third", "text": "Third."},
        ],
    )
    write_lines(
        folder / "queries.jsonl",
        [
            {"_id": "PLAIN-2", "text": "do statins help", "metadata": {"kind": "health"}},
            {"_id": "q2", "text": "second?"},
        ],
    )
    head = "query-id\tcorpus-id\tscore\n"
    (folder / "qrels" / "train.tsv").write_text(head + "PLAIN-2\tMED-10\t2\nPLAIN-2\t10.1000/b\t1\nPLAIN-2\t3\t0\n")
    (folder / "qrels" / "test.tsv").write_text(head + "q2\t10.1000/b\t1\n")
    return ["beir", "--folder", str(folder)]


def fid(root: Path) -> list[str]:
    contexts = [
        {"id": name, "title": title, "text": text, "score": 80.1, "hasanswer": name == "3"}
        for name, text, title in PASSAGES
    ]
    rows = [
        {
            "id": "0",
            "question": "capital of nepal",
            "target": "Kathmandu",
            "answers": ["KTM", "Kathmandu"],
            "ctxs": contexts[:3],
        },
        {"id": "1", "question": "shape of its flag", "answers": ["no rectangle"], "ctxs": contexts[2:]},
    ]
    (root / "train.json").write_text(json.dumps(rows))
    write_lines(root / "dev.jsonl", [rows[1]])
    return ["fid", "--train", str(root / "train.json"), "--dev", str(root / "dev.jsonl")]


def infoseek(root: Path) -> list[str]:
    write_pictures(root / "images", ["oven_00000001.jpg", "oven_00000002.JPEG"])
    articles = [
        {
            "wikidata_id": "Q837",
            "wikipedia_title": "Nepal",
            "wikipedia_summary": "A country.",
            "wikipedia_content": "Nepal is a country.\nIts capital is Kathmandu.",
            "wikipedia_image_url": "http://x/n.jpg",
        },
        {
            "wikidata_id": "Q40",
            "wikipedia_title": "Austria",
            "wikipedia_content": "Austria.",
            "wikipedia_image_url": None,
        },
    ]
    write_lines(root / "Wiki6M_ver_1_0.jsonl", articles)
    train = {
        "data_id": "infoseek_train_00000000",
        "image_id": "oven_00000001",
        "question": "What is its capital?",
        "answer": ["Kathmandu", "KTM"],
        "answer_eval": ["Kathmandu", "KTM"],
        "data_split": "train",
    }
    dev = {
        "data_id": "infoseek_val_00000000",
        "image_id": "oven_00000002",
        "question": "How many live here (million)?",
        "answer": ["9"],
        "answer_eval": [{"wikidata": 9.0, "range": [8.1, 9.9]}],
        "data_split": "val_unseen_entity",
    }
    write_lines(root / "infoseek_train.jsonl", [train])
    write_lines(root / "infoseek_val.jsonl", [dev])
    write_lines(
        root / "infoseek_train_withkb.jsonl",
        [{"data_id": train["data_id"], "entity_id": "Q837", "entity_text": "Nepal"}],
    )
    write_lines(
        root / "infoseek_val_withkb.jsonl", [{"data_id": dev["data_id"], "entity_id": "Q40", "entity_text": "Austria"}]
    )
    return [
        "infoseek",
        "--images",
        str(root / "images"),
        "--articles",
        str(root / "Wiki6M_ver_1_0.jsonl"),
        "--train",
        str(root / "infoseek_train.jsonl"),
        "--dev",
        str(root / "infoseek_val.jsonl"),
        "--train-kb",
        str(root / "infoseek_train_withkb.jsonl"),
        "--dev-kb",
        str(root / "infoseek_val_withkb.jsonl"),
    ]


def flickr_tokens(root: Path) -> list[str]:
    write_pictures(root / "flickr30k-images", ["1000092795.jpg", "10002456.jpg"])
    lines = [f"{name}.jpg#{i}\tCaption {i} of {name} ." for name in ("1000092795", "10002456") for i in range(5)]
    (root / "results_20130124.token").write_text("\n".join(lines) + "\n")
    return ["flickr30k", "--tokens", str(root / "results_20130124.token"), "--images", str(root / "flickr30k-images")]


WIT_COLUMNS = (
    "language",
    "page_url",
    "image_url",
    "page_title",
    "section_title",
    "hierarchical_section_title",
    "caption_reference_description",
    "caption_attribution_description",
    "caption_alt_text_description",
    "mime_type",
    "original_height",
    "original_width",
    "is_main_image",
    "attribution_passes_lang_id",
    "page_changed_recently",
    "context_page_description",
    "context_section_description",
)


def wit(root: Path) -> list[str]:
    rows = [
        (
            "en",
            "https://en.wikipedia.org/wiki/Nepal",
            "http://u/n.jpg",
            "Nepal",
            "Flag",
            "Nepal / Flag",
            'The "flag"',
            "English: flag",
            "",
            "image/jpeg",
            "32",
            "32",
            "true",
            "true",
            "false",
            "Nepal is a country.",
            "A flag.",
        ),
        (
            "de",
            "https://de.wikipedia.org/wiki/Nepal",
            "http://u/n.jpg",
            "Nepal",
            "",
            "Nepal",
            "Flagge",
            "",
            "",
            "image/jpeg",
            "32",
            "32",
            "true",
            "true",
            "false",
            "Nepal ist ein Staat.",
            "",
        ),
        (
            "en",
            "https://en.wikipedia.org/wiki/Peru",
            "http://u/p.jpg",
            "Peru",
            "",
            "Peru",
            "",
            "",
            "alt",
            "image/jpeg",
            "32",
            "32",
            "true",
            "true",
            "false",
            "Peru.",
            "",
        ),
    ]
    text = "\n".join("\t".join(row) for row in (WIT_COLUMNS, *rows)) + "\n"
    with gzip.open(root / "wit_v1.train.all-1percent_sample.tsv.gz", "wt", encoding="utf-8") as file:
        file.write(text)
    pixels = [f"http://u/{name}.jpg\t{base64.b64encode(picture(i)).decode()}\thttp://m" for i, name in enumerate("np")]
    with gzip.open(root / "image_pixels_part-00000.csv.gz", "wt") as file:
        file.write("\n".join(pixels) + "\n")
    return [
        "wit",
        "--train",
        str(root / "wit_v1.train.all-1percent_sample.tsv.gz"),
        "--language",
        "en",
        "--pixels",
        str(root / "image_pixels_part-00000.csv.gz"),
    ]


def saved_dataset(root: Path) -> list[str]:
    import datasets

    write_pictures(root, ["one.jpg", "two.jpg", "three.jpg"])
    features = datasets.Features(
        {"image": datasets.Image(), "caption": datasets.Value("string"), "source": datasets.Value("string")}
    )
    names = {"train": ["one", "two"], "validation": ["three"]}
    splits = {
        split: datasets.Dataset.from_dict(
            {"image": [str(root / f"{n}.jpg") for n in given], "caption": given, "source": ["web"] * len(given)},
            features=features,
        )
        for split, given in names.items()
    }
    datasets.disable_progress_bars()
    datasets.DatasetDict(splits).save_to_disk(root / "saved")
    return ["datasets", "--dataset", str(root / "saved")]


# Entries as WordNet 3.0 has them: {name} stands for the byte at which the entry of that name begins.
WORDNET = {
    "noun": {
        "animal": "{animal} 03 n 01 animal 0 001 ~ {dog} n 0000 | a living organism  ",
        "dog": "{dog} 05 n 02 dog 0 domestic_dog 0 003 @ {animal} n 0000 ~ {hound} n 0000 + {chase} v 0101 | "
        'a canine (a "good dog") that dogs keep; "the dog barked"; "his dogs all night"  ',
        "hound": "{hound} 05 n 01 hound 1 001 @ {dog} n 0000 | hounds  ",
    },
    "verb": {"chase": "{chase} 38 v 01 chase 0 001 + {dog} n 0101 02 + 08 00 + 09 00 | go after  "},
    "adj": {"live": "{live} 00 s 02 live 0 alive(p) 0 001 ! {dead} a 0101 | having life  ",
            "dead": '{dead} 00 a 01 dead 0 000 | no longer living; "the wall is dead"  '},
    "adv": {"doggedly": "{doggedly} 02 r 01 doggedly 0 000 | with obstinate determination  "},
}  # fmt: skip


def wordnet(root: Path, queries: str = "glosses") -> list[str]:
    licence = "  1 This software and database is being provided to you, the LICENSEE, by  \n"
    folder = root / "wordnet"
    folder.mkdir()
    names = [name for entries in WORDNET.values() for name in entries]
    offsets = dict.fromkeys(names, "0" * 8)
    for write in (False, True):
        for file, entries in WORDNET.items():
            text = licence
            for name, entry in entries.items():
                offsets[name] = offsets[name] if write else f"{len(text):08d}"
                text += entry.format(**offsets) + "\n"
            if write:
                (folder / f"data.{file}").write_text(text)
    return ["wordnet", "--source", str(folder), "--queries", queries]


# Of each format: how to write the source, and how many documents, questions and pairs of each split there must be.
EXAMPLES: dict[str, tuple[Callable[[Path], list[str]], int, tuple[int, int, int], tuple[int, int, int]]] = {
    "img2dataset": (img2dataset, 3, (0, 0, 0), (3, 0, 0)),
    "datasets": (saved_dataset, 3, (0, 0, 0), (2, 1, 0)),
    "kilt": (kilt, 2, (1, 1, 1), (0, 0, 0)),
    "dpr": (dpr, 4, (2, 1, 0), (0, 0, 0)),
    "atlas": (atlas, 2, (1, 1, 0), (0, 0, 0)),
    "coco": (lambda root: karpathy(root, coco=True), 4, (0, 0, 0), (10, 5, 5)),
    "vqa": (vqa, 3, (3, 1, 0), (0, 0, 0)),
    "folder": (folder, 3, (0, 0, 0), (1, 1, 0)),
    "beir": (beir, 3, (0, 0, 0), (1, 0, 1)),
    "fid": (fid, 4, (2, 1, 0), (0, 0, 0)),
    "infoseek": (infoseek, 2, (1, 1, 0), (0, 0, 0)),
    "flickr30k": (lambda root: karpathy(root, coco=False), 4, (0, 0, 0), (10, 5, 5)),
    "flickr30k-tokens": (flickr_tokens, 2, (0, 0, 0), (10, 0, 0)),
    "wit": (wit, 2, (0, 0, 0), (3, 0, 0)),
    "wordnet": (wordnet, 7, (4, 1, 1), (0, 0, 0)),
}
