"""Text by any encoder of ``transformers`` in a local folder: pooled to one vector, of length 1.

Weights are read from safetensors only, never unpickled, and no code of the folder is run. Dropout is off
(`retriever.towers.rowwise`). Token lengths are padded to a few sizes, so that few shapes occur.

Shapes: N rows, L tokens, E_t width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retriever.config import RetrieverConfig
from retriever.towers.interface import TextBackend, Tower
from retriever.towers.rowwise import rowwise

TOKEN_BUCKET = 16
TOGETHER = 32  # rows of like length that are computed at once where no gradient is wanted
T5_FAMILY = ("t5", "mt5", "umt5")  # kinds of encoder-decoders whose encoder is a model of its own
KEY_BIASES = {  # by the model's class, how the names of its keys' biases end; see `_freeze_key_biases`
    "AlbertModel": "attention.key.bias",
    "BertModel": "attention.self.key.bias",
    "CamembertModel": "attention.self.key.bias",
    "DistilBertModel": "attention.k_lin.bias",
    "ElectraModel": "attention.self.key.bias",
    "MPNetModel": "attention.attn.k.bias",
    "RobertaModel": "attention.self.key.bias",
    "XLMRobertaModel": "attention.self.key.bias",
}


class Pool(nn.Module):
    """Token vectors (N, L, E_t) to one a row, of length 1 where ``normalize``."""

    def __init__(self, pooling: str, *, normalize: bool) -> None:
        super().__init__()
        self.pooling, self.normalize = pooling, normalize

    def forward(self, hidden_NLE: Tensor, mask_NL: Tensor) -> Tensor:
        if self.pooling == "cls":
            pooled_NE = hidden_NLE[:, 0]
        else:
            mask_NL1 = mask_NL.unsqueeze(2).to(hidden_NLE.dtype)
            pooled_NE = (hidden_NLE * mask_NL1).sum(1) / mask_NL1.sum(1).clamp(min=1e-9)
        return F.normalize(pooled_NE, dim=1) if self.normalize else pooled_NE


class PretrainedText(Tower):
    """A transformers encoder and a pooling.

    Attributes:
        model: the encoder, without its pooler.
    """

    inputs = ("input_ids", "attention_mask")

    def __init__(self, model: nn.Module, config: RetrieverConfig) -> None:
        super().__init__()
        self.model = model
        self.pool = Pool(config.text_pooling, normalize=config.text_normalize)
        self.dim = int(model.config.hidden_size)  # type: ignore[union-attr, arg-type]

    def forward(self, ids_NL: Tensor, mask_NL: Tensor) -> Tensor:
        """Embeddings (N, E); where no gradient is wanted, rows of like length are computed together.

        Padding costs what tokens cost, and a batch of a memory's texts is mostly padding.
        """
        if torch.is_grad_enabled() or len(ids_NL) <= TOGETHER:
            return self._embedded(ids_NL, mask_NL)
        length_N = mask_NL.sum(1)
        order_N = length_N.argsort(stable=True)
        parts = []
        for rows in order_N.split(TOGETHER):
            width = min(ids_NL.shape[1], -(-max(1, int(length_N[rows[-1]])) // TOKEN_BUCKET) * TOKEN_BUCKET)
            parts.append(self._embedded(ids_NL[rows, :width], mask_NL[rows, :width]))
        return torch.cat(parts)[order_N.argsort()]

    def _embedded(self, ids_NL: Tensor, mask_NL: Tensor) -> Tensor:
        return self.pool(self.model(input_ids=ids_NL, attention_mask=mask_NL).last_hidden_state, mask_NL)


class TransformersText(TextBackend):
    """``retriever.text: transformers``."""

    limited_by = "retriever.text_max_tokens"

    def __init__(self, config: RetrieverConfig) -> None:
        super().__init__(config)
        from transformers import AutoConfig, AutoTokenizer

        self.folder = Path(config.text_model)
        if not self.folder.is_dir():
            raise ValueError(
                f"retriever.text_model is {config.text_model!r}, which is not a folder; save_pretrained makes one"
            )
        try:
            how: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
            self.model_config = AutoConfig.from_pretrained(str(self.folder), **how)
            self.tokenizer: Any = AutoTokenizer.from_pretrained(str(self.folder), **how)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._unusable(error) from None
        if self.model_config.model_type in T5_FAMILY:
            self.model_config.is_encoder_decoder = False  # whatever the folder holds, the encoder alone is taken
        if getattr(self.model_config, "is_encoder_decoder", False):
            raise self._unusable(f"{self.model_config.model_type} is an encoder-decoder; an encoder is needed")
        self._check_limit()
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        text = repr(sorted(self.tokenizer.get_vocab().items())) if backend is None else backend.to_str()
        self.tokenizer_hash = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def _check_limit(self) -> None:
        limit, positions = self.config.text_max_tokens, getattr(self.model_config, "max_position_embeddings", None)
        longest = min(positions or limit, int(self.tokenizer.model_max_length))  # some positions may be set aside
        if limit > longest:
            raise ValueError(
                f"retriever.text_max_tokens is {limit}; the model in {self.folder} has {longest} positions, so that is "
                "the most"
            )

    def _unusable(self, problem: object) -> ValueError:
        return ValueError(f"retriever.text_model is {str(self.folder)!r}, which is not usable: {problem}")

    def features(self, texts: Sequence[str]) -> dict[str, Tensor]:
        limit = self.config.text_max_tokens
        rows = self._tokens(texts)
        if long := [i for i, row in enumerate(rows) if len(row) > limit]:
            cut = self._tokens([texts[i] for i in long], truncation=True, max_length=limit)
            for i, row in zip(long, cut, strict=True):
                rows[i] = row
            self.truncated += len(long)
        longest = max((len(row) for row in rows), default=1)
        width = min(limit, -(-max(1, longest) // TOKEN_BUCKET) * TOKEN_BUCKET)
        ids_NL = torch.full((len(rows), width), self.tokenizer.pad_token_id or 0, dtype=torch.int64)
        mask_NL = torch.zeros(len(rows), width, dtype=torch.int64)
        for i, row in enumerate(rows):
            ids_NL[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
            mask_NL[i, : len(row)] = 1
        return {"input_ids": ids_NL, "attention_mask": mask_NL}

    def _tokens(self, texts: Sequence[str], **how: Any) -> list[list[int]]:
        if not texts:
            return []
        rows: list[list[int]] = self.tokenizer(list(texts), padding=False, verbose=False, **how)["input_ids"]
        return rows

    def tower(self, *, weights: bool = True) -> PretrainedText:
        from transformers import AutoModel, AutoModelForTextEncoding
        from transformers.utils import logging

        logging.disable_progress_bar()  # of loading weights, which takes a moment
        for name, value in vars(self.model_config).items():
            if "drop" in name and isinstance(value, float):
                setattr(self.model_config, name, 0.0)
        is_t5 = self.model_config.model_type in T5_FAMILY
        kind: Any = AutoModelForTextEncoding if is_t5 else AutoModel
        missing: list[str] = []
        try:
            if weights:
                model, loading = kind.from_pretrained(
                    str(self.folder), config=self.model_config, local_files_only=True, use_safetensors=True,
                    trust_remote_code=False, dtype=torch.float32, output_loading_info=True,
                )  # fmt: skip
                missing = sorted(name for name in loading["missing_keys"] if not name.startswith("pooler."))
            else:
                model = kind.from_config(self.model_config, dtype=torch.float32)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise self._unusable(error) from None
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise self._unusable(f"its files lack weights of the model, {', '.join(missing[:3])}{more}")
        if is_t5:
            model = model.get_encoder()  # what is around it holds its embedding under a second name
        if getattr(model, "pooler", None) is not None:
            model.pooler = None  # another pooling takes its place, so it would never be trained
        _freeze_key_biases(model)
        return PretrainedText(rowwise(model, what=f"retriever.text_model {self.folder}"), self.config)

    def describe(self) -> dict[str, Any]:
        shape = {
            key: value for key, value in self.model_config.to_diff_dict().items()
            if isinstance(value, bool | int | float | str) and "drop" not in key
            and key not in ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache")
        }  # fmt: skip
        digest = hashlib.blake2b(repr(sorted(shape.items())).encode(), digest_size=8).hexdigest()
        return {
            "kind": "transformers", "model": self.model_config.model_type, "dim": self.model_config.hidden_size,
            "layers": getattr(self.model_config, "num_hidden_layers", None), "config": digest,
            "tokenizer": self.tokenizer_hash, "pooling": self.config.text_pooling,
            "normalized": self.config.text_normalize, "max_tokens": self.config.text_max_tokens,
        }  # fmt: skip


def _freeze_key_biases(model: nn.Module) -> None:
    """Where positions are added to the tokens, or to the logits, a bias of the keys adds the same to all logits of a
    query, so the softmax takes it away: its gradient is zero in truth and nothing but rounding in fact, which no two
    layouts agree on."""
    if ending := KEY_BIASES.get(type(model).__name__):
        for name, parameter in model.named_parameters():
            if name.endswith(ending):
                parameter.requires_grad_(False)
