"""Tiny public models with random weights, as files, for towers that read such."""

from __future__ import annotations

import json
from pathlib import Path

import torch

WORDS = ["what", "is", "the", "capital", "of", "nepal", "peru", "chad", "flag", "red", "a", "country", "in", "asia"]


def bert_folder(folder: Path, *, dropout: float = 0.1, words: list[str] | None = None) -> str:
    """A BERT of two layers, and its tokenizer."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(words or WORDS), *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate(dict.fromkeys(vocabulary))}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=64, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout, initializer_range=0.3,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    return str(folder)


def clip_config(folder: Path, *, name: str = "tiny-clip") -> str:
    """An open_clip model of two layers a tower, as a JSON file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(
        json.dumps(
            {
                "embed_dim": 16,
                "vision_cfg": {"image_size": 24, "layers": 2, "width": 64, "patch_size": 8},
                "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 2},
            }
        )
    )
    return str(path)
