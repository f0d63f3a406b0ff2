"""Retriever, reader and collator of a configuration, with fresh weights that only the seed decides or with none yet."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from data.dataset import Dataset
from pipeline import BlockProgram
from pipeline.keyed import seed_of
from rag_mm.batch import Collator
from rag_mm.config import Config
from rag_mm.prompt import PromptCollator
from rag_mm.reader.fusion import reader_program
from retriever.build import fresh_encoder
from retriever.encoder import DualEncoder


@dataclass(frozen=True)
class Model:
    """What is trained, and what turns samples into its inputs."""

    encoder: DualEncoder
    reader: BlockProgram
    collator: Collator


def build_model(config: Config, dataset: Dataset) -> Model:
    """Build everything from the seed; the trigram gates start at the idf of titles and training questions.

    The documents' own side of ``index.refresh: query_side`` is not trained and not used yet: it follows the questions'
    until the first index is made.
    """
    encoder = fresh_encoder(
        config.encoder, dataset, image_size=config.data.image_size, seed=config.train.seed,
        image_transform=config.data.image_transform,
    )  # fmt: skip
    if config.documents_follow:
        encoder.documents_follow = True
        encoder.freeze("document")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of("reader", config.train.seed) % 2**63)
        reader = _reader(config, dataset)
    return Model(encoder, reader, _collator(config, dataset))


def empty_model(config: Config, dataset: Dataset) -> Model:
    """The same modules as meta tensors, without memory, for weights that come from a checkpoint."""
    encoder = DualEncoder.empty(
        config.encoder, image_size=config.data.image_size, image_transform=config.data.image_transform
    )
    with torch.device("meta"):
        reader = _reader(config, dataset)
    return Model(encoder, reader, _collator(config, dataset))


def weights(model: Model) -> dict[str, Tensor]:
    """All weights under the names they have in checkpoints; writing to them changes the model."""
    reader = {f"reader.{name}": p.detach() for name, p in model.reader.named_parameters_global().items()}
    return reader | {f"retriever.{name}": tensor for name, tensor in model.encoder.state_dict().items()}


def _reader(config: Config, dataset: Dataset) -> BlockProgram:
    return reader_program(
        config.reader,
        config.objectives,
        vocabulary=0 if config.reader.kind == "transformers" else len(dataset.tokenizer),
        image_size=config.data.image_size,
    )


def _collator(config: Config, dataset: Dataset) -> Collator:
    if config.reader.kind == "transformers":
        from rag_mm.reader.public import public_tokenizer  # imports transformers, which takes seconds

        return PromptCollator(public_tokenizer(config.reader), config.data, config.reader)
    patches = (config.data.image_size // config.reader.patch) ** 2
    return Collator(dataset.tokenizer, config.data, num_patches=patches)
