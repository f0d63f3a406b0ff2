"""Batches with documents in front, and the slow twin: one sample after another, its tokens put in a row by hand.

Four samples of two documents; padding on either side, a document without tokens, documents and a question without
vectors, so that some rows begin with padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipeline import BlockProgram
from pipeline.adapters import Loss, Prefix, Projection
from pipeline.adapters.prepend import prepend_program
from tests.pipeline.adapters.models import VOCABULARY

B, K, M, H, T, N, C, WIDTH = 4, 2, 5, 4, 3, 2, 3, 16
OPENING = (3, 7)


def batch(*, prefix: bool, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Everything that programs with or without vectors, and `Marginal`, read; token 0 is padding."""
    g = torch.Generator().manual_seed(5)

    def tokens(mask: Tensor) -> Tensor:
        return torch.randint(2, VOCABULARY, mask.shape, generator=g) * mask

    lengths = torch.tensor([5, 3, 4, 1, 2, 5, 0, 4])
    document_mask = (torch.arange(M) < lengths[:, None]).long()
    question_mask = (torch.arange(H) >= torch.tensor([[0], [2], [1], [3]])).long()  # padded on the left
    weight = torch.rand(B, T, generator=g, dtype=torch.float64)
    weight[1, 2:] = 0.0
    given = {
        "sample_id": torch.arange(B) * 3 + 1,
        "document": tokens(document_mask),
        "document_mask": document_mask,
        "question": tokens(question_mask),
        "question_mask": question_mask,
        "answer_in": torch.randint(2, VOCABULARY, (B, T), generator=g),
        "target": torch.randint(2, VOCABULARY, (B, T), generator=g),
        "target_weight": weight.to(dtype),
        "score": torch.randn(B, K, generator=g, dtype=torch.float64).to(dtype),
    }
    if prefix:
        has = torch.tensor([0, 1, 1, 1, 0, 1, 1, 0])
        given |= {
            "prefix_features": torch.randn(B * K, N, C, generator=g, dtype=torch.float64).to(dtype),
            "prefix_mask": has[:, None].expand(-1, N).clone(),
            "question_features": torch.randn(B, 1, C, generator=g, dtype=torch.float64).to(dtype),
            "question_prefix_mask": torch.tensor([[1], [0], [1], [1]]),
        }
    return given


class Marginal(nn.Module):
    """Generation, and the likelihood of the answer summed over documents (2005.11401), each weighted."""

    def forward(
        self, logits_BTV: Tensor, alone_PT: Tensor, target_BT: Tensor, weight_BT: Tensor, score_BK: Tensor
    ) -> Tensor:
        log_p_BT = logits_BTV.log_softmax(-1).gather(-1, target_BT[..., None])[..., 0]
        alone_BKT = alone_PT.unflatten(0, (target_BT.shape[0], -1)) * (weight_BT[:, None] > 0)
        marginal_B = (score_BK.log_softmax(1) + alone_BKT.sum(2)).logsumexp(1)
        return torch.stack([-(log_p_BT * weight_BT).sum(1), -marginal_B / 7], dim=1)


MARGINAL = Loss(Marginal(), ("logits", "alone_log_p", "target", "target_weight", "score"))


class Reader(nn.Module):
    """A model and the projection that brings features to its width."""

    def __init__(self, model: Any, *, prefix: bool) -> None:
        super().__init__()
        self.model = model
        torch.manual_seed(6)
        self.projection = Projection(C, WIDTH).to(next(model.parameters()).dtype) if prefix else None

    def program(self, **options: Any) -> BlockProgram:
        if self.projection is not None:
            options["document_prefix"] = Prefix(self.projection, ("prefix_features",), "prefix_mask")
            options["question_prefix"] = Prefix(self.projection, ("question_features",), "question_prefix_mask")
        return prepend_program(self.model, opening=OPENING, **options)

    def vectors(self, given: Mapping[str, Tensor], what: str, row: int) -> list[Tensor]:
        """Vectors (n, D) of one document or question: what is there, and nothing else."""
        embed = self.model.get_input_embeddings()
        found = []
        if self.projection is not None:
            features, mask = {
                "document": ("prefix_features", "prefix_mask"),
                "question": ("question_features", "question_prefix_mask"),
            }[what]
            found.append(self.projection(given[features][row])[given[mask][row].bool()])
        found.append(embed(given[what][row][given[f"{what}_mask"][row].bool()]))
        return found

    def prompt(self, given: Mapping[str, Tensor], sample: int, documents: list[int]) -> Tensor:
        """(1, length, D): opening, documents and question, without padding."""
        parts = [self.model.get_input_embeddings()(torch.tensor(OPENING))]
        for document in documents:
            parts += self.vectors(given, "document", document)
        return torch.cat([*parts, *self.vectors(given, "question", sample)])[None]

    def by_hand(self, given: Mapping[str, Tensor], sample: int, documents: list[int]) -> Tensor:
        """Logits (T, V) of one row through the uncut model."""
        answer = self.model.get_input_embeddings()(given["answer_in"][sample])[None]
        row = torch.cat([self.prompt(given, sample, documents), answer], dim=1)
        return self.model(inputs_embeds=row).logits[0, -answer.shape[1] :]

    def all_by_hand(self, given: Mapping[str, Tensor], *, alone: str) -> dict[str, Tensor]:
        """``logits`` (B, T, V), and ``alone_log_p`` (P, T) with or without graph and dropout."""
        fused = [self.by_hand(given, b, [b * K + j for j in range(K)]) for b in range(B)]
        if alone == "none":
            return {"logits": torch.stack(fused)}
        training = self.model.training
        self.model.train(training and alone == "trained")
        with torch.set_grad_enabled(alone == "trained"):
            log_p = []
            for pair in range(B * K):
                logits_TV = self.by_hand(given, pair // K, [pair]).log_softmax(-1)
                log_p.append(logits_TV.gather(-1, given["target"][pair // K][:, None])[:, 0])
        self.model.train(training)
        return {"logits": torch.stack(fused), "alone_log_p": torch.stack(log_p)}
