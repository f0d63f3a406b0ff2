"""From samples and documents to the tensors that the reader's block program takes.

Lengths are padded to buckets, so that few tensor shapes occur (each costs a runtime with its own buffers);
every rank sees the whole global batch's lengths and so agrees on the bucket. What is cut off is counted.

Shapes: B samples, k documents each, P = B*k pairs, Q question tokens, N patches of a picture, M document
tokens, L = Q + 2N + M, T answer tokens, S side of a picture.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from data.config import DataConfig
from data.dataset import Sample
from data.document_store import Document
from rag_mm.renaming import Renaming
from retriever.embed import pictures

END = "\n"


def bucket(length: int, step: int) -> int:
    """The next multiple of ``step``, at least one."""
    return max(1, -(-length // step)) * step


class Collator:
    """Tokenises and pads; keeps count of what was truncated.

    Args:
        tokenizer: any transformers tokenizer that has ``<pad>`` and ``<bos>`` and keeps a newline a token of
            its own: the newline ends answers and document lines alike, so the end can be copied too.
        num_patches: N, patches of one picture.

    Attributes:
        truncated: texts that were cut off so far, by kind.
        padding: share of the places of the last tensor of each kind that is padding.
    """

    def __init__(self, tokenizer: Any, config: DataConfig, *, num_patches: int) -> None:
        self.tokenizer, self.config, self.num_patches = tokenizer, config, num_patches
        self.pad, self.bos = tokenizer.pad_token_id, tokenizer.bos_token_id
        if self.pad != 0:
            raise ValueError(f"the tokenizer's padding has id {self.pad}; the reader expects 0")
        (self.end,) = tokenizer(END, add_special_tokens=False)["input_ids"]
        self.truncated: Counter[str] = Counter()
        self.padding: dict[str, float] = {}
        self.word_V = word_numbers(tokenizer)

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of each text."""
        found: list[list[int]] = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
        return found

    def answer_ids(self, text: str) -> list[int]:
        """Tokens of an answer as the reader would write it, end included."""
        return self.ids([text + END])[0]

    def tokens(self, texts: Sequence[str], *, limit: int, what: str, step: int, left: bool = False) -> Tensor:
        """Token ids (N, bucketed length), padded on the right, or on the left."""
        rows = self.ids(texts)
        self.truncated[what] += sum(len(row) > limit for row in rows)
        rows = [row[:limit] for row in rows]
        width = bucket(max((len(row) for row in rows), default=1), step)
        self.padding[what] = 1 - sum(map(len, rows)) / (len(rows) * width) if rows else 0.0
        padding = [[self.pad] * (width - len(row)) for row in rows]
        padded = [p + row if left else row + p for row, p in zip(rows, padding, strict=True)]
        return torch.tensor(padded, dtype=torch.int64)

    def images(self, pngs: Sequence[bytes | None]) -> tuple[Tensor, Tensor]:
        """Pictures (N, 3, S, S) float in [0, 1], white where there is none, and which exist (N,) float.

        One that cannot be decoded does not exist; whoever embeds it counts it (`retriever.embed.stored_features`).
        """
        return pictures(pngs, self.config.image_size, transform=self.config.image_transform, broken={})

    def context(
        self,
        questions: Sequence[str],
        documents: Sequence[Sequence[Document]],
        question_image: tuple[Tensor, Tensor],
        document_image: tuple[Tensor, Tensor],
        *,
        renaming: Renaming | None = None,
    ) -> dict[str, Tensor]:
        """Everything the encoder reads.

        Args:
            documents: k for each question.
            question_image: pictures (B, 3, S, S) and which exist (B,).
            document_image: pictures (P, 3, S, S) and which exist (P,).
        """
        flat = [document for row in documents for document in row]
        k = len(flat) // len(questions)
        texts = [document_text(d, renaming) for d in flat]
        # Padded on the left: how far a question's tokens are from its document's must not depend on the batch.
        question = self.tokens(questions, limit=self.config.max_query_tokens, what="questions", step=8, left=True)
        document = self.tokens(texts, limit=self.config.max_document_tokens, what="documents", step=32)
        question_PQ = question.repeat_interleave(k, dim=0)
        has = torch.stack([question_image[1].repeat_interleave(k), document_image[1]], dim=1) > 0
        patches = has.repeat_interleave(self.num_patches, dim=1)
        blank = torch.full_like(patches, self.pad, dtype=torch.int64)
        return {
            "question": question,
            "question_image": question_image[0],
            "document": document,
            "document_match": self.matches(document, question_PQ),
            "document_image": document_image[0],
            "context_mask": torch.cat([question_PQ != self.pad, patches, document != self.pad], dim=1),
            "context_token": torch.cat([question_PQ, blank, document], dim=1),
        }

    def matches(self, document_PM: Tensor, question_PQ: Tensor) -> Tensor:
        """1 where a document's token is a word of its question as well (P, M), else 0."""
        word_PM, word_PQ = self.word_V[document_PM], self.word_V[question_PQ]
        same = (word_PM.unsqueeze(2) == word_PQ.unsqueeze(1)).any(2) & (word_PM >= 0)
        return same.to(torch.get_default_dtype())

    def answers(self, answers: Sequence[str], weight: Tensor) -> dict[str, Tensor]:
        """Decoder inputs, targets and weights of targets (B, T) and samples (B,); weights sum to 1 over all given.

        ``distill_weight`` is the samples' weight in objectives that only teach the retriever what the reader found
        useful; a step sets it to 0 while the reader cannot read yet.

        Args:
            weight: (B,) of each sample, 0 for padding and bad samples.
        """
        target = self.tokens([a + END for a in answers], limit=self.config.max_answer_tokens, what="answers", step=4)
        is_target = (target != self.pad) * weight.unsqueeze(1)
        answer_in = torch.cat([torch.full_like(target[:, :1], self.bos), target[:, :-1]], dim=1)
        return {
            "answer_in": answer_in,
            "target": target,
            "target_weight": is_target / is_target.sum().clamp(min=1e-9),
            "sample_weight": weight / weight.sum().clamp(min=1e-9),
            "distill_weight": weight / weight.sum().clamp(min=1e-9),
        }


def word_numbers(tokenizer: Any) -> Tensor:
    """For every token a number that tokens of the same text share, whatever their case and blanks (V,).

    Tokens under three letters have -1: they are parts of words and would match anything.
    """
    numbers: dict[str, int] = {}
    words = [tokenizer.decode([i]).strip().casefold() for i in range(len(tokenizer))]
    special = set(tokenizer.all_special_ids)
    found = [
        numbers.setdefault(word, len(numbers)) if len(word) > 2 and word.isalpha() and i not in special else -1
        for i, word in enumerate(words)
    ]
    return torch.tensor(found)


def document_text(document: Document, renaming: Renaming | None) -> str:
    """A document's text, its facts renamed for this step if ``renaming`` is given."""
    if renaming is None:
        return document.text
    return dataclasses.replace(document, fields=renaming.fields(document.fields)).text


def training_answers(samples: Sequence[Sample], renaming: Renaming | None) -> list[str]:
    """The answer each sample is trained on: its first one, renamed as the documents are."""
    first = [s.answers[0] if s.answers else "" for s in samples]  # unanswered samples have weight 0
    if renaming is None:
        return first
    return [renaming.value(s.field, answer) for s, answer in zip(samples, first, strict=True)]
