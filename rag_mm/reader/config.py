"""What the reader (the fused vision-language transformer) can be told."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

DOCUMENTS, QUESTION = "{documents}", "{question}"


@dataclass(frozen=True)
class ReaderConfig:
    """A reader from scratch with a pointer head, or a public decoder as it is.

    Attributes:
        kind: built here and trained from scratch, or the causal language model of a local folder (transformers). Of
            the fields from width to patch, vision and score_prior, each is for readers from scratch alone, and path,
            prompt, end and frozen_layers are for public ones.
        fusion: how a question's documents come together: each is encoded with the question, and the decoder attends
            to all of them (fid), or one causal decoder reads documents, question and answer in a row (prepend, the
            only one of public decoders).
        path: folder of a transformers model with its tokenizer: config.json, safetensors, tokenizer.json.
        prompt: what a public decoder reads, with {documents} and {question} in it; the answer follows.
        end: the text, one token of the model, that ends an answer.
        frozen_layers: layers of a public decoder, from the first, that are not trained; with any, nor is its embedding.
        width: model width.
        heads: attention heads; must divide width into even parts.
        encoder_layers: layers over each (question, document) pair; prepend's one stack has them as well.
        decoder_layers: layers over the answer, attending to all documents of a question.
        ffn_width: hidden width of the feed-forward layers.
        patch: side of a square picture patch that becomes one token (pixels); must divide data.image_size.
        dropout: keyed dropout on the residual branches of the decoder and the embedded context; the decoder reads
            single documents without it, unless what it says of them trains it (rag_sequence, rag_token). Of a public
            decoder, all dropout that its configuration has.
        vision: encode a document's picture for every pair that reads it (repeated), once a micro-batch however many
            read it (grouped), once a step, outside the pipeline (once), or as is predicted to be fastest (auto).
        score_prior: let the pointer head weigh documents by the retriever's scores, which also sends
            the generation loss's gradient to the retriever.
    """

    kind: Literal["scratch", "transformers"] = "scratch"
    fusion: Literal["fid", "prepend"] = "fid"
    path: str = ""
    prompt: str = "{documents}Question: {question}\nAnswer:"
    end: str = "\n"
    frozen_layers: int = 0
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
        if self.kind not in ("scratch", "transformers"):
            raise ValueError(f"reader.kind is {self.kind!r}; allowed: scratch, transformers")
        if self.fusion not in ("fid", "prepend"):
            raise ValueError(f"reader.fusion is {self.fusion!r}; allowed: fid, prepend")
        others = SCRATCH if self.kind == "transformers" else PUBLIC
        default = {f.name: f.default for f in fields(self)}
        for name in others:
            if getattr(self, name) != default[name]:
                raise ValueError(
                    f"reader.{name} is {getattr(self, name)!r}, but reader.kind is {self.kind!r}, which does not "
                    "look at it; leave it out"
                )
        if self.kind == "transformers":
            self._check_public()
        for name in ("width", "heads", "encoder_layers", "decoder_layers", "ffn_width", "patch"):
            if getattr(self, name) < 1:
                raise ValueError(f"reader.{name} is {getattr(self, name)}; it must be at least 1")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"reader.width is {self.width}; it must be a multiple of twice reader.heads ({self.heads})"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"reader.dropout is {self.dropout}; it must be at least 0 and below 1")

    def _check_public(self) -> None:
        if self.fusion != "prepend":
            raise ValueError(
                f"reader.fusion is {self.fusion!r}, but reader.kind is 'transformers': a public decoder reads "
                "documents in front of the question, which is prepend"
            )
        if not self.path:
            raise ValueError("reader.path is empty, but reader.kind is 'transformers'; give the folder of the model")
        if self.frozen_layers < 0:
            raise ValueError(f"reader.frozen_layers is {self.frozen_layers}; it must be 0 or more")
        marks = [self.prompt.count(mark) for mark in (DOCUMENTS, QUESTION)]
        if marks != [1, 1] or self.prompt.index(DOCUMENTS) > self.prompt.index(QUESTION):
            raise ValueError(
                f"reader.prompt is {self.prompt!r}; it must have {DOCUMENTS} and after it {QUESTION}, each once"
            )


# Fields that one kind of reader looks at and the other does not.
SCRATCH = (
    "width", "heads", "encoder_layers", "decoder_layers", "ffn_width", "patch", "vision", "score_prior",
)  # fmt: skip
PUBLIC = ("path", "prompt", "end", "frozen_layers")
