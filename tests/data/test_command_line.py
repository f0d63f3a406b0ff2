from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
import yaml

from data import command_line


@dataclass(frozen=True)
class Train:
    """How long, how fast.

    Attributes:
        steps: how many optimiser steps to take.
        lr: peak learning rate.
        schedule: what the learning rate does.
        name: a label, if any.
        betas: two decay rates.
        amp: compute in half precision.
    """

    steps: int = 10
    lr: float = 1e-3
    schedule: Literal["cosine", "linear"] = "cosine"
    name: str | None = None
    betas: tuple[float, ...] = (0.9, 0.99)
    amp: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"train.steps is {self.steps}; it must be at least 1")


@dataclass(frozen=True)
class Config:
    """Everything.

    Attributes:
        train: the optimiser's part.
        run_dir: where results go.
    """

    train: Train = field(default_factory=lambda: Train(lr=0.5))
    run_dir: str = "runs/x"


def parse(*argv: str, sections: list[str] | None = None) -> Config:
    return command_line.parse(Config, argv, prog="tool", description="Does it.", sections=sections)


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return str(path)


def test_defaults_of_the_outer_class_win_over_those_of_the_section():
    assert parse() == Config() and parse("--train.steps", "3").train.lr == 0.5


def test_flags_win_over_the_file_and_are_typed(tmp_path: Path):
    file = write(tmp_path, "train:\n  steps: 7\n  lr: 1e-4\n  betas: [1, 0.5]\nrun_dir: runs/y\n")
    config = parse("--train.steps=20", "--config", file, "--train.amp", "true", "--run-dir", "1e3")
    assert config == Config(Train(steps=20, lr=1e-4, betas=(1.0, 0.5), amp=True), run_dir="1e3")
    assert isinstance(config.train.betas, tuple) and isinstance(config.train.betas[0], float)


def test_negative_numbers_and_null_are_values():
    config = parse("--train.lr", "-2.5", "--train.name", "null", "--train.schedule", "linear")
    assert config.train == Train(lr=-2.5, schedule="linear")


def test_a_bare_yes_or_no_is_yes():
    assert parse("--train.amp").train.amp is parse("--train.amp", "--run-dir", "x").train.amp is True
    assert parse("--train.amp", "false").train.amp is False


def test_sections_that_other_commands_read_are_skipped(tmp_path: Path):
    file = write(tmp_path, "train: {steps: 4}\nretriever: {dim: 3}\nrun_dir: z\n")
    assert parse("--config", file, sections=["train"]) == Config(Train(lr=0.5, steps=4))
    other = write(tmp_path, "train: {steps: 4, not_ours: 1}\nretriever: {dim: 3}\n")
    assert parse("--config", other, sections=["train.steps"]) == Config(Train(lr=0.5, steps=4))


def test_dump_reads_back(tmp_path: Path):
    config = Config(Train(steps=3, name="ä: b", betas=(0.1,), lr=1e-7), run_dir="null")
    assert parse("--config", write(tmp_path, command_line.dump(config))) == config


def test_print_config_is_yaml_and_exits_0(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_info:
        parse("--print-config", "--train.steps", "5")
    assert exit_info.value.code == 0
    assert yaml.safe_load(capsys.readouterr().out)["train"]["steps"] == 5


def test_help_lists_every_field_with_its_text_and_default(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_info:
        parse("--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert exit_info.value.code == 0
    for text in (
        "--train.steps",
        "how many optimiser steps to take.",
        "default: 10",
        "--run_dir",
        "--config FILE",
        "default: 0.5",
    ):
        assert text in shown
    assert "--train CONFIG" not in shown  # would be offered but not understood


MISTAKES = {  # flags or file -> the one sentence
    "unknown flag": (
        ["--train.step", "3"],
        "option --train.step does not exist; did you mean --train.steps?",
    ),
    "section forgotten": (["--betas", "3"], "option --betas does not exist; did you mean --train.betas?"),
    "type of flag": (["--train.steps", "abc"], "train.steps is 'abc'; it must be a whole number"),
    "choice": (["--train.schedule", "cos"], "train.schedule is 'cos'; it must be one of cosine, linear"),
    "bool": (["--train.amp", "maybe"], "train.amp is 'maybe'; it must be true or false"),
    "post init": (["--train.steps", "0"], "train.steps is 0; it must be at least 1"),
    "no value": (["--train.steps"], "option --train.steps needs a value"),
    "stray": (["foo"], "argument 'foo' is not expected; options are written --name value (see --help)"),
    "no file": (["--config", "/no/c.yaml"], "--config is /no/c.yaml, which does not exist"),
    "unknown key": (
        "train:\n  stps: 3\n",
        "key train.stps in FILE does not exist; did you mean train.steps?",
    ),
    "unknown section": ("trian: {}\n", "key trian in FILE does not exist; did you mean train?"),
    "type in file": ("train: {steps: 7.5}\n", "train.steps in FILE is 7.5; it must be a whole number"),
    "bool as number": ("train: {steps: yes}\n", "train.steps in FILE is True; it must be a whole number"),
    "number as text": ("run_dir: 3\n", "run_dir in FILE is 3; it must be text"),
    "section no mapping": ("train: 3\n", "train in FILE is 3; it must be a mapping of its fields"),
    "no mapping": ("- 3\n", "--config is FILE, which holds a list; it must be a mapping of sections"),
    "malformed": (
        "train: [3\n",
        "--config is FILE, which is not valid YAML at line 2, column 1: expected ',' or ']', but got '<stream end>'",
    ),
    "twice": (
        "run_dir: a\nrun_dir: b\n",
        "--config is FILE, which is not valid YAML at line 2, column 1: key run_dir occurs twice",
    ),
    "objects": (
        "run_dir: !!python/object/apply:os.getcwd []\n",
        "--config is FILE, which is not valid YAML at line 1, column 10: the tag "
        "tag:yaml.org,2002:python/object/apply:os.getcwd is not read; leave it out",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_and_exit_status_2(mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    given, sentence = MISTAKES[mistake]
    file = str(tmp_path / "c.yaml")
    argv = given if isinstance(given, list) else ["--config", write(tmp_path, given)]
    with pytest.raises(SystemExit) as exit_info:
        parse(*argv)
    captured = capsys.readouterr()
    assert exit_info.value.code == 2
    assert captured.err == sentence.replace("FILE", file) + "\n" and captured.out == ""


def test_a_required_field_is_asked_for(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        command_line.parse(Needs, [], prog="tool", description="")
    assert capsys.readouterr().err == "index is not set; it must be text\n"


@dataclass(frozen=True)
class Needs:
    """Nothing without it.

    Attributes:
        index: which index.
    """

    index: str
