"""Tiny public models with random weights, as files, for towers that read such."""

from __future__ import annotations

import json
from pathlib import Path

import torch

WORDS = ["what", "is", "the", "capital", "of", "nepal", "peru", "chad", "flag", "red", "a", "country", "in", "asia"]


def bert_folder(folder: Path, *, dropout: float = 0.1, words: list[str] | None = None) -> str:
    """A BERT of two layers, and its tokenizer."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=_save_tokenizer(folder, words), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=64, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout, initializer_range=0.3,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    return str(folder)


def encoder_folder(folder: Path, kind: str) -> str:
    """The same of another kind: the class ``kind`` + "Model" of transformers, of two layers."""
    import transformers

    vocabulary, side = _save_tokenizer(folder), {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    size = {**side, "intermediate_size": 24, "max_position_embeddings": 66, "initializer_range": 0.3}
    family: str = kind
    if kind == "DistilBert":
        size = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": 66}
        size["initializer_range"] = 0.3
    elif kind in ("T5", "T5Encoder"):
        family, size = "T5", {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
        size["initializer_factor"] = 1.0
    elif kind in ("Albert", "Electra"):
        size["embedding_size"] = 12
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(vocab_size=vocabulary, pad_token_id=0, **size)
    model = getattr(transformers, f"{kind}Model")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") and parameter.dim() == 1:
                parameter.normal_(std=0.3)  # else they start at zero
    model.save_pretrained(folder)
    return str(folder)


def _save_tokenizer(folder: Path, words: list[str] | None = None) -> int:
    """Of words and letters; gives how many."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

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
    return tokenizer.get_vocab_size()


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
