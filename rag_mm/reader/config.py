"""What the reader (the fused vision-language transformer) can be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ReaderConfig:
    """A reader with a pointer head, from scratch.

    Attributes:
        fusion: how a question's documents come together: each is encoded with the question, and the decoder attends
            to all of them (fid), or one causal decoder reads documents, question and answer in a row (prepend).
        width: model width.
        heads: attention heads; must divide width into even parts.
        encoder_layers: layers over each (question, document) pair; prepend's one stack has them as well.
        decoder_layers: layers over the answer, attending to all documents of a question.
        ffn_width: hidden width of the feed-forward layers.
        patch: side of a square picture patch that becomes one token (pixels); must divide data.image_size.
        dropout: keyed dropout on the residual branches of the decoder and the embedded context; the decoder reads
            single documents without it, unless what it says of them trains it (rag_sequence, rag_token).
        vision: encode a document's picture for every pair that reads it (repeated), once a micro-batch however many
            read it (grouped), once a step, outside the pipeline (once), or as is predicted to be fastest (auto).
        score_prior: let the pointer head weigh documents by the retriever's scores, which also sends
            the generation loss's gradient to the retriever.
    """

    fusion: Literal["fid", "prepend"] = "fid"
    width: int = 64
    heads: int = 2
    encoder_layers: int = 2
    decoder_layers: int = 2
    ffn_width: int = 128
    patch: int = 8
    dropout: float = 0.0
    vision: Literal["repeated", "grouped", "once", "auto"] = "repeated"
    score_prior: bool = True

    def __post_init__(self) -> None:
        if self.fusion not in ("fid", "prepend"):
            raise ValueError(f"reader.fusion is {self.fusion!r}; allowed: fid, prepend")
        for name in ("width", "heads", "encoder_layers", "decoder_layers", "ffn_width", "patch"):
            if getattr(self, name) < 1:
                raise ValueError(f"reader.{name} is {getattr(self, name)}; it must be at least 1")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"reader.width is {self.width}; it must be a multiple of twice reader.heads ({self.heads})"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"reader.dropout is {self.dropout}; it must be at least 0 and below 1")
