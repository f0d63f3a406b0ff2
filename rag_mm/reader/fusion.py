"""The readers there are, by the name of their fusion (``reader.fusion``).

A public one's module imports transformers, which takes seconds in each process, so it is imported where one is asked
for.
"""

from __future__ import annotations

from pipeline import BlockProgram
from rag_mm.objectives import ObjectivesConfig
from rag_mm.reader.config import ReaderConfig
from rag_mm.reader.fid import fid_answering, fid_program
from rag_mm.reader.head import LossHead, NextToken
from rag_mm.reader.prepend import PrependHead, prepend_answering, prepend_program


def reader_program(
    config: ReaderConfig, objective: ObjectivesConfig, *, vocabulary: int, image_size: int
) -> BlockProgram:
    """The reader with fresh weights from torch's generator, or a public one's (`reader.kind`).

    Batch inputs: see `fid_program`, and `public_program`.
    """
    if config.kind == "transformers":
        from rag_mm.reader.public import public_program

        return public_program(config, objective)
    make = {"fid": fid_program, "prepend": prepend_program}[config.fusion]
    return make(config, objective, vocabulary=vocabulary, image_size=image_size)


def answering_program(program: BlockProgram) -> BlockProgram:
    """The reader as it answers: the same blocks and parameters, ``logits`` (B, T, V) of ``answer_in`` (B, T) out.

    Its other batch inputs are ``Collator.context``'s tensors and ``query_embedding`` (B, E), ``document_embedding``
    (P, E); a public one reads no embeddings, and ``answer_mask``. Every block that looks at other answer tokens has
    ``extend`` (`pipeline.generate`).
    """
    last = program.blocks[-1].module
    if isinstance(last, NextToken):
        return program
    if isinstance(last, PrependHead):
        return prepend_answering(program)
    if isinstance(last, LossHead):
        return fid_answering(program)
    from rag_mm.reader.public import ObjectiveHead

    return last.answering().eval() if isinstance(last, ObjectiveHead) else program
