"""From a YAML file and dotted flags to a frozen configuration; from a mistake to one sentence.

jsonargparse turns nested dataclasses into flags, help (with the texts of the ``Attributes:`` sections) and
typed values. What it says about a mistake, however, is written for the author of a parser; so keys are
checked here first, against the dataclasses themselves, and its complaints about types are put into one
sentence that names field, value and what is allowed. Such mistakes end with exit status 2.

Files are read as a small part of YAML: no tags, no objects, no anchors, no key twice, and of bounded size and
depth. Anchors make a file of a hundred lines mean a billion values, and a configuration needs none.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import sys
import types
import typing
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import yaml

from data.json_files import read_regular

Config = TypeVar("Config")
LARGEST_FILE = 256 << 10  # bytes; reading takes seconds beyond it, and a configuration takes a hundredth of it
DEEPEST = 20  # levels of mappings and lists in each other
SHOWN = 200  # characters of a wrong value that a message repeats
OWN_FLAGS = ("config", "print_config", "help")


def fail(message: str) -> NoReturn:
    """Say what is wrong with the user's input, in one sentence on stderr, and exit with status 2."""
    print(" ".join(str(message).split()), file=sys.stderr)
    raise SystemExit(2)


def parse(
    config_class: type[Config],
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    sections: Collection[str] | None = None,
) -> Config:
    """Build ``config_class`` from ``--config FILE`` and flags such as ``--train.steps 20``; flags win.

    Args:
        config_class: a frozen dataclass, whose fields may be dataclasses in turn.
        argv: arguments without the program's name; ``-`` and ``_`` in a flag's name are the same.
        prog: shown in the help.
        description: shown in the help.
        sections: read only these top-level keys (``data``) or keys of a section (``train.seed``) of the
            file, since it may serve several commands.

    Raises:
        SystemExit: 0 after ``--help`` and ``--print-config``, 2 after a mistake of the user's.
    """
    leaves = dict(_leaves(config_class))
    flags, own = _split_flags(argv, leaves)
    if "help" in own:
        _parser(config_class, prog=prog, description=description).print_help()
        raise SystemExit(0)
    parser = _parser(config_class, prog=prog, description=description)
    given: dict[str, Any] = {}
    origin = ""
    if "config" in own:
        origin = f" in {own['config']}"
        loaded = _load(Path(own["config"]))
        if sections is not None:
            loaded = _chosen(loaded, sections)
        for key, value in _flatten(config_class, loaded, where=own["config"]):
            given[key] = _convert(parser, leaves, key, value, origin)
    for key, text in flags.items():
        given[key] = _convert(parser, leaves, key, text, "")
    try:
        config = _build(config_class, given)
    except ValueError as error:
        fail(str(error))
    if "print_config" in own:
        print(dump(config), end="")
        raise SystemExit(0)
    return config


def _chosen(loaded: dict[str, Any], sections: Collection[str]) -> dict[str, Any]:
    """What ``sections`` names of a file's contents."""
    chosen = {key: value for key, value in loaded.items() if key in sections}
    for section, _, key in (name.partition(".") for name in sections):
        values = loaded.get(section)
        if key and isinstance(values, dict) and key in values:
            chosen.setdefault(section, {})[key] = values[key]
    return chosen


def dump(config: Any) -> str:
    """The configuration as YAML that `parse` reads back to an equal one."""
    return yaml.safe_dump(_plain(dataclasses.asdict(config)), sort_keys=False, allow_unicode=True)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _fields(config_class: type) -> Iterable[tuple[dataclasses.Field[Any], Any]]:
    hints = typing.get_type_hints(config_class)
    return [(field, hints[field.name]) for field in dataclasses.fields(config_class) if field.init]


