"""Everything a run can be told, as frozen dataclasses; one section a package or concern."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from data.config import DataConfig
from pipeline.config import ParallelConfig
from rag_mm.evaluate.decoding import DecodingConfig
from rag_mm.objectives import ObjectivesConfig
from rag_mm.reader.config import ReaderConfig
from retriever.config import IndexConfig, RetrieverConfig, encoder_config


@dataclass(frozen=True)
class TrainConfig:
    """The course of training.

    Attributes:
        steps: steps in all, those of the retriever alone included; rates decay to zero over them.
        retriever_share: share of the steps, the first ones, in which only the contrastive objective runs and no
            reader.
        batch_size: questions in a global batch.
        retriever_batch_size: questions in a global batch while the retriever trains alone.
        pair_batch_size: image-text pairs in a global batch, for the contrastive objective.
        pairs: which pairs are used: all of the training split, or only those of documents that no question
            asks about (what one has who knows answers but not documents).
        documents: what the reader reads: what is retrieved, the labelled document, or none (closed book).
        learning_rate: peak rate of the reader.
        retriever_learning_rate: peak rate of the retriever.
        joint_retriever_scale: factor on the retriever's rate once the reader trains; 0 freezes it.
        retriever_frozen_first: share of the reader's steps, the first ones, in which the retriever stays as it is.
        retriever_frozen_last: share of the reader's steps, the last ones, in which the retriever stays as it is: the
            index is made anew once when they begin and is then exact.
        warmup_steps: steps over which the reader's rate rises from 0, counted from where it starts.
        retriever_warmup_steps: steps over which the retriever's rate rises from 0, counted from where it starts.
        weight_decay: of the reader's matrices; its vectors and scalars, and the retriever, have none.
        clip_norm: largest global gradient norm over stages, replicas and towers.
        distill_share: share of the reader's steps, the first ones, in which pdist, adist, loop and emdr2 do not count
            yet: a reader that cannot read finds all documents equally good, and would teach the retriever so.
        rename: share of facts consistently renamed in each step, so that the reader learns to read; the rest
            keep it used to what real facts look like (a nationality resembles its country's name).
        augment: strength of colour and shape changes of pictures (0: none).
        spike_sigma: a step whose loss or gradient norm is this many standard deviations above the mean of the last
            ``spike_window`` steps is not taken; 0: only what is not finite is not taken.
        spike_window: steps that mean and deviation are of.
        max_bad_steps: training stops after this many steps in a row that were not taken.
        dev_questions: questions of the dev split, evenly taken, on which hit@k is measured when the index is made anew,
            and every ``index.refresh_every_n_steps`` steps where it is not (dev_hit_at_k in metrics.jsonl); 0: none.
        seed: of everything random.
        threads: compute threads of each process.
    """

    steps: int = 900
    retriever_share: float = 0.45
    batch_size: int = 32
    retriever_batch_size: int = 64
    pair_batch_size: int = 96
    pairs: Literal["all", "unasked"] = "all"
    documents: Literal["retrieved", "gold", "none"] = "retrieved"
    learning_rate: float = 3e-3
    retriever_learning_rate: float = 2e-3
    joint_retriever_scale: float = 1.0
    distill_share: float = 0.3
    retriever_frozen_first: float = 0.0
    retriever_frozen_last: float = 0.0
    warmup_steps: int = 30
    retriever_warmup_steps: int = 30
    weight_decay: float = 0.05
    clip_norm: float = 1.0
    rename: float = 0.9
    augment: float = 1.0
    spike_sigma: float = 0.0
    spike_window: int = 128
    max_bad_steps: int = 20
    dev_questions: int = 100
    seed: int = 0
    threads: int = 1

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "retriever_batch_size", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"train.{name} is {getattr(self, name)}; it must be at least 1")
        for name in (
            "pair_batch_size", "learning_rate", "retriever_learning_rate", "joint_retriever_scale",
            "warmup_steps", "retriever_warmup_steps", "weight_decay", "dev_questions", "augment", "seed", "spike_sigma",
        ):  # fmt: skip
            if getattr(self, name) < 0:
                raise ValueError(f"train.{name} is {getattr(self, name)}; it must be 0 or more")
        shares = ("rename", "distill_share", "retriever_share", "retriever_frozen_first", "retriever_frozen_last")
        for name in shares:
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"train.{name} is {getattr(self, name)}; it must be between 0 and 1")
        if self.retriever_frozen_first + self.retriever_frozen_last > 1:
            raise ValueError(
                f"train.retriever_frozen_first is {self.retriever_frozen_first} and train.retriever_frozen_last "
                f"{self.retriever_frozen_last}; they are shares of the same steps and must add up to at most 1 (to "
                "freeze the retriever in all of them: train.joint_retriever_scale 0)"
            )
        if self.max_bad_steps < 1:
            raise ValueError(f"train.max_bad_steps is {self.max_bad_steps}; it must be at least 1")
        if self.spike_window < 2:
            raise ValueError(f"train.spike_window is {self.spike_window}; it must be at least 2")
        if self.clip_norm <= 0:
            raise ValueError(f"train.clip_norm is {self.clip_norm}; it must be above 0")

    @property
    def retriever_steps(self) -> int:
        """Steps before the reader joins; it joins for the last step at least, unless the share is 1."""
        steps = round(self.retriever_share * self.steps)
        return min(steps, self.steps - 1) if self.retriever_share < 1 else self.steps

    @property
    def retriever_moves(self) -> tuple[int, int]:
        """The first of the reader's steps in which the retriever may move as well, and the first after those."""
        joint = self.steps - self.retriever_steps
        first, last = round(self.retriever_frozen_first * joint), round(self.retriever_frozen_last * joint)
        return self.retriever_steps + first, self.steps - last

    @property
    def distill_after(self) -> int:
        """Steps of the reader before pdist, adist, loop and emdr2 count."""
        return round(self.distill_share * (self.steps - self.retriever_steps))


@dataclass(frozen=True)
class CheckpointConfig:
    """When the state of training is written, and how much of it is kept.

    Attributes:
        every_n_steps: steps between checkpoints; 0: only at the end.
        keep: newest good checkpoints kept (good: losses and weights were finite); the newest of all is kept as well.
        keep_every_n_steps: good checkpoints at multiples of this are kept for good; 0: none.
        best_by: the good checkpoint with the best mean of this metric since the one before is kept too.
        limit_s: longest wait for the checkpoint of an interrupted run (seconds); less than the notice one is given.
        visible_s: longest wait, on starting again, for files that are there and that this machine does not see yet
            (seconds; a client of NFS may go 60 without looking).
    """

    every_n_steps: int = 100
    keep: int = 2
    keep_every_n_steps: int = 0
    best_by: Literal["", "loss", "hit_at_k", "token_accuracy"] = ""
    limit_s: float = 90.0
    visible_s: float = 90.0

    def __post_init__(self) -> None:
        if self.every_n_steps < 0:
            raise ValueError(f"checkpoint.every_n_steps is {self.every_n_steps}; it must be 0 or more")
        if self.keep < 1:
            raise ValueError(f"checkpoint.keep is {self.keep}; it must be at least 1")
        if self.limit_s <= 0:
            raise ValueError(f"checkpoint.limit_s is {self.limit_s}; it must be above 0")
        if self.visible_s < 0:
            raise ValueError(f"checkpoint.visible_s is {self.visible_s}; it must be 0 or more")
        if self.keep_every_n_steps < 0:
            raise ValueError(f"checkpoint.keep_every_n_steps is {self.keep_every_n_steps}; it must be 0 or more")


@dataclass(frozen=True)
class Config:
    """A run.

    Attributes:
        run_dir: where everything the run writes goes; started again on the same folder, it resumes.
        data: the data set.
        retriever: the dual encoder.
        index: the index over the memory.
        reader: the fused vision-language transformer.
        objectives: what is minimised.
        train: the course of training.
        parallel: the layout over ranks.
        checkpoint: when state is written.
        evaluate: how evaluation decodes answers.
    """

    run_dir: str = "runs/default"
    data: DataConfig = field(default_factory=DataConfig)
    retriever: RetrieverConfig = field(default_factory=RetrieverConfig)
    index: IndexConfig = field(default_factory=IndexConfig)
    reader: ReaderConfig = field(default_factory=ReaderConfig)
    objectives: ObjectivesConfig = field(default_factory=ObjectivesConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluate: DecodingConfig = field(default_factory=DecodingConfig)

    def __post_init__(self) -> None:
        train, parallel = self.train, self.parallel
        if self.data.image_size % self.reader.patch:
            raise ValueError(
                f"reader.patch is {self.reader.patch}; it must divide data.image_size ({self.data.image_size})"
            )
        pieces = parallel.data_replicas * parallel.num_microbatches
        if train.batch_size % pieces:
            raise ValueError(
                f"train.batch_size is {train.batch_size}; it must be a multiple of parallel.data_replicas x "
                f"parallel.num_microbatches ({parallel.data_replicas} x {parallel.num_microbatches})"
            )
        if self.reader.kind == "transformers" and parallel.verify == "shrunk":
            raise ValueError(
                "parallel.verify is 'shrunk', but reader.kind is 'transformers', whose model cannot be made smaller "
                "here; use staged, or full where the whole model fits on one device"
            )
        moves = train.joint_retriever_scale > 0 and train.documents != "none"
        if parallel.schedule == "zero_bubble" and parallel.pipeline_stages > 1 and moves:
            raise ValueError(
                "parallel.schedule is 'zero_bubble', which would lose the gradients that the reader's head gives the "
                "retriever's embeddings; use interleaved or 1f1b (or train.joint_retriever_scale 0)"
            )
        if train.retriever_steps and self.objectives.contrastive == 0:
            raise ValueError(
                f"train.retriever_share is {train.retriever_share}, but objectives.contrastive is 0, so those "
                "steps would learn nothing; set one of the two"
            )
        if not self.objectives.trains_reader and train.steps > train.retriever_steps:
            raise ValueError(
                "objectives.generation is 0; it (or rag_sequence, or rag_token) must be above 0 once the reader trains"
            )
        mined, refresh = self.objectives.contrastive_mined_negatives, self.index.refresh
        if mined and train.retriever_steps and refresh in ("none", "query_side"):
            raise ValueError(
                f"objectives.contrastive_mined_negatives is {mined}, but with index.refresh {refresh!r} the index of "
                "the untrained retriever would stay; use another mode, or train.retriever_share 0"
            )
        if self.objectives.adist > 0 and self.reader.fusion != "fid":
            raise ValueError(
                f"objectives.adist is {self.objectives.adist}, but with reader.fusion {self.reader.fusion!r} no "
                "decoder attends to encoded documents; use reader.fusion fid, or pdist or loop in place of adist"
            )
        if self.objectives.loop > 0 and (train.documents != "retrieved" or self.retriever.k < 2):
            raise ValueError(
                f"objectives.loop is {self.objectives.loop}, which leaves out one of several documents; it needs "
                f"train.documents retrieved (it is {train.documents}) and retriever.k of 2 or more (it is "
                f"{self.retriever.k})"
            )
        if self.objectives.contrastive and self.objectives.contrastive_on != "questions" and not train.pair_batch_size:
            raise ValueError("train.pair_batch_size is 0, but objectives.contrastive_on asks for pairs")

    @property
    def encoder(self) -> RetrieverConfig:
        """What the dual encoder is made of."""
        return encoder_config(self.retriever, self.index)

    @property
    def documents_follow(self) -> bool:
        """Whether documents are embedded as questions are until the reader joins, and stand still from then on."""
        return self.index.refresh == "query_side" and self.retriever.towers == "shared"
