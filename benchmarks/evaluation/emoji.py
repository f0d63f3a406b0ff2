"""Image-text retrieval among emoji that were held out: ``python -m benchmarks.evaluation.emoji``.

Three tasks: Twemoji's drawing finds OpenMoji's, a name finds OpenMoji's drawing, and OpenMoji's drawing finds the
name. The data are those of the quickstart (``data/factbook``), whose own training sees all of these emoji; so the
others are made into a data set of their own (`emoji_data`), and ``train.py`` trains a retriever on it as
``configs/emoji.yaml`` says: text and pictures in one space, so that a name finds a drawing. From drawing to name there
is no training of its own: the scores are those from name to drawing.

Candidates are ``POOL`` of the held-out emoji, one of a family, drawn with each of five seeds; each candidate's query
is asked once. A tie counts against the right one. Intervals: bootstrap over emoji, draws of all seeds together.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bm25s
import numpy
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from torch import Tensor

from benchmarks.evaluation.emoji_data import Drawn, families, read_emoji, split, write_dataset
from benchmarks.pipeline.measuring import machine
from data.images import pixels
from rag_mm.checkpoint import checkpoint_dir
from rag_mm.evaluate import bootstrap
from rag_mm.evaluate.metric import Array, Scores, mean
from rag_mm.evaluate.run import find_checkpoint
from rag_mm.metrics import read_metrics
from retriever.embed import pictures
from retriever.encoder import DualEncoder
from retriever.weights import load_weights

DOCS = Path(__file__).parents[2] / "docs" / "results.md"
CONFIG = Path(__file__).parents[2] / "configs" / "emoji.yaml"
RESULTS = Path(__file__).parent / "results" / "emoji.json"
TASKS = ("Twemoji → OpenMoji", "name → OpenMoji", "OpenMoji → name")
SEEDS, POOL, NEIGHBOURS = (0, 1, 2, 3, 4), 100, 5
HITS = (1, 5, 10)


@dataclass
class Ranks:
    """Rank of the right candidate, from 1, of every query of every seed."""

    units: list[str] = field(default_factory=list)
    rank: list[int] = field(default_factory=list)

    def add(self, emoji: Sequence[Drawn], score_QC: Array) -> None:
        """Query i belongs to candidate i; ties count against it."""
        own = numpy.diagonal(score_QC)[:, None]
        self.rank += ((score_QC >= own).sum(axis=1)).tolist()
        self.units += [one.id for one in emoji]

    def scores(self) -> Scores:
        rank = numpy.array(self.rank)
        columns = {f"hit@{k}": (rank <= k).astype(numpy.float64) for k in HITS}
        names = tuple(f"{unit} {i}" for i, unit in enumerate(self.units))
        metrics = tuple(mean(f"hit@{k}", f"the right one is among the first {k}") for k in HITS)
        return Scores(names, tuple(self.units), columns, metrics)


def train(data_dir: Path, run_dir: Path, *, steps: int, seed: int) -> None:
    """train.py with configs/emoji.yaml; goes on if the run was interrupted."""
    options = ["--run-dir", run_dir, "--data.dir", data_dir, "--train.steps", steps, "--train.seed", seed]
    subprocess.run([sys.executable, "train.py", "--config", CONFIG, *map(str, options)], check=True)


def load_encoder(run_dir: Path) -> tuple[DualEncoder, int]:
    """The retriever of a run's last checkpoint, and the side of its pictures."""
    config, step = find_checkpoint(run_dir)
    size = config.data.image_size
    encoder = DualEncoder(config.retriever, image_size=size, weights=False)
    load_weights(encoder, checkpoint_dir(run_dir, step))
    return encoder.eval(), size


