import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from data.dataset import Dataset


@pytest.fixture(scope="module")
def tokenizer(factbook: Dataset):
    return AutoTokenizer.from_pretrained(str(factbook.directory / "tokenizer"))


def test_loads_through_transformers_and_has_the_special_tokens(tokenizer, factbook: Dataset):
    assert len(tokenizer) == len(factbook.tokenizer) == 600
    assert tokenizer.convert_tokens_to_ids(["<pad>", "<bos>", "<sep>", "<q>"]) == [0, 1, 2, 3]
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.sep_token_id) == (0, 1, 2)
    assert tokenizer("a")["input_ids"] == tokenizer("a", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(tokenizer("<q>Nepal<sep>")["input_ids"], skip_special_tokens=True) == "Nepal"


def test_every_document_decodes_to_itself(tokenizer, factbook: Dataset):
    for document in factbook.store.fetch(factbook.store.ids):
        assert tokenizer.decode(tokenizer(document.text)["input_ids"]) == document.text


@given(text=st.text().filter(lambda text: "<" not in text))
def test_every_text_decodes_to_itself_in_nfc(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == unicodedata.normalize("NFC", text)


def test_a_newline_is_always_one_token_of_its_own(tokenizer):
    tokens = tokenizer.tokenize("a\n\nb \n c:\n")
    assert [i for i, token in enumerate(tokens) if "Ċ" in token] == [1, 2, 5, len(tokens) - 1]
    assert tokens.count("Ċ") == 4


def test_digits_stand_singly_and_case_is_kept(tokenizer):
    assert tokenizer.tokenize("18 2026") == ["1", "8", "Ġ", "2", "0", "2", "6"]
    assert tokenizer("asia")["input_ids"] != tokenizer("Asia")["input_ids"]


def test_a_value_is_cut_on_its_line_as_it_is_alone(tokenizer, factbook: Dataset):
    """What the copying reader relies on: the answer's tokens stand in the document, in a row."""
    for sample in factbook.questions("train"):
        answer = tokenizer(sample.answers[0] + "\n")["input_ids"]
        text = factbook.store.fetch([sample.subject])[0].text
        start = text.index(f"\n{sample.field}: ")
        before = len(tokenizer(text[: start + len(f"\n{sample.field}: ")])["input_ids"])
        assert tokenizer(text)["input_ids"][before : before + len(answer)] == answer
