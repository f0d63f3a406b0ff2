"""A small batch for readers, without data set or retriever: ragged documents, missing pictures, a sample of weight 0.

Shapes: B samples, k documents each, P = B*k pairs, V token ids, E embedding width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipeline import BlockProgram
from rag_mm.objectives import ObjectivesConfig
from rag_mm.reader.config import ReaderConfig
from rag_mm.reader.fusion import reader_program

V, E, IMAGE, PATCHES = 50, 6, 24, 9


def reader(fusion: str, *, dropout: float = 0.0, score_prior: bool = True, **objectives: Any) -> BlockProgram:
    """A narrow reader in float64, from seed 0."""
    torch.manual_seed(0)
    config = ReaderConfig(
        fusion=fusion, width=16, heads=2, ffn_width=24, encoder_layers=1, decoder_layers=2,
        dropout=dropout, score_prior=score_prior,
    )  # fmt: skip
    objective = ObjectivesConfig(**{"pdist": 0.0, **objectives})
    return reader_program(config, objective, vocabulary=V, image_size=IMAGE).double()


def reader_batch(num_samples: int = 4, *, k: int = 2, seed: int = 0) -> dict[str, Tensor]:
    """Embeddings that require gradients; sample 2 has weight 0."""
    g = torch.Generator().manual_seed(seed)
    pairs = num_samples * k
    question = torch.randint(1, V, (num_samples, 8), generator=g)
    question[1, :3] = 0  # padded on the left
    document = torch.randint(1, V, (pairs, 20), generator=g)
    document[::3, 13:] = 0
    has = torch.rand(pairs, 2, generator=g) > 0.4
    has[:, 0] = has[::k, 0].repeat_interleave(k)
    patches, question_PQ = has.repeat_interleave(PATCHES, dim=1), question.repeat_interleave(k, dim=0)
    target = torch.randint(1, V, (num_samples, 4), generator=g)
    target[0, 2:] = 0
    weight = torch.ones(num_samples, dtype=torch.float64)
    weight[2:3] = 0.0
    is_target = (target != 0) * weight.unsqueeze(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    return {
        "sample_id": torch.arange(num_samples) * 7 + 3,
        "question": question,
        "question_image": draw(num_samples, 3, IMAGE, IMAGE),
        "document": document,
        "document_match": (draw(pairs, 20) > 0.8).double(),
        "document_image": draw(pairs, 3, IMAGE, IMAGE),
        "context_mask": torch.cat([question_PQ != 0, patches, document != 0], dim=1),
        "context_token": torch.cat([question_PQ, torch.zeros_like(patches, dtype=torch.int64), document], dim=1),
        "answer_in": torch.cat([torch.ones_like(target[:, :1]), target[:, :-1]], dim=1),
        "target": target,
        "target_weight": is_target / is_target.sum(),
        "sample_weight": weight / weight.sum(),
        "distill_weight": weight / weight.sum(),
        "query_embedding": draw(num_samples, E).requires_grad_(),
        "document_embedding": draw(pairs, E).requires_grad_(),
    }