@torch.no_grad()
def by_towers(encoder: DualEncoder, size: int, emoji: Sequence[Drawn]) -> dict[str, Array]:
    """Scores (queries, candidates) of every task."""

    def drawings(which: str) -> Tensor:
        images, there = pictures([getattr(one, which) for one in emoji], size)
        return encoder(encoder.features([""] * len(emoji), images, there))

    blank = torch.zeros(len(emoji), 3, size, size)
    text = encoder(encoder.features([one.name for one in emoji], blank, torch.zeros(len(emoji))))
    asked, shown = drawings("twemoji"), drawings("openmoji")
    pairs = zip(TASKS, ((asked, shown), (text, shown), (shown, text)), strict=True)
    return {task: (a @ b.T).numpy().astype(numpy.float64) for task, (a, b) in pairs}


Matcher = Callable[[Sequence[str], Sequence[str]], Array]


def trigram_tf_idf(known: Sequence[str]) -> Matcher:
    """Cosines of TF-IDF of character trigrams, whose frequencies are those of ``known``."""
    vectorizer = TfidfVectorizer(analyzer="char_wb", ngram_range=(3, 3)).fit(known)
    return lambda asked, names: (vectorizer.transform(asked) @ vectorizer.transform(names).T).toarray()


def bm25(known: Sequence[str]) -> Matcher:
    """BM25 of words (Lucene's variant, k1 1.5, b 0.75) with ``names`` as the corpus."""

    def match(asked: Sequence[str], names: Sequence[str]) -> Array:
        index = bm25s.BM25()
        index.index(bm25s.tokenize(list(names), stopwords=None, show_progress=False), show_progress=False)
        words = [re.findall(r"(?u)\b\w\w+\b", text.lower()) for text in asked]
        return numpy.stack([index.get_scores(w) if w else numpy.zeros(len(names)) for w in words]).astype(numpy.float64)

    return match


class PixelsAndNames:
    """Without learning across the two: an emoji that was trained on stands between a drawing and a name.

    A drawing is described by the names of the ``NEIGHBOURS`` known drawings with the most similar pixels, and that text
    is matched with the candidates' names; a name finds the known names nearest to it, and their drawings look for the
    candidate with the most similar pixels.
    """

    def __init__(self, known: Sequence[Drawn], match: Matcher) -> None:
        self.names, self.match = [one.name for one in known], match
        self.pixels = pixels([one.openmoji for one in known]).numpy()

    def scores(self, emoji: Sequence[Drawn]) -> dict[str, Array]:
        names, shown = [one.name for one in emoji], pixels([one.openmoji for one in emoji]).numpy()
        likeness = shown @ self.pixels.T
        nearest = numpy.argsort(-likeness, axis=1, kind="stable")[:, :NEIGHBOURS]
        described = [" ".join(self.names[i] for i in row) for row in nearest]
        named = self.match(names, self.names)
        known = numpy.argsort(-named, axis=1, kind="stable")[:, :NEIGHBOURS]
        drawn = [(named[i, row][:, None] * likeness[:, row].T).sum(axis=0) for i, row in enumerate(known)]
        return {TASKS[1]: numpy.stack(drawn), TASKS[2]: self.match(described, names)}


def by_pixels(emoji: Sequence[Drawn]) -> dict[str, Array]:
    """12 x 12 mean-centred pixels."""
    asked, shown = (pixels([getattr(one, which) for one in emoji]).numpy() for which in ("twemoji", "openmoji"))
    return {TASKS[0]: asked @ shown.T}


def measure(held: Sequence[Drawn], systems: Mapping[str, Callable[[Sequence[Drawn]], Mapping[str, Array]]]) -> Any:
    """Rows of the table: every system on the tasks that it can do."""
    ranks: defaultdict[tuple[str, str], Ranks] = defaultdict(Ranks)
    for seed in SEEDS:
        places = numpy.random.default_rng(seed).permutation(len(held))[:POOL]
        candidates = [held[i] for i in places]
        for name, system in systems.items():
            for task, score_QC in system(candidates).items():
                ranks[task, name].add(candidates, score_QC)
    rows = []
    for task in TASKS:
        for name in systems:
            if (task, name) not in ranks:
                continue
            scores = ranks[task, name].scores()
            ends, found = bootstrap.intervals(scores), scores.results()
            figures = {metric: [found[metric], *ends[metric]] for metric in found}
            rows.append({"task": task, "system": name, "num_queries": len(scores.ids), **figures})
        first = ranks[task, "towers"].scores()
        for name in systems:
            if name != "towers" and (task, name) in ranks:
                test = bootstrap.compare(first, ranks[task, name].scores())["hit@1"]
                next(r for r in rows if (r["task"], r["system"]) == (task, name))["towers_minus_it"] = [
                    test.difference, test.low, test.high, test.p
                ]  # fmt: skip
    return rows


