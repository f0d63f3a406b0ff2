"""A run's configuration as what it changes in another's: dotted fields, and the flags that say the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from data.command_line import parse
from rag_mm.config import Config

Overrides = Mapping[str, Any]


def get(config: Any, name: str) -> Any:
    """The field with a dotted name."""
    for part in name.split("."):
        config = getattr(config, part)
    return config


def replaced(config: Config, overrides: Overrides) -> Config:
    """The configuration with dotted fields replaced, all at once, so that it is checked as a whole."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in overrides.items():
        section, _, field = name.rpartition(".")
        sections.setdefault(section, {})[field] = value
    top = sections.pop("", {})
    nested = {s: dataclasses.replace(getattr(config, s), **fields) for s, fields in sections.items()}
    return dataclasses.replace(config, **nested, **top)


def flags(config: Config, base: Config) -> list[str]:
    """Command-line flags that turn ``base`` into ``config``."""
    found = []
    for section in dataclasses.fields(base):
        mine, other = getattr(config, section.name), getattr(base, section.name)
        if not dataclasses.is_dataclass(mine):
            pairs = [(section.name, mine, other)]
        else:
            pairs = [
                (f"{section.name}.{f.name}", getattr(mine, f.name), getattr(other, f.name))
                for f in dataclasses.fields(mine)
            ]
        for name, value, before in pairs:
            if value != before:
                text = str(value).lower() if isinstance(value, bool) else str(value)
                found += [f"--{name.replace('_', '-') if name == 'run_dir' else name}", text]
    return found


def index_flags(config: Config, *, file: str) -> list[str]:
    """What ``python -m retriever.build`` is told so that it builds for ``config``, which departs from ``file``."""
    base = parse(Config, ["--config", file] if file else [], prog="", description="")
    every = flags(config, base)
    names = ("--data.", "--retriever.", "--index.batch_size", "--index.keep_versions", "--train.seed")
    pairs = [every[i : i + 2] for i in range(0, len(every), 2) if every[i].startswith(names)]
    return [*(["--config", file] if file else []), *(word for pair in pairs for word in pair)]


def config_file(argv: Sequence[str]) -> str:
    """The value of ``--config``, which `data.command_line.parse` keeps to itself; "" if there is none."""
    value = ""
    for i, token in enumerate(argv):
        if token == "--config" and i + 1 < len(argv):
            value = argv[i + 1]
        elif token.startswith("--config="):
            value = token.partition("=")[2]
    return value
