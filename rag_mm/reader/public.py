"""The reader as a block program: a public causal decoder of ``transformers`` with the documents in front.

The blocks are those of `pipeline.adapters.prepend.prepend_program`, with the model's own weights, tied embedding and
tokenizer; the last one turns logits into loss contributions. Nothing is added to the model, so before training it
answers exactly as it does anywhere else. Against the readers from scratch there is no pointer: what the retriever's
scores are does not reach the answer, and only objectives that ask single documents teach the retriever.

Shapes: B samples, k documents each, P = B*k pairs, T answer tokens, V vocabulary, E embedding width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from pipeline import Block, BlockProgram
from pipeline.adapters.prepend import prepend_program
from pipeline.adapters.streams import Alone
from pipeline.keyed_modules import make_keyed
from rag_mm import losses
from rag_mm.objectives import ALONE, MARGINAL, ObjectivesConfig
from rag_mm.reader.config import DOCUMENTS, ReaderConfig
from rag_mm.reader.layers import fuse
from rag_mm.reader.score_losses import Worth, score_losses

DROPOUTS = ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout")
TARGETS = (
    "target", "target_weight", "sample_weight", "distill_weight", "query_embedding", "document_embedding",
)  # fmt: skip


class ObjectiveHead(nn.Module):
    """Block module: logits to ``losses`` and ``statistics`` (as `rag_mm.reader.head.LossHead` gives them).

    Args:
        answering: makes the program that answers with the same modules.
        alone: which likelihoods of single documents it is given, if any (one of `ALONE` and `MARGINAL`).
    """

    def __init__(self, objective: ObjectivesConfig, answering: Callable[[], BlockProgram], *, alone: str) -> None:
        super().__init__()
        self.objective, self.answering, self.alone = objective, answering, alone

    def forward(
        self,
        logits_BTV: Tensor,
        target_BT: Tensor,
        target_weight_BT: Tensor,
        sample_weight_B: Tensor,
        distill_weight_B: Tensor,
        query_BE: Tensor,
        document_PE: Tensor,
        alone_PT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(B, objectives) and (B, columns)."""
        objective, is_target_BT = self.objective, target_weight_BT > 0
        score_Bk = torch.einsum("be,bke->bk", query_BE, fuse(document_PE.unsqueeze(1), query_BE.shape[0]))
        found = []
        if objective.generation > 0:
            nll_BT = F.cross_entropy(logits_BTV.flatten(0, 1), target_BT.flatten(), reduction="none").view_as(target_BT)
            found.append(objective.generation * losses.generation(-nll_BT, target_weight_BT))
        given: dict[str, Tensor] = {}
        if alone_PT is not None:
            given[self.alone] = alone_PT.unflatten(0, score_Bk.shape) * is_target_BT.unsqueeze(1)
        by_score, seen = score_losses(
            objective, score_Bk, Worth(given.get(ALONE), given.get(MARGINAL), None, None), width=query_BE.shape[1],
            target_weight_BT=target_weight_BT, sample_weight_B=sample_weight_B, distill_weight_B=distill_weight_B,
        )  # fmt: skip
        found += by_score
        with torch.no_grad():
            right_BT = is_target_BT & (logits_BTV.argmax(-1) == target_BT)
            entropy_B = losses.entropy(score_Bk.softmax(1))
            statistics = [is_target_BT.sum(1), right_BT.sum(1), entropy_B, *seen]
        return torch.stack(found, dim=1), torch.stack([s.to(found[0].dtype) for s in statistics], dim=1)


