"""From samples and documents to the tensors that a public decoder reads (`rag_mm.reader.public`).

`rag_mm.batch` makes a batch for readers that are trained from scratch: marks on words of the question, patches, a
context to copy from. A public decoder knows none of these and brings a tokenizer of its own. It gets tokens and masks,
laid out as ``reader.prompt`` says; pictures are the retriever's alone.

Every part is tokenised by itself, so no token spans the border of two parts: what a document's tokens are does not
depend on what stands around it. Text of the data cannot forge a special token (such as the end of a turn): only the
prompt's own text has some. Masks say what is there, so it does not matter which id stands at padding.

Shapes: B samples, k documents each, P = B*k pairs, M document tokens, H tokens of the question and what the prompt puts
around it, T answer tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from data.config import DataConfig
from data.document_store import Document
from rag_mm.batch import Collator, bucket, document_text
from rag_mm.reader.config import DOCUMENTS, QUESTION, ReaderConfig
from rag_mm.renaming import Renaming


@dataclass(frozen=True)
class Prompt:
    """Token ids of what ``reader.prompt`` puts around documents and question.

    Attributes:
        opening: in front of every row.
        between: after the documents.
        after: after the question; its last token is the first that the answer follows.
        end: the one token that ends an answer.
        space: what an answer begins with, so that its first word is tokenised as in running text.
    """

    opening: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]
    end: int
    space: str

    @classmethod
    def of(cls, tokenizer: Any, config: ReaderConfig) -> Prompt:
        """Raises ValueError if nothing follows the question, or ``reader.end`` is not one token."""
        opening, rest = config.prompt.split(DOCUMENTS)
        between, after = rest.split(QUESTION)
        ids = [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (opening, between, after)]
        if not ids[2]:
            raise ValueError(
                f"reader.prompt is {config.prompt!r}; something must follow {QUESTION}, such as '\\nAnswer:', for the "
                "answer to begin after it"
            )
        end = tokenizer(config.end, add_special_tokens=False)["input_ids"]
        if len(end) != 1:
            raise ValueError(
                f"reader.end is {config.end!r}, which is {len(end)} tokens of {config.path}; it must be one, such as a "
                f"line feed or {tokenizer.eos_token!r}"
            )
        return cls(ids[0], ids[1], ids[2], end[0], "" if after[-1].isspace() else " ")


class PromptCollator(Collator):
    """Tokenises and pads; keeps count of what was truncated, as `Collator` does.

    Attributes:
        bos: the prompt's last token, which the answer's first follows.
        end: the token that ends an answer.
        pad: an id that stands at padding.
    """

    def __init__(self, tokenizer: Any, config: DataConfig, reader: ReaderConfig) -> None:
        self.tokenizer, self.config, self.num_patches = tokenizer, config, 0
        self.prompt = Prompt.of(tokenizer, reader)
        self.bos, self.end, self.pad = self.prompt.after[-1], self.prompt.end, 0
        self.truncated: Counter[str] = Counter()
        self.padding: dict[str, float] = {}

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Of texts of the data, in which nothing is a special token."""
        if not texts:
            return []
        found: list[list[int]] = self.tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True)[
            "input_ids"
        ]
        return found

    def answer_ids(self, text: str) -> list[int]:
        return [*self.ids([self.prompt.space + text])[0], self.end]

    def context(
        self,
        questions: Sequence[str],
        documents: Sequence[Sequence[Document]],
        question_image: tuple[Tensor, Tensor],
        document_image: tuple[Tensor, Tensor],
        *,
        renaming: Renaming | None = None,
    ) -> dict[str, Tensor]:
        """``document`` and ``document_mask`` (P, M), ``question`` and ``question_mask`` (B, H).

        Args:
            documents: k for each question.
            question_image, document_image: not read.
        """
        texts = [document_text(d, renaming) for row in documents for d in row]
        read = self._cut(self.ids(texts), limit=self.config.max_document_tokens, what="documents")
        asked = self._cut(self.ids(questions), limit=self.config.max_query_tokens, what="questions")
        before, after = self.prompt.between, self.prompt.after[:-1]
        document, document_mask = self._padded(read, step=32, what="documents")
        question, question_mask = self._padded([[*before, *row, *after] for row in asked], step=8, what="questions")
        return {
            "document": document,
            "document_mask": document_mask,
            "question": question,
            "question_mask": question_mask,
        }

    def answers(self, answers: Sequence[str], weight: Tensor) -> dict[str, Tensor]:
        """As `Collator.answers`."""
        limit = self.config.max_answer_tokens
        rows = self._cut([self.answer_ids(answer) for answer in answers], limit=limit, what="answers")
        target, mask = self._padded(rows, step=4, what="answers")
        is_target = mask * weight.unsqueeze(1)
        answer_in = torch.cat([torch.full_like(target[:, :1], self.bos), target[:, :-1]], dim=1)
        return {
            "answer_in": answer_in,
            "target": target,
            "target_weight": is_target / is_target.sum().clamp(min=1e-9),
            "sample_weight": weight / weight.sum().clamp(min=1e-9),
            "distill_weight": weight / weight.sum().clamp(min=1e-9),
        }

    def _cut(self, rows: list[list[int]], *, limit: int, what: str) -> list[list[int]]:
        self.truncated[what] += sum(len(row) > limit for row in rows)
        return [row[:limit] for row in rows]

    def _padded(self, rows: list[list[int]], *, step: int, what: str) -> tuple[Tensor, Tensor]:
        """Ids and mask (N, bucketed length), padded on the right."""
        width = bucket(max((len(row) for row in rows), default=1), step)
        self.padding[what] = 1 - sum(map(len, rows)) / (len(rows) * width) if rows else 0.0
        ids = torch.tensor([row + [self.pad] * (width - len(row)) for row in rows], dtype=torch.int64)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], dtype=torch.int64)
        return ids.view(-1, width), mask.view(-1, width)
