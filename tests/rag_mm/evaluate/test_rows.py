import pytest

from data.command_line import parse
from rag_mm.config import Config
from rag_mm.evaluate.overrides import config_file, flags, replaced
from rag_mm.evaluate.rows import COMPARISONS, ROWS, check_rows, row_of, runs_needed
from rag_mm.objectives import ObjectivesConfig

TRAINED = [name for name, row in ROWS.items() if row.overrides is not None]


def config_of(name: str, base: Config) -> Config:
    overrides = ROWS[name].overrides
    assert overrides is not None
    return replaced(base, overrides(base))


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("base", [Config(), Config(objectives=ObjectivesConfig(pdist=0.5, emdr2=1.0))])
def test_a_run_is_recognised_and_can_be_trained_by_hand(name: str, base: Config) -> None:
    config = config_of(name, base)
    assert row_of(config) == name
    assert parse(Config, flags(config, Config()), prog="", description="") == config


def test_what_the_rows_are() -> None:
    base = Config()
    closed = config_of("closed_book", base)
    assert closed.train.documents == "none" and closed.train.rename == 0
    assert closed.train.steps == base.train.steps - base.train.retriever_steps  # of the reader: as many
    answers, frozen = config_of("joint_answers_only", base), config_of("frozen_retriever", base)
    assert answers.objectives.pdist > 0 and answers.train.joint_retriever_scale > 0
    # both start from the same retriever: nothing that shapes it before the reader starts differs
    assert (answers.train.pairs, answers.objectives.contrastive_on) == ("unasked", "pairs")
    assert (frozen.train.pairs, frozen.objectives.contrastive_on) == ("unasked", "pairs")
    assert answers.train.retriever_steps == frozen.train.retriever_steps
    assert config_of("joint", base) == base
    assert set(TRAINED) == {row.weights_of for row in ROWS.values()} - {""}
    assert {name for a, b, *_ in COMPARISONS for name in (a, b)} <= set(ROWS)


def test_runs_needed() -> None:
    assert runs_needed(["most_frequent", "pixels"]) == []
    assert runs_needed(["closed_book", "gold_document"]) == ["joint", "closed_book"]


def test_unknown_rows_are_refused_with_the_nearest() -> None:
    assert check_rows(["joint", "pixels"], where="--rows") == ["pixels", "joint"]
    with pytest.raises(ValueError, match="did you mean gold_document"):
        check_rows(["gold_documents"], where="--rows")


def test_config_file() -> None:
    assert config_file(["--x", "1", "--config", "a.yaml"]) == "a.yaml"
    assert config_file(["--config=b.yaml"]) == "b.yaml"
    assert config_file(["--x", "1"]) == ""
