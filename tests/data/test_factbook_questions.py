from hypothesis import given
from hypothesis import strategies as st

from data import factbook_questions as questions
from data.factbook_text import QUESTION_FIELDS

group_lists = st.lists(st.integers(1, 4), min_size=4, max_size=80).map(
    lambda sizes: [tuple(f"c{i}-{j}" for j in range(size)) for i, size in enumerate(sizes)]
)


@given(groups=group_lists)
def test_folds_hold_each_country_out_once_and_never_divide_a_group(groups):
    folds = questions.make_folds(groups)
    everyone = sorted(country for group in groups for country in group)
    assert sorted(country for fold in folds for country in fold.test) == everyone
    sizes = [len(fold.test) for fold in folds]
    assert max(sizes) - min(sizes) <= 4  # one group
    for fold in folds:
        assert not set(fold.dev) & set(fold.test)
        for group in groups:
            assert len({(c in fold.dev, c in fold.test) for c in group}) == 1


def test_folds_do_not_depend_on_the_order_of_groups():
    groups = [(f"c{i}",) for i in range(50)] + [("x", "y")]
    assert questions.make_folds(groups) == questions.make_folds(groups[::-1])


def test_every_field_has_three_wordings_and_all_are_used():
    assert list(questions.TEMPLATES) == list(QUESTION_FIELDS)
    for field, wordings in questions.TEMPLATES.items():
        assert len(set(wordings)) == len(wordings) >= 3
        used = {questions.name_question(field, country=f"c{i}", title="X") for i in range(60)}
        assert used == {wording.format(x="X") for wording in wordings}


def test_names_stand_in_a_sentence():
    assert questions.with_article("Nepal") == "Nepal"
    assert questions.with_article("The Gambia") == "the Gambia"
    assert questions.with_article("Netherlands") == "the Netherlands"
    assert questions.with_article("United States") == "the United States"
    assert questions.with_article("Dominican Republic") == "the Dominican Republic"
    assert questions.with_article("Cook Islands") == "the Cook Islands"


def test_a_wording_is_the_same_in_every_process():
    asked = questions.name_question("capital", country="np", title="Nepal")
    assert asked == "name the capital city of Nepal."
    assert questions.stable_hash("a", 1) == 9331952569449725121
