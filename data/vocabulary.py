"""The small vocabulary of a data set: byte-level BPE that copies well.

The reader copies words it has never seen, subword by subword, so a value must be cut in the same way
wherever it stands. Hence: ``": "`` is a token of its own (a value after its label starts like the bare
answer), a newline is always one token (the end-of-line and end-of-answer mark), digits stand singly, and
text is only brought to Unicode form NFC, never lower-cased. All 256 bytes are in the vocabulary, so that
``decode(encode(text)) == text`` holds for every NFC text, also one that an edit brings in later; the price
is some hundred entries that are hardly used.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<pad>", "<bos>", "<sep>", "<q>")
SIZE = 600
# In this order: newline; the mark between label and value; words and marks with the space before them; a
# digit; other space.
PIECES = r"\n|: | ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}:]+|:|[^\S\n]+"


def train(texts: Iterable[str], *, size: int = SIZE) -> Tokenizer:
    """Train a vocabulary of ``size`` entries; the same texts in the same order give the same vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path) -> None:
    """Write ``tokenizer`` so that ``transformers.AutoTokenizer.from_pretrained(directory)`` loads it."""
    from transformers import PreTrainedTokenizerFast

    pad, bos, sep, query = SPECIAL_TOKENS
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=bos,
        sep_token=sep,
        extra_special_tokens=[query],
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    ).save_pretrained(str(directory))