def markdown(result: Mapping[str, Any]) -> str:
    """The table, and what it was made with."""
    lines = ["| task | system | hit@1 | hit@5 | hit@10 | towers − it, hit@1 |", "|---|---|---:|---:|---:|---:|"]
    for row in result["rows"]:
        cells = ["{:.3f} ({:.2f}–{:.2f})".format(*row[f"hit@{k}"]) for k in HITS]
        test = row.get("towers_minus_it")
        cells.append("{:+.3f} ({:+.2f} to {:+.2f}), p {:.4f}".format(*test) if test else "")
        lines.append("| " + " | ".join([row["task"], row["system"], *cells]) + " |")
    chance = "".join(f", hit@{k} {k / result['pool']:.2f}" for k in HITS)
    made = result["machine"]
    about = (
        f"{result['pool']} candidates, {len(SEEDS)} draws of them out of {result['num_held_out']} held-out emoji "
        f"(one of each family), trained on {result['num_trained']} others for {result['steps']} steps "
        f"({result['seconds']:.0f} s, one seed); chance{chance}. 95 % bootstrap over emoji, which does not cover the "
        f"seed of training; p: "
        f"randomisation test. {made['date']}, {made['processor']}, {made['cores']} cores, torch {made['torch']}, "
        f"load {made['load_before']} before."
    )
    return "\n".join([*lines, "", about])


def put(text: str, table: str) -> str:
    """``text`` with the table between its two marks."""
    block = re.compile(r"(<!-- emoji -->\n).*?(<!-- /emoji -->)", re.S)
    if not block.search(text):
        raise SystemExit(f"{DOCS} has no place for the table; write <!-- emoji --> and <!-- /emoji -->")
    return block.sub(lambda found: f"{found[1]}{table}\n{found[2]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evaluation.emoji", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("data/factbook"), help="the quickstart's data")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/emoji"), help="data set and run; started again, goes on"
    )
    parser.add_argument("--steps", type=int, default=1000, help="of training")
    parser.add_argument("--seed", type=int, default=0, help="of training")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the results go")
    parser.add_argument("--docs", action="store_true", help="put the table into docs/results.md")
    given = parser.parse_args()
    before = machine()
    known, held = split(families(read_emoji(given.data)))
    data_dir, run_dir = given.work / "data", given.work / "run"
    write_dataset(known, data_dir, tokenizer=given.data / "tokenizer")
    train(data_dir, run_dir, steps=given.steps, seed=given.seed)
    encoder, size = load_encoder(run_dir)
    names = [one.name for one in known]
    systems: dict[str, Callable[[Sequence[Drawn]], Mapping[str, Array]]] = {
        "towers": functools.partial(by_towers, encoder, size),
        "pixels": by_pixels,
        "pixels + trigram TF-IDF": PixelsAndNames(known, trigram_tf_idf(names)).scores,
        "pixels + BM25": PixelsAndNames(known, bm25(names)).scores,
    }
    seconds = sum(sum(record["time_s"].values()) for record in read_metrics(run_dir))
    result = {
        "rows": measure(held, systems), "pool": POOL, "num_held_out": len(held), "num_trained": len(known),
        "steps": given.steps, "seed": given.seed, "seconds": seconds, "machine": before,
    }  # fmt: skip
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n")
    table = markdown(result)
    print(table)
    if given.docs:
        DOCS.write_text(put(DOCS.read_text(), table))


if __name__ == "__main__":
    main()