def _leaves(config_class: type, prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Dotted name and type of everything that can be set."""
    for field, hint in _fields(config_class):
        if dataclasses.is_dataclass(hint):
            yield from _leaves(typing.cast(type, hint), f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, hint


def _split_flags(argv: Sequence[str], leaves: dict[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """``argv`` as (configuration flags, own flags); the last of several equal ones counts, a bare yes-or-no is yes."""
    flags: dict[str, str] = {}
    own: dict[str, str] = {}
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if token == "-h":
            token = "--help"
        if not token.startswith("--") or token == "--":
            fail(f"argument {token!r} is not expected; options are written --name value (see --help)")
        name, equals, value = token[2:].partition("=")
        key = name.replace("-", "_")
        if key in ("help", "print_config"):
            own[key] = ""
            continue
        if key != "config" and key not in leaves:
            known = ["--" + leaf for leaf in leaves] + ["--config", "--print-config", "--help"]
            fail(f"option --{name} does not exist{_nearest('--' + key, known)}")
        if not equals:
            if leaves.get(key) is bool and (not rest or rest[0].startswith("--")):
                flags[key] = "true"
                continue
            if not rest or rest[0].startswith("--"):
                fail(f"option --{name} needs a value")
            value = rest.pop(0)
        (own if key == "config" else flags)[key] = value
    return flags, own


def _nearest(key: str, known: Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if not near:  # the right name in the wrong section
        near = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2].lstrip("-")][:1]
    return f"; did you mean {near[0]}?" if near else "; see --help for those that do"


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML without tags and anchors, not deep, in which a key that occurs twice is an error."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise yaml.MarkedYAMLError(
                problem="anchors and aliases (& and *) are not read; write the values out",
                problem_mark=event.start_mark,
            )
        if getattr(event, "tag", None) is not None:
            raise yaml.MarkedYAMLError(
                problem=f"the tag {event.tag} is not read; leave it out", problem_mark=event.start_mark
            )
        if self._depth >= DEEPEST:
            raise yaml.MarkedYAMLError(problem=f"more than {DEEPEST} levels deep", problem_mark=event.start_mark)
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        except ValueError as error:  # a date that does not exist, a number of thousands of digits
            raise yaml.MarkedYAMLError(problem=str(error), problem_mark=node.start_mark) from None
        if isinstance(value, int) and value.bit_length() > 64:
            raise yaml.MarkedYAMLError(problem="a number of more than 64 bits", problem_mark=node.start_mark)
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node.value, str) else repr(key_node.value)
            if key in keys:
                raise yaml.MarkedYAMLError(problem=f"key {_shown(key)} occurs twice", problem_mark=key_node.start_mark)
            keys.add(key)
        return super().construct_mapping(node, deep)


def read_yaml(text: str, *, what: str) -> dict[Any, Any]:
    """The mapping in a text of YAML; empty if it holds nothing.

    Args:
        what: says in messages whose contents they are, such as "--config is c.yaml, which".

    Raises:
        ValueError: it is not what this program reads; says where.
    """
    try:
        loaded = yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"{what} is not valid YAML{place}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{what} is not valid YAML: {error}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ValueError(f"{what} holds a {type(loaded).__name__}; it must be a mapping of sections")
    return loaded


def _load(path: Path) -> dict[Any, Any]:
    try:
        text = read_regular(path, largest=LARGEST_FILE, pipes=True).decode("utf-8")
        return read_yaml(text, what=f"--config is {path}, which")
    except FileNotFoundError:
        fail(f"--config is {path}, which does not exist")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"--config is {path}, which cannot be read: {getattr(error, 'strerror', None) or error}")
    except ValueError as error:
        fail(str(error) if str(error).startswith("--config") else f"--config is {path}, which cannot be read: {error}")


def _shown(value: object) -> str:
    """A value as a message repeats it: not all of what is long."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"


def _flatten(config_class: type, loaded: dict[Any, Any], *, where: str, prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Dotted keys and values of a file's mapping, each checked against the dataclasses."""
    hints = {field.name: hint for field, hint in _fields(config_class)}
    for key, value in loaded.items():
        name = f"{prefix}{key}"
        if key not in hints:
            near = "" if len(name) > SHOWN else _nearest(name, [prefix + known for known in hints])
            fail(f"key {_shown(name)} in {where} does not exist{near}")
        if not dataclasses.is_dataclass(hints[key]):
            yield name, value
        elif value is None:
            continue  # a section whose lines are all commented out
        elif isinstance(value, dict):
            section = typing.cast(type, hints[key])
            yield from _flatten(section, value, where=where, prefix=f"{name}.")
        else:
            fail(f"{name} in {where} is {_shown(repr(value))}; it must be a mapping of its fields")


def _parser(config_class: type, *, prog: str, description: str) -> Any:
    import jsonargparse

    parser = jsonargparse.ArgumentParser(
        prog=prog, description=description, exit_on_error=False, default_env=False, add_help=False
    )
    parser.add_argument("--help", "-h", action="store_true", help="show this and exit")
    parser.add_argument("--config", metavar="FILE", type=str, help="YAML file to read first; options win")
    parser.add_argument("--print-config", action="store_true", help="print the resolved YAML and exit")
    parser.add_class_arguments(config_class, as_group=False)
    shown = {key for key, _ in _leaves(config_class)} | set(OWN_FLAGS)
    for action in parser._actions:
        if action.dest not in shown:  # jsonargparse offers a file per section, too; one --config is enough
            action.help = argparse.SUPPRESS
    return parser


def _convert(parser: Any, leaves: dict[str, Any], key: str, value: Any, origin: str) -> Any:
    """``value`` as the type of ``key``: jsonargparse parses it, alone, so that the culprit is known."""
    import jsonargparse

    hint = leaves[key]
    problem = f"{key}{origin} is {_shown(repr(value))}; it must be {describe(hint)}"
    if not origin and hint is str:
        return value  # from the command line every text is a text, also "1e3" and "null"
    if origin and isinstance(value, bool) and hint in (int, float):
        fail(problem)
    if origin and hint is str and not isinstance(value, str):
        fail(problem)
    nested: Any = value
    for part in reversed(key.split(".")):
        nested = {part: nested}
    try:
        if origin:
            parsed = parser.parse_object(nested, defaults=False)
        else:
            parsed = parser.parse_args([f"--{key}={value}"], defaults=False)
    except (jsonargparse.ArgumentError, TypeError, ValueError, KeyError):
        fail(problem)
    result = parsed[key]
    return tuple(result) if typing.get_origin(hint) is tuple and isinstance(result, list) else result


def describe(hint: Any) -> str:
    """A type in words for people: ``int | None`` is "a whole number or none"."""
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(argument) for argument in arguments)
    if origin is dict:
        return f"a mapping, each value {describe(arguments[1])}"
    if origin in (list, tuple):
        return f"a list, each item {describe(arguments[0])}" if arguments else "a list"
    return words.get(hint, getattr(hint, "__name__", str(hint)))


def _build(config_class: type[Config], given: dict[str, Any], prefix: str = "", base: Config | None = None) -> Config:
    """``config_class`` from what is given, then from ``base`` (its section's default), then its defaults."""
    values: dict[str, Any] = {}
    for field, hint in _fields(config_class):
        name = prefix + field.name
        if dataclasses.is_dataclass(hint):
            default = getattr(base, field.name) if base is not None else _default(field)
            values[field.name] = _build(typing.cast(type, hint), given, f"{name}.", default)
        elif name in given:
            values[field.name] = given[name]
        elif base is not None:
            values[field.name] = getattr(base, field.name)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{name} is not set; it must be {describe(hint)}")
    return config_class(**values)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default
