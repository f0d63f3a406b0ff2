"""The readers there are, by the name of their fusion (``reader.fusion``)."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pipeline import BlockProgram
from rag_mm.objectives import ObjectivesConfig
from rag_mm.reader.config import ReaderConfig
from rag_mm.reader.fid import FidDecoding, fid_program
from rag_mm.reader.prepend import PrependDecoding, PrependHead, prepend_program


class Decoding(Protocol):
    """A batch's context, read once; asked for one token after another."""

    def following(self, answer_BT: Tensor) -> Tensor:
        """Distribution of the token after the answer so far (B, V)."""
        ...


def reader_program(
    config: ReaderConfig, objective: ObjectivesConfig, *, vocabulary: int, image_size: int
) -> BlockProgram:
    """The reader with fresh weights from torch's generator; see `fid_program` for its batch inputs."""
    make = {"fid": fid_program, "prepend": prepend_program}[config.fusion]
    return make(config, objective, vocabulary=vocabulary, image_size=image_size)


def decoding(program: BlockProgram, context: dict[str, Tensor]) -> Decoding:
    """Read a batch's context with either reader.

    Args:
        context: ``Collator.context``'s tensors and ``query_embedding`` (B, E), ``document_embedding`` (P, E).
    """
    prepends = isinstance(program.blocks[-1].module, PrependHead)
    return PrependDecoding(program, context) if prepends else FidDecoding(program, context)
