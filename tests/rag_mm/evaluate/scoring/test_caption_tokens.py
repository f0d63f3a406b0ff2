"""Expected tokens are those of Stanford's PTBTokenizer; where Java is, the same sentences are put to it."""

import pytest
from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

from rag_mm.evaluate.scoring.caption_tokens import has_ptb, ptb_like, tokenize

# Sentences and the tokens that PTBTokenizer (CoreNLP 3.4.1, lower case, COCO's punctuation removed) makes of them.
SENTENCES = {
    "A man's dog doesn't run, it can't!": "a man 's dog does n't run it ca n't",
    "Two (2) cats & a dog -- sitting.": "two -lrb- 2 -rrb- cats & a dog sitting",
    'the "big" one; the end...': "the big one the end",
    "U.S. flag at 10:30 a.m. in St. Louis": "u.s. flag at 10:30 a.m. in st. louis",
    "black-and-white photo: 1,000 people": "black-and-white photo 1,000 people",
    "it's they're I've we'll you'd I'm": "it 's they 're i 've we 'll you 'd i 'm",
    "Café naïve résumé — dash": "café naïve résumé dash",
    "“quoted” ‘single’ it’s": "quoted single it 's",
    "cannot gonna": "can not gon na",
    "$5 50% #1": "$ 5 50 % # 1",
    "and/or w/ o'clock": "and/or w / o'clock",
    "Mr. Smith's 3-year-old's toy": "mr. smith 's 3-year-old 's toy",
    "dogs' bowls": "dogs bowls",
    "a [b] {c}": "a -lsb- b -rsb- -lcb- c -rcb-",
    "1950's t-shirt 2nd 4x4 the 16th": "1950 's t-shirt 2nd 4x4 the 16th",
    "x = y + z": "x = y + z",
    "": "",
    "a 😀 b": "a b",
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_ptb_like_tokens(sentence: str) -> None:
    assert ptb_like(sentence) == SENTENCES[sentence].split()


@pytest.mark.skipif(not has_ptb(), reason="needs Java on the path")
def test_ptb_parity_with_pycocoevalcap_and_the_table_above() -> None:
    ours = tokenize(list(SENTENCES), "ptb")
    assert ours == [tokens.split() for tokens in SENTENCES.values()]
    plain = {i: [{"caption": s}] for i, s in enumerate(SENTENCES) if s.isascii()}  # theirs asks for no encoding
    theirs = PTBTokenizer().tokenize(plain)
    assert {i: theirs[i][0].split() for i in plain} == {i: ours[i] for i in plain}


def test_whitespace_keeps_everything() -> None:
    assert tokenize(["A  man . "], "whitespace") == [["A", "man", "."]]


def test_ptb_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert not has_ptb()
    with pytest.raises(ValueError, match="needs Java"):
        tokenize(["a"], "ptb")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the archive"):
        tokenize(["a"], "ptb")
