"""Renaming: one consistent map a step, a pure function of its key."""

from hypothesis import given
from hypothesis import strategies as st

from rag_mm.renaming import Renaming, field_values

VALUES = {"capital": [f"City {i}" for i in range(40)], "domain": [f".{c}{d}" for c in "abc" for d in "xyz"]}


def test_a_value_has_one_name_a_step_and_another_in_the_next():
    first, again, later = (Renaming(VALUES, seed=1, step=s) for s in (7, 7, 8))
    names = [first.value("capital", v) for v in VALUES["capital"]]
    assert names == [again.value("capital", v) for v in VALUES["capital"]]
    assert names != [later.value("capital", v) for v in VALUES["capital"]]
    assert sum(a != b for a, b in zip(names, VALUES["capital"], strict=True)) > 30


def test_documents_and_answers_are_renamed_alike():
    renaming = Renaming(VALUES, seed=0, step=0)
    fields = {"capital": "City 3", "domain": ".ax", "area": "5 sq km"}
    renamed = renaming.fields(fields)
    assert renamed["capital"] == renaming.value("capital", "City 3")
    assert renamed["area"] == "5 sq km"  # not among the values that may move


def test_half_are_other_values_and_half_are_new_words():
    known, new = 0, 0
    for step in range(50):
        renaming = Renaming(VALUES, seed=0, step=step)
        for value in VALUES["capital"]:
            if renaming.value("capital", value) in VALUES["capital"]:
                known += 1
            else:
                new += 1
    assert 0.4 < known / (known + new) < 0.75  # a splice can rebuild a known value


def test_fraction_zero_is_the_identity():
    renaming = Renaming(VALUES, seed=0, step=0, fraction=0.0)
    assert all(renaming.value("capital", v) == v for v in VALUES["capital"])


@given(
    st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\n"), min_size=1).map(str.strip).filter(bool),
        min_size=1,
    ),
    st.integers(0, 99),
)
def test_names_are_one_non_empty_line(values: list[str], step: int):
    renaming = Renaming({"f": values}, seed=3, step=step)
    for value in values:
        name = renaming.value("f", value)
        assert name and "\n" not in name


def test_field_values_are_distinct_and_sorted():
    assert field_values([{"a": "2"}, {"a": "1", "b": "x"}, {"a": "2"}]) == {"a": ["1", "2"], "b": ["x"]}
