"""No package has the official scorer: values are worked by hand from its published rules, stated beside the case."""

import pytest

from rag_mm.evaluate.scoring.vqa import map_words, normalise, strip_punctuation, vqa_accuracy
from rag_mm.evaluate.scoring.vqa_tables import CONTRACTIONS, NUMBERS, PUNCTUATION


@pytest.mark.parametrize("matches", range(11))
def test_accuracy_of_an_answer_that_m_of_ten_annotators_gave(matches: int) -> None:
    """Left out, one of the m leaves m - 1 matches, another m: m/10 min(1, (m-1)/3) + (10-m)/10 min(1, m/3)."""
    expected = {0: 0.0, 1: 0.3, 2: 0.6, 3: 0.9}.get(matches, 1.0)
    # m = 1: 1/10 * 0 + 9/10 * 1/3 = .3; m = 2: 2/10 * 1/3 + 8/10 * 2/3 = .6; m = 3: 3/10 * 2/3 + 7/10 = .9
    references = ["dog"] * matches + ["cat"] * (10 - matches)
    assert vqa_accuracy("dog", references) == pytest.approx(expected)
    assert vqa_accuracy("dog", references, variant="both_on_disagreement") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "expected", "why"),
    [
        ("yes!", "yes ", "a mark that touches no space becomes one"),
        ("yes, no", "yes no", "a comma that touches a space goes"),
        ("red/green, blue", "red green blue", "each mark decides for itself: / touches no space"),
        ("a , b,c", "a  bc", "one comma touches spaces, so every comma goes"),
        ("1,000", "1000", "a comma between digits: marks go without a space"),
        ("1,000 kg/m", "1000 kgm", "and not only the comma"),
        ("3.5", "3.5", "a digit follows the period"),
        ("3.", "3", "none does"),
        (".5", ".5", "a digit follows"),
        ("U.S.A.", "USA", "periods go without a space"),
        ("a.1.b", "a.1b", "the first is followed by a digit, the second is not"),
        ("it's", "it's", "an apostrophe is not in the list of marks"),
        ("a: b", "a: b", "nor is a colon"),
        ("what?!", "what  ", "two marks, two spaces"),
        ("（a）", "（a）", "full-width brackets are not in the list"),
        ("٣,٤", "٣ ٤", "digits are ASCII: this comma stands between none"),
        (". " * 33, " " * 32 + ". ", "the first 32 periods only: the flag UNICODE (32) stands where a count belongs"),
    ],
)
def test_strip_punctuation(text: str, expected: str, why: str) -> None:
    assert strip_punctuation(text) == expected, why


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Two DOGS", "2 dogs"),
        ("none", "0"),
        ("eleven", "eleven"),  # numbers up to ten only
        ("twenty one", "twenty 1"),
        ("dont", "don't"),
        ("don't", "don't"),
        ("lets", "lets"),  # not in the table (let's is, as itself)
        ("couldnt've", "couldn't've"),
        ("somebody'd", "somebodyd"),  # the table's one entry the other way round
        ("ow's'at", "'ow's'at"),
        ("an a the", ""),
        ("  a   cat ", "cat"),
    ],
)
def test_map_words(text: str, expected: str) -> None:
    assert map_words(text) == expected


def test_normalise_is_one_line_then_marks_then_words() -> None:
    assert normalise("\n The\tcats, two! ") == "cats 2"  # "cats, two!": the comma touches a space, ! becomes one


def test_tables() -> None:
    assert len(CONTRACTIONS) == 114  # 120 published, less Im, Ive, Id've, I'dve and two that map to themselves
    assert CONTRACTIONS["y'alld've"] == "y'all'd've"
    assert CONTRACTIONS["twas"] == "'twas"
    assert all(key.replace("'", "") == value.replace("'", "") for key, value in CONTRACTIONS.items())
    assert (len(NUMBERS), NUMBERS["none"], NUMBERS["ten"]) == (12, "0", "10")
    assert len(PUNCTUATION) == 21


def test_official_normalises_the_prediction_always_and_strips_references_on_disagreement_only() -> None:
    # All agree: "yes." keeps its period, and the prediction loses its own: no match at all.
    assert vqa_accuracy("yes.", ["yes."] * 10) == 0.0
    assert vqa_accuracy("yes.", ["yes."] * 10, variant="both_on_disagreement") == 1.0
    # One disagrees: the references lose their periods: 9 of 10 match.
    assert vqa_accuracy("Yes.", ["yes."] * 9 + ["no"]) == 1.0
    # References keep articles, capitals and number words: "two" was said by nine, the prediction has become "2".
    assert vqa_accuracy("two", ["two"] * 9 + ["3"]) == 0.0
    assert vqa_accuracy("2", ["2"] * 2 + ["two"] * 8) == pytest.approx(0.6)  # m = 2
    assert vqa_accuracy("two", ["two"] * 9 + ["3"], variant="both_on_disagreement") == 1.0
    assert vqa_accuracy("dog", ["the dog"] * 5 + ["dog"] * 1 + ["cat"] * 4) == pytest.approx(0.3)  # m = 1
    # The fork matches the five too: m = 6.
    assert vqa_accuracy("dog", ["the dog"] * 5 + ["dog"] * 1 + ["cat"] * 4, variant="both_on_disagreement") == 1.0


def test_the_fork_leaves_everything_alone_where_annotators_agree() -> None:
    assert vqa_accuracy("Yes", ["yes"] * 10, variant="both_on_disagreement") == 0.0
    assert vqa_accuracy("Yes", ["yes"] * 10) == 1.0


def test_equal_annotators_count_by_position() -> None:
    # Two annotators, both "a": left out, one match remains: 1/3.
    assert vqa_accuracy("a b", ["a b", "a b"]) == 0.0  # the article is dropped from the prediction only
    assert vqa_accuracy("b", ["b", "b"]) == pytest.approx(1 / 3)
    assert vqa_accuracy("b", ["b"]) == 0.0  # nobody is left to agree with


def test_empty_predictions_and_no_references() -> None:
    assert vqa_accuracy("", ["yes"] * 9 + ["no"]) == 0.0
    assert (
        vqa_accuracy("the", [""] * 4 + ["no"] * 6) == 1.0
    )  # nothing is left of "the", as four annotators said nothing
    with pytest.raises(ValueError, match="no reference"):
        vqa_accuracy("x", [])
