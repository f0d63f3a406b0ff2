"""What the retriever can be told: its towers, and how its index is built and kept up."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from typing import Literal

NO_TOWER = "none"
TEXT_KINDS = ("trigrams", "transformers", "open_clip", NO_TOWER)
IMAGE_KINDS = ("small", "timm", "open_clip", NO_TOWER)
WITH_MODEL = ("transformers", "timm", "open_clip")
FACTORIES = r"Flat|HNSW\d+,(Flat|SQfp16)|((OPQ\d+(_\d+)?|PCAR?\d+),)?IVF\d+(_HNSW\d+)?,(Flat|SQfp16|SQ8|PQ\d+(x\d+)?)"
Frozen = Literal["none", "query", "document", "text", "image", "all"]


@dataclass(frozen=True)
class RetrieverConfig:
    """The dual encoder.

    Attributes:
        k: documents that every question reads.
        rerank: documents that the index proposes for a question in training; they are embedded anew with the current
            weights and the best k of them are read (0: the index's own best k).
        hybrid: what evaluation adds to what the embeddings find: nothing (none), or what BM25 finds by the words of the
            question, fused by ranks (reciprocal_rank) or by scores (weighted_sum). Training searches by embeddings
            alone, since BM25 has no gradient.
        hybrid_weight: of BM25 in the fusion (0 to 1); the embeddings have the rest.
        hybrid_depth: documents of either that are fused.
        text: kind of text tower: trigrams (from scratch), transformers (a local folder), open_clip, none, or
            package.module:Class.
        image: kind of picture tower: small (from scratch), timm, open_clip, none, or package.module:Class.
        text_model: what the text tower is: for transformers a local folder (save_pretrained makes one), for open_clip a
            model's name or a JSON file in open_clip's format.
        text_checkpoint: file with weights for an open_clip text tower; empty: random weights.
        text_pooling: how a transformers text tower makes one vector of its tokens': their mean, or the first one (cls).
        text_normalize: whether that vector gets length 1.
        text_max_tokens: longer texts are truncated, counted and reported (tokens of a transformers text tower, special
            ones included; open_clip's models have a length of their own).
        image_model: what the picture tower is: a name of timm's, or as for an open_clip text tower, or MODEL:TAG, which
            takes mean and deviation (not weights) of that pretrained model.
        image_checkpoint: file with weights for a timm or open_clip picture tower; empty: random weights.
        image_side: side that a timm or open_clip tower resizes pictures to (pixels); 0: data.image_size, as they are.
        fusion: how a row's text and picture become one embedding: side by side, so that text is compared with text and
            pictures with pictures (blocks); averaged in one space, where a text finds a picture (mean); or that plus a
            small network that sees what is missing (learned).
        shared_dim: width of the one space of mean and learned, which a linear map brings each part to; 0: parts must
            have one width, and are taken as they are.
        towers: whether questions and documents share their towers, or have separate ones that start equal.
        freeze: what is not trained: nothing, all, the text or picture towers, or (separate towers only) a side.
        query_prefix: text put before every question, as some public models want it ("query: ").
        document_prefix: text put before every document's.
        text_buckets: hash buckets of the character trigrams.
        text_dim: width of the trigram tower's vectors; the noise of its scores falls with the root of it.
        image_dim: width of the vectors of a small or timm picture tower (a new linear map brings timm's to it, unless
            they have it).
        image_width: channels of the picture tower's convolutions.
        image_patch: side of its patches (pixels); must divide data.image_size.
        learned_gates: let training move the weights that trigrams start with (their idf).
        learned_text: let training move the trigram vectors (random, near-orthogonal, at the start).
    """

    k: int = 2
    rerank: int = 0
    hybrid: Literal["none", "reciprocal_rank", "weighted_sum"] = "none"
    hybrid_weight: float = 0.5
    hybrid_depth: int = 50
    text: str = "trigrams"
    image: str = "small"
    text_model: str = ""
    text_checkpoint: str = ""
    text_pooling: Literal["mean", "cls"] = "mean"
    text_normalize: bool = True
    text_max_tokens: int = 256
    image_model: str = ""
    image_checkpoint: str = ""
    image_side: int = 0
    fusion: Literal["blocks", "mean", "learned"] = "blocks"
    shared_dim: int = 0
    towers: Literal["shared", "separate"] = "shared"
    freeze: Frozen = "none"
    query_prefix: str = ""
    document_prefix: str = ""
    text_buckets: int = 4096
    text_dim: int = 1024
    image_dim: int = 128
    image_width: int = 48
    image_patch: int = 4
    learned_gates: bool = True
    learned_text: bool = False

    def __post_init__(self) -> None:
        for name in ("k", "text_buckets", "text_dim", "image_dim", "image_width", "image_patch"):
            if getattr(self, name) < 1:
                raise ValueError(f"retriever.{name} is {getattr(self, name)}; it must be at least 1")
        self._check_kinds()
        if not 0 <= self.hybrid_weight <= 1:
            raise ValueError(f"retriever.hybrid_weight is {self.hybrid_weight}; it must be from 0 to 1")
        if self.hybrid != "none" and self.hybrid_depth < self.k:
            raise ValueError(
                f"retriever.hybrid_depth is {self.hybrid_depth}; it must be at least retriever.k ({self.k})"
            )
        if self.text_max_tokens < 3:
            raise ValueError(f"retriever.text_max_tokens is {self.text_max_tokens}; it must be at least 3")
        if self.image_side < 0:
            raise ValueError(f"retriever.image_side is {self.image_side}; it must be 0 or more")
        if self.rerank and self.rerank < self.k:
            raise ValueError(
                f"retriever.rerank is {self.rerank}, but retriever.k is {self.k}; propose at least as many documents "
                "as are read, or 0 to read the index's own best"
            )
        if self.shared_dim < 0:
            raise ValueError(f"retriever.shared_dim is {self.shared_dim}; it must be 0 or more")
        if self.shared_dim and self.fusion == "blocks":
            raise ValueError(
                f"retriever.shared_dim is {self.shared_dim}, but retriever.fusion is 'blocks', which has no one space; "
                "use mean or learned, or leave it at 0"
            )
        if self.text == self.image == NO_TOWER:
            raise ValueError("retriever.text and retriever.image are both 'none'; at least one of them must be a tower")
        if self.freeze in ("query", "document") and self.towers == "shared":
            raise ValueError(
                f"retriever.freeze is {self.freeze!r}, but retriever.towers is 'shared'; use separate towers, or "
                "freeze text, image or all"
            )

    def _check_kinds(self) -> None:
        """A kind exists, has the model that it needs, and no checkpoint that it would not read."""
        for part, known in (("text", TEXT_KINDS), ("image", IMAGE_KINDS)):
            kind, model, checkpoint = (getattr(self, f"{part}{end}") for end in ("", "_model", "_checkpoint"))
            if ":" not in kind and kind not in known:
                near = difflib.get_close_matches(kind, known, n=1)
                hint = f"did you mean {near[0]}? " if near else ""
                raise ValueError(
                    f"retriever.{part} is {kind!r}; {hint}allowed: {', '.join(known)}, or package.module:Class"
                )
            if kind in WITH_MODEL and not model:
                raise ValueError(
                    f"retriever.{part} is {kind!r}, but retriever.{part}_model is empty; it must be "
                    + ("a local folder" if kind == "transformers" else "the name of a model")
                )
            own = ":" in kind  # may read what it likes
            if model and kind not in WITH_MODEL and not own:
                raise ValueError(
                    f"retriever.{part}_model is {model!r}, but retriever.{part} is {kind!r}, which has none"
                )
            if checkpoint and kind not in ("timm", "open_clip") and not own:
                raise ValueError(
                    f"retriever.{part}_checkpoint is {checkpoint!r}, but retriever.{part} is {kind!r}, which reads none"
                )


@dataclass(frozen=True)
class IndexConfig:
    """The index over the document store.

    Attributes:
        dir: index folder that ``python -m retriever.build`` writes; training keeps its own in the run folder.
        checkpoint: training checkpoint whose retriever embeds the documents; empty: the untrained one.
        batch_size: documents embedded at once.
        refresh: how the index follows the training of the documents' tower: never (none: it is made once, when the
            reader joins, and ages), by freezing that tower from then on (query_side: it cannot age; shared towers are
            copied first), by embedding the whole memory anew between two steps (every_n_steps), or in a process beside
            them (async).
        refresh_every_n_steps: steps between two refreshes of every_n_steps (0: never) and async.
        refresh_lag: steps that an async refresh has to finish; at most refresh_every_n_steps.
        adopt: search an async refresh exactly refresh_lag steps after it began, waiting where it is late, so that a
            run repeats bit for bit (exact), or as soon as it is done, whenever that is (when_ready).
        sharded: let each rank of training hold a part of the index and search it, for memories that are too large for
            the first rank alone; what is found is the same.
        keep_versions: published versions kept besides those that a checkpoint names.
        device: where evaluation searches: cpu, gpu (refused where faiss cannot), or auto (gpu where faiss can, and
            said where there is one that it cannot use). Scores of a GPU are rounded in another way. The index of
            training, in step with checkpoints, stays on the CPU.
        factory: kind of the index that the build job makes, as a faiss factory string (Flat, "HNSW32,Flat",
            "IVF4096,SQfp16", "OPQ64,IVF65536_HNSW32,PQ64", ...); auto: by the number of documents.
        train_factory: the same of the index that training makes in memory and searches: Flat is exact, and quick
            enough for some hundred thousand documents.
        recall: share of the exact ten best that a search must find (0 to 1); how hard it must search for
            that is measured when the index is made.
        recall_queries: questions of training that this is tuned and measured with, half of them each.
        shard_size: documents whose embeddings are one file, which a killed build job does not make again.
        max_overhead: share of deleted and later added documents beyond which the build job compacts an index that
            cannot change in place (0 to 1).
    """

    dir: str = "runs/index"
    checkpoint: str = ""
    batch_size: int = 256
    refresh: Literal["none", "query_side", "every_n_steps", "async"] = "every_n_steps"
    refresh_every_n_steps: int = 100
    refresh_lag: int = 20
    adopt: Literal["exact", "when_ready"] = "exact"
    sharded: bool = False
    keep_versions: int = 2
    device: Literal["auto", "cpu", "gpu"] = "cpu"
    factory: str = "auto"
    train_factory: str = "Flat"
    recall: float = 0.95
    recall_queries: int = 256
    shard_size: int = 65536
    max_overhead: float = 0.2

    def __post_init__(self) -> None:
        for name in ("factory", "train_factory"):
            value = getattr(self, name)
            if value != "auto" and not re.fullmatch(FACTORIES, value):
                raise ValueError(
                    f"index.{name} is {value!r}; allowed are auto, Flat, HNSWn,Flat, and lists: an optional OPQn or "
                    "PCAn, then IVFn or IVFn_HNSWn, then Flat, SQfp16, SQ8 or PQn (such as OPQ64,IVF65536_HNSW32,PQ64)"
                )
        for name in ("recall", "max_overhead"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"index.{name} is {getattr(self, name)}; it must be from 0 to 1")
        if self.recall_queries < 2:
            raise ValueError(f"index.recall_queries is {self.recall_queries}; it must be at least 2")
        if self.shard_size < 1:
            raise ValueError(f"index.shard_size is {self.shard_size}; it must be at least 1")
        if self.batch_size < 1:
            raise ValueError(f"index.batch_size is {self.batch_size}; it must be at least 1")
        if self.refresh_every_n_steps < 0:
            raise ValueError(f"index.refresh_every_n_steps is {self.refresh_every_n_steps}; 0 (never) or more")
        if self.refresh == "async" and not self.refresh_every_n_steps:
            raise ValueError(
                "index.refresh_every_n_steps is 0, but index.refresh is 'async'; say how often, or set it to 'none'"
            )
        in_time = 1 <= self.refresh_lag <= self.refresh_every_n_steps
        if self.refresh == "async" and self.adopt == "exact" and not in_time:
            raise ValueError(
                f"index.refresh_lag is {self.refresh_lag}; it must be between 1 and index.refresh_every_n_steps "
                f"({self.refresh_every_n_steps}), since one refresh runs at a time"
            )
        if self.keep_versions < 1:
            raise ValueError(f"index.keep_versions is {self.keep_versions}; it must be at least 1")


def encoder_config(retriever: RetrieverConfig, index: IndexConfig) -> RetrieverConfig:
    """What the dual encoder is made of: the documents of ``index.refresh: query_side`` have a side of their own."""
    return replace(retriever, towers="separate") if index.refresh == "query_side" else retriever
