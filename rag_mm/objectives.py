"""What is minimised: which objectives, with which weights, scales and temperatures, and what each of them moves.

The formulas are in `rag_mm.losses`, a table of all of them and when to use which in docs/objectives.md. Every
objective that looks at retriever scores owns its scale and temperatures: none is shared with another, nor with the
learned scale of the contrastive objective.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

# Those computed in the reader, in the order of the columns of its ``losses``.
READER_OBJECTIVES = (
    "generation", "pdist", "emdr2", "rag_sequence", "rag_token", "emdr2_token", "adist", "loop",
)  # fmt: skip
# Kullback-Leibler divergences from what the reader says of documents; they have a target temperature.
DISTILLED = ("pdist", "adist", "loop")
# They teach the retriever what the reader found useful and move nothing else (`TrainConfig.distill_share`).
TEACH_RETRIEVER = (*DISTILLED, "emdr2", "emdr2_token")
# The reader's streams of single documents: without graph and dropout, and with both.
ALONE, MARGINAL = "alone", "marginal"
# Further streams without graph and dropout: all documents but one, a copy of the fused one, and what that attends to.
WITHOUT, PROBE, ATTENTION = "without", "probe", "attention"

Scale = Literal["plain", "sqrt_width"]
Trains = Literal["both", "reader"]


@dataclass(frozen=True)
class ObjectivesConfig:
    """Weights of the objectives (0: off), their score scales, temperatures and gradients.

    In each of them a score is the inner product of a question's and a document's embedding, as it is ("plain") or
    divided by the square root of the embedding's width ("sqrt_width"), and is then divided by the score temperature.

    Attributes:
        generation: cross entropy of the answer tokens; denominator: global target tokens.
        generation_trains: what its gradient reaches where reader.score_prior shows it the scores: reader and retriever
            (both), or the reader alone.
        pdist: KL from document likelihoods to retriever scores (Atlas); denominator: global samples.
        pdist_score_scale: of the scores in pdist.
        pdist_score_temperature: divides the scores in pdist.
        pdist_target_temperature: divides the mean token log-likelihoods in pdist.
        emdr2: marginal likelihood of documents taken alone (EMDR2, per sequence); denominator: global samples.
        emdr2_score_scale: of the scores in emdr2.
        emdr2_score_temperature: divides the scores in emdr2.
        emdr2_token: the same marginal for every token by itself; denominator: global target tokens.
        emdr2_token_score_scale: of the scores in emdr2_token.
        emdr2_token_score_temperature: divides the scores in emdr2_token.
        adist: KL from the reader's attention to documents to retriever scores; denominator: global samples. Needs a
            decoder that attends to encoded documents (reader.fusion fid) and costs one more pass of it over all
            documents, of the first token only for logits.
        adist_from: mean logit of the first answer token before the softmax (FiD-KD), or attention weights times
            lengths of values of all answer tokens (Atlas).
        adist_score_scale: of the scores in adist.
        adist_score_temperature: divides the scores in adist.
        adist_target_temperature: divides the attention in adist.
        loop: KL from how unlikely the answer is without each document to retriever scores (Atlas); denominator: global
            samples. Costs k passes of the decoder over k - 1 documents, of the whole stack with reader.fusion prepend.
        loop_score_scale: of the scores in loop.
        loop_score_temperature: divides the scores in loop.
        loop_target_temperature: divides the mean token log-likelihoods in loop.
        rag_sequence: marginal likelihood of whole answers over documents taken alone, which trains the reader too
            (RAG-Sequence); denominator: global samples. rag_sequence and rag_token read a stream of single documents
            with graph and dropout, which costs about what the fused stream costs for each document; pdist and emdr2
            read one without either. Where both kinds are asked for, both streams run.
        rag_sequence_score_scale: of the scores in rag_sequence.
        rag_sequence_score_temperature: divides the scores in rag_sequence.
        rag_sequence_trains: what its gradient reaches: reader and retriever (both), or the reader alone.
        rag_token: the same marginal for every token by itself (RAG-Token); denominator: global target tokens.
        rag_token_score_scale: of the scores in rag_token.
        rag_token_score_temperature: divides the scores in rag_token.
        rag_token_trains: what its gradient reaches, as of rag_sequence.
        contrastive: InfoNCE of queries against the unique documents of the global batch, those that the reader reads
            and those that join for this (below); denominator: queries that have a positive. Its scale is the
            retriever's learned one.
        contrastive_on: which labels it sees: image-text pairs, question-document labels, or both.
        contrastive_positives: right documents of a query that join the batch, drawn anew in each step; whatever else
            of them is there counts as right too, and so does a document of the same contents.
        contrastive_several: several right documents count as one event (any), or each has to beat the wrong ones
            (each).
        contrastive_hard_negatives: documents that the data names as misleading for a query that join the batch, drawn
            anew in each step.
        contrastive_mined_negatives: wrong documents of a query that join the batch, found by the index as of its last
            refresh and drawn anew in each step; neither right ones nor those of the same contents. The index is then
            kept from the first step on.
        contrastive_mined_depth: they are drawn among so many of the best wrong ones.
    """

    generation: float = 1.0
    generation_trains: Trains = "both"
    pdist: float = 0.5
    pdist_score_scale: Scale = "plain"
    pdist_score_temperature: float = 0.1
    pdist_target_temperature: float = 0.5
    emdr2: float = 0.0
    emdr2_score_scale: Scale = "plain"
    emdr2_score_temperature: float = 0.1
    emdr2_token: float = 0.0
    emdr2_token_score_scale: Scale = "plain"
    emdr2_token_score_temperature: float = 0.1
    adist: float = 0.0
    adist_from: Literal["logits", "values"] = "logits"
    adist_score_scale: Scale = "plain"
    adist_score_temperature: float = 0.1
    adist_target_temperature: float = 0.1
    loop: float = 0.0
    loop_score_scale: Scale = "plain"
    loop_score_temperature: float = 0.1
    loop_target_temperature: float = 0.5
    rag_sequence: float = 0.0
    rag_sequence_score_scale: Scale = "plain"
    rag_sequence_score_temperature: float = 1.0
    rag_sequence_trains: Trains = "both"
    rag_token: float = 0.0
    rag_token_score_scale: Scale = "plain"
    rag_token_score_temperature: float = 1.0
    rag_token_trains: Trains = "both"
    contrastive: float = 1.0
    contrastive_on: Literal["pairs", "questions", "both"] = "both"
    contrastive_positives: int = 1
    contrastive_several: Literal["any", "each"] = "any"
    contrastive_hard_negatives: int = 1
    contrastive_mined_negatives: int = 0
    contrastive_mined_depth: int = 30

    def __post_init__(self) -> None:
        for name in (*READER_OBJECTIVES, "contrastive"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"objectives.{name} is {getattr(self, name)}; it must be 0 (off) or more")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_temperature") and not value > 0:
                raise ValueError(f"objectives.{field.name} is {value}; it must be above 0")
        for name, least in (
            ("positives", 1), ("hard_negatives", 0), ("mined_negatives", 0),
            ("mined_depth", max(1, self.contrastive_mined_negatives)),
        ):  # fmt: skip
            value = getattr(self, f"contrastive_{name}")
            if value < least:
                raise ValueError(f"objectives.contrastive_{name} is {value}; it must be at least {least}")

    @property
    def reader_names(self) -> tuple[str, ...]:
        """Objectives computed in the reader, in the order of the columns of its ``losses``."""
        return tuple(name for name in READER_OBJECTIVES if getattr(self, name) > 0)

    @property
    def score_names(self) -> tuple[str, ...]:
        """Those of them that look at retriever scores, each at its own scale and temperature."""
        return tuple(name for name in self.reader_names if name != "generation")

    @property
    def trains_reader(self) -> bool:
        """Whether an objective moves the reader's weights."""
        return self.generation > 0 or self.marginal

    @property
    def streams(self) -> tuple[str, ...]:
        """In which ways the reader answers from each document alone as well, of `ALONE` and `MARGINAL`."""
        alone = (ALONE,) if self.pdist > 0 or self.emdr2 > 0 or self.emdr2_token > 0 else ()
        return (*alone, MARGINAL) if self.marginal else alone

    @property
    def trained_streams(self) -> tuple[bool, ...]:
        """For each of ``streams``, whether it has a graph and dropout."""
        return tuple(name == MARGINAL for name in self.streams)

    @property
    def marginal(self) -> bool:
        """Whether gradients reach the reader through what it says of single documents."""
        return self.rag_sequence > 0 or self.rag_token > 0

    def scale(self, name: str, width: int) -> float:
        """What the inner products of embeddings of this width are multiplied by in an objective."""
        return 1.0 if getattr(self, f"{name}_score_scale") == "plain" else width**-0.5

    def score_temperature(self, name: str) -> float:
        """What the scores of an objective are divided by."""
        temperature: float = getattr(self, f"{name}_score_temperature")
        return temperature

    def target_temperature(self, name: str) -> float:
        """What the target of one of `DISTILLED` is divided by."""
        temperature: float = getattr(self, f"{name}_target_temperature")
        return temperature
