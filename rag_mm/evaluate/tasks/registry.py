"""Tasks by name, this framework's own and anybody's: ``package.module:Class`` names a task that is not in the list."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from collections.abc import Mapping
from typing import Any

from rag_mm.evaluate.tasks.captions import Captions
from rag_mm.evaluate.tasks.image_text import Coco1k, Coco5k, Flickr30k, ImageText
from rag_mm.evaluate.tasks.infoseek import InfoSeek
from rag_mm.evaluate.tasks.kilt import Kilt
from rag_mm.evaluate.tasks.qa import OpenDomainQa
from rag_mm.evaluate.tasks.retrieval import Retrieval
from rag_mm.evaluate.tasks.task import Task
from rag_mm.evaluate.tasks.vqa import OkVqa, Vqa
from rag_mm.evaluate.tasks.zero_shot import ZeroShot

TASKS: dict[str, type[Task[Any, Any]]] = {}


def register(task: type[Task[Any, Any]]) -> type[Task[Any, Any]]:
    """Put a task into the list, under its ``name``; usable as a decorator.

    Raises:
        ValueError: if the name is taken by another class.
    """
    if TASKS.get(task.name, task) is not task:
        raise ValueError(f"task {task.name!r} is there already: {TASKS[task.name].__qualname__}")
    TASKS[task.name] = task
    return task


def find(name: str) -> type[Task[Any, Any]]:
    """The class of a task.

    Raises:
        ValueError: if there is none of that name, or the module or class cannot be imported.
    """
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"task {name!r} cannot be imported: {error}") from None
        if not (isinstance(found, type) and issubclass(found, Task)):
            raise ValueError(f"task {name!r} is no subclass of rag_mm.evaluate.tasks.task.Task")
        return found
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"task is {name!r}; {hint}known: {', '.join(TASKS)}, or package.module:Class")
    return TASKS[name]


def make(name: str, options: Mapping[str, Any]) -> Task[Any, Any]:
    """A task with options.

    Raises:
        ValueError: if the task has no such option; says which it has.
    """
    task = find(name)
    fields: list[str] = [f.name for f in dataclasses.fields(task)] if dataclasses.is_dataclass(task) else []
    for option in options:
        if option not in fields:
            raise ValueError(
                f"--{option} does not apply to task {name}, whose options are: {', '.join(fields) or 'none'}"
            )
    return task(**options)


_OWN: tuple[type[Task[Any, Any]], ...] = (
    OpenDomainQa, Kilt, Vqa, OkVqa, InfoSeek, Retrieval, ImageText, Coco5k, Coco1k, Flickr30k, Captions, ZeroShot,
)  # fmt: skip
for _task in _OWN:
    register(_task)
