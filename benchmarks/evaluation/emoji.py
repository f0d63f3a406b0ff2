"""Image-text retrieval among emoji that were held out: ``python -m benchmarks.evaluation.emoji``.

Three tasks: Twemoji's drawing finds OpenMoji's, a name finds OpenMoji's drawing, and OpenMoji's drawing finds the
name. The data are those of the quickstart (``data/factbook``), whose own training sees all of these emoji; so towers
are trained here, on the others, by the framework's parts: `retriever.encoder`'s towers, `rag_mm.augmentation` and
`rag_mm.objectives.contrastive`. Held out are whole families: emoji that look alike in one of the drawings, or whose
names differ in man, woman and the like only ("woman running" tells too much about "man running").

`DualEncoder` scores text against text and pictures against pictures, side by side, so across the two its score is 0
by construction. For names and drawings the two towers are therefore given the same width and compared with each
other.

Candidates are ``POOL`` of the held-out emoji, one of a family, drawn with each of five seeds; each candidate's query
is asked once. A tie counts against the right one. Intervals: bootstrap over emoji, draws of all seeds together.
"""

from __future__ import annotations

import argparse
import json
import re
import time
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

from benchmarks.pipeline.measuring import machine
from data.dataset import Dataset
from data.emoji_pictures import same_picture_groups
from data.factbook_questions import stable_hash
from data.images import pixels
from rag_mm.augmentation import augment
from rag_mm.evaluate import bootstrap
from rag_mm.evaluate.metric import Array, Scores, mean
from rag_mm.losses import contrastive
from retriever.config import RetrieverConfig
from retriever.embed import pictures
from retriever.encoder import DualEncoder

DOCS = Path(__file__).parents[2] / "docs" / "results.md"
RESULTS = Path(__file__).parent / "results" / "emoji.json"
TASKS = ("Twemoji → OpenMoji", "name → OpenMoji", "OpenMoji → name")
SEEDS, POOL, HELD_OUT, SIZE, NEIGHBOURS = (0, 1, 2, 3, 4), 100, 0.2, 24, 5
HITS = (1, 5, 10)
PEOPLE = {"man", "woman", "person", "men", "women", "people", "boy", "girl"}


@dataclass(frozen=True)
class Drawn:
    """An emoji: its name, and both drawings as PNG."""

    id: str
    name: str
    twemoji: bytes
    openmoji: bytes


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


def train(emoji: Sequence[Drawn], *, steps: int, seed: int, batch_size: int = 96) -> DualEncoder:
    """Both towers on the three tasks at once, in equal parts."""
    torch.manual_seed(seed)
    encoder = DualEncoder(RetrieverConfig(text_dim=128, image_dim=128, learned_text=True), image_size=SIZE)
    encoder.text.fit([one.name for one in emoji])
    asked, shown = (pictures([getattr(one, which) for one in emoji], SIZE)[0] for which in ("twemoji", "openmoji"))
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(seed)
    place, weight = torch.eye(batch_size, dtype=torch.bool), torch.full((batch_size,), 1 / batch_size)
    for step in range(steps):
        rows = torch.randperm(len(emoji), generator=generator)[:batch_size]
        names = [emoji[i].name for i in rows.tolist()]
        twemoji, openmoji = (
            encoder.image(augment(image[rows], [f"{which} {name}" for name in names], seed=seed, step=step))
            for which, image in (("twemoji", asked), ("openmoji", shown))
        )
        text, scale = texts(encoder, names), encoder.scale()
        pairs = ((twemoji, openmoji), (text, openmoji), (openmoji, text))
        loss = torch.stack([contrastive(a, b, place, weight, scale).sum() for a, b in pairs]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step} of {steps}: loss {loss.item():.3f}", flush=True)
    return encoder.eval()


def texts(encoder: DualEncoder, names: Sequence[str]) -> Tensor:
    """Embeddings (N, E) of names."""
    none = torch.zeros(len(names), 3, SIZE, SIZE)
    features = encoder.features(names, none, torch.zeros(len(names)))
    return encoder.text(features["trigram"], features["trigram_mask"])


@torch.no_grad()
def by_towers(encoder: DualEncoder, emoji: Sequence[Drawn]) -> dict[str, Array]:
    """Scores (queries, candidates) of every task."""
    asked, shown = (
        encoder.image(pictures([getattr(one, which) for one in emoji], SIZE)[0]) for which in ("twemoji", "openmoji")
    )
    text = texts(encoder, [one.name for one in emoji])
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
    parser.add_argument("--steps", type=int, default=1000, help="of training, 96 emoji each")
    parser.add_argument("--seed", type=int, default=0, help="of training")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the results go")
    parser.add_argument("--docs", action="store_true", help="put the table into docs/results.md")
    given = parser.parse_args()
    before = machine()
    known, held = split(families(read_emoji(given.data)))
    started = time.perf_counter()
    encoder = train(known, steps=given.steps, seed=given.seed)
    seconds = time.perf_counter() - started
    names = [one.name for one in known]
    systems = {
        "towers": lambda emoji: by_towers(encoder, emoji),
        "pixels": by_pixels,
        "pixels + trigram TF-IDF": PixelsAndNames(known, trigram_tf_idf(names)).scores,
        "pixels + BM25": PixelsAndNames(known, bm25(names)).scores,
    }
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