def public_program(config: ReaderConfig, objective: ObjectivesConfig) -> BlockProgram:
    """The reader of ``reader.path``; its batch inputs are those of `rag_mm.prompt.PromptCollator`, embeddings and
    ``sample_id``.

    Objectives that ask single documents make each block read them too (`pipeline.adapters.streams`). Within
    ``torch.device("meta")`` the program has no weights yet, and those of the folder are not read.

    Raises:
        ValueError: if the folder holds no such model, weights are missing, or an objective needs what it has not.
    """
    check_objectives(objective)
    tokenizer = public_tokenizer(config)
    model = make_keyed(public_model(config))
    opening = tuple(tokenizer(config.prompt.partition(DOCUMENTS)[0], add_special_tokens=False)["input_ids"])
    (alone,) = objective.streams or ("",)
    how: dict[str, Alone] = {"": "none", ALONE: "detached", MARGINAL: "trained"}
    body = prepend_program(model, opening=opening, alone=how[alone], sample_id=True)
    answering = partial(prepend_program, model, opening=opening, answer_padding=True)
    head = ObjectiveHead(objective, answering, alone=alone)
    pairs = dict.fromkeys((*(name for name, axis in body.axes.items() if axis == "pair"), "document_embedding"), "pair")
    reads = ("logits", *TARGETS, *(("alone_log_p",) if alone else ()))
    return BlockProgram(
        [*body.blocks, Block("objectives", head, reads=reads, writes=("losses", "statistics"))],
        inputs=tuple(dict.fromkeys((*body.inputs, *TARGETS))),
        outputs=("losses", "statistics"),
        axes={**body.axes, **pairs},
    )


def public_tokenizer(config: ReaderConfig) -> Any:
    """That of the folder."""
    return AutoTokenizer.from_pretrained(_folder(config), local_files_only=True)


def public_model(config: ReaderConfig) -> Any:
    """The model with ``reader.dropout`` and its first ``reader.frozen_layers`` layers, and the embedding, frozen."""
    folder = _folder(config)
    settings = AutoConfig.from_pretrained(folder, local_files_only=True)
    for name in DROPOUTS:
        if hasattr(settings, name):
            setattr(settings, name, config.dropout)
    dtype = torch.get_default_dtype()
    if torch.empty(0).is_meta:
        model = AutoModelForCausalLM.from_config(settings, dtype=dtype)
        _fill_tables(model)
    else:
        logging.disable_progress_bar()  # every rank would draw one
        model, found = AutoModelForCausalLM.from_pretrained(
            folder, config=settings, dtype=dtype, local_files_only=True, output_loading_info=True
        )
        if found["missing_keys"]:
            raise ValueError(
                f"reader.path is {config.path!r}, whose weights lack {sorted(found['missing_keys'])[0]} and perhaps "
                "more; give a folder with a whole causal language model"
            )
    model.requires_grad_(True).train()
    if config.frozen_layers:
        _freeze(model, config)
    return model


def check_objectives(objective: ObjectivesConfig) -> None:
    """ValueError naming an objective that a public decoder cannot be trained with."""
    for name in ("adist", "loop"):
        if getattr(objective, name) > 0:
            raise ValueError(
                f"objectives.{name} is {getattr(objective, name)}, but reader.kind is 'transformers', whose decoder "
                f"does not say what it needs; set objectives.{name} to 0 (pdist and emdr2 teach the retriever as well)"
            )
    if len(objective.streams) > 1:
        first, second = (
            next(name for name in names if getattr(objective, name) > 0)
            for names in (("pdist", "emdr2", "emdr2_token"), ("rag_sequence", "rag_token"))
        )
        raise ValueError(
            f"objectives.{first} and objectives.{second} are both above 0, but reader.kind is 'transformers', which "
            "reads single documents either without graph or with it; set one of the two to 0"
        )


def _folder(config: ReaderConfig) -> Path:
    folder = Path(config.path)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"reader.path is {config.path!r}, which holds no config.json; give the folder of a transformers causal "
            "language model (`python -m rag_mm.pretrained` makes some)"
        )
    return folder


def _fill_tables(model: Any) -> None:
    """Make what no checkpoint holds: buffers that follow from the configuration, such as rotary frequencies."""
    for path, parent in list(model.named_modules()):
        for name, module in parent.named_children():
            if any(getattr(module, buffer).is_meta for buffer in module._non_persistent_buffers_set):
                if not hasattr(module, "config"):
                    raise ValueError(
                        f"{path}.{name} ({type(module).__name__}) has tables that cannot be made anew here; this model "
                        "cannot be evaluated without its whole memory"
                    )
                with torch.device("cpu"):
                    setattr(parent, name, type(module)(module.config))


def _freeze(model: Any, config: ReaderConfig) -> None:
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1)
    if config.frozen_layers > len(layers):
        raise ValueError(
            f"reader.frozen_layers is {config.frozen_layers}; {config.path} has {len(layers)} layers, so that is the "
            "most"
        )
    for part in (model.get_input_embeddings(), *layers[: config.frozen_layers]):
        part.requires_grad_(False)
