"""Folders of tiny public models with random weights, and the tokenizer of a data set: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from data.dataset import Dataset


def llama_config(vocabulary: int, **options: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, pad_token_id=0, **options,
    )  # fmt: skip


def gpt2_config(vocabulary: int) -> GPT2Config:
    return GPT2Config(vocab_size=vocabulary, n_embd=32, n_layer=3, n_head=4, n_positions=512, pad_token_id=0)


def save_model(folder: Path, dataset: Dataset, *, kind: str = "llama", seed: int = 0) -> Path:
    """The folder, with weights that are lively enough to say different things."""
    make = {"llama": llama_config, "gpt2": gpt2_config}[kind]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(make(len(dataset.tokenizer)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name and "ln_" not in name:
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    dataset.tokenizer.save_pretrained(folder)
    return folder
