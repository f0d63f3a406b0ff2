"""What the reader (the fused vision-language transformer) can be told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReaderConfig:
    """A fusion-in-decoder reader with a pointer head, from scratch.

    Attributes:
        width: model width.
        heads: attention heads; must divide width into even parts.
        encoder_layers: layers over each (question, document) pair.
        decoder_layers: layers over the answer, attending to all documents of a question.
        ffn_width: hidden width of the feed-forward layers.
        patch: side of a square picture patch that becomes one token (pixels); must divide data.image_size.
        dropout: keyed dropout on the residual branches of the fused decoder and the embedded context.
        score_prior: let the pointer head weigh documents by the retriever's scores, which also sends
            the generation loss's gradient to the retriever.
    """

    width: int = 64
    heads: int = 2
    encoder_layers: int = 2
    decoder_layers: int = 2
    ffn_width: int = 128
    patch: int = 8
    dropout: float = 0.0
    score_prior: bool = True

    def __post_init__(self) -> None:
        for name in ("width", "heads", "encoder_layers", "decoder_layers", "ffn_width", "patch"):
            if getattr(self, name) < 1:
                raise ValueError(f"reader.{name} is {getattr(self, name)}; it must be at least 1")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"reader.width is {self.width}; it must be a multiple of twice reader.heads ({self.heads})"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"reader.dropout is {self.dropout}; it must be at least 0 and below 1")
