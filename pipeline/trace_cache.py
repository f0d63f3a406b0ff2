"""Profiles kept by the content they describe, so that an unchanged program is not traced again.

The key covers what decides costs and lineage without running anything: each block's name, reads, writes and
modules (classes, functions and the files they are written in, configuration, hooks; `pipeline.fingerprint`), parameter
shapes, types and whether they train, training mode, batch shapes, the options of the trace, the machine and torch, and
the code of this package. It does not cover the values of weights and batch, nor files that a module reads when it runs.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.fingerprint import UnknownObject, describe_module, describe_tensor
from pipeline.profile import Profile
from pipeline.program import BlockProgram


def trace_key(program: BlockProgram, batch: Mapping[str, Tensor], options: tuple[Any, ...]) -> str:
    """32 hexadecimal digits.

    Raises:
        pipeline.fingerprint.UnknownObject: naming a block and an attribute whose behaviour no key can cover.
    """
    parts = [torch.__version__, _own_code(), repr(options), repr(program.inputs), repr(program.outputs)]
    parts += [f"{name} {describe_tensor(tensor)} {program.axis(name)}" for name, tensor in sorted(batch.items())]
    for block in program.blocks:
        parts.append(f"block {block.name} {block.reads} {block.writes} {block.recomputable}")
        try:
            parts.append(describe_module(block.module))
        except UnknownObject as error:
            raise UnknownObject(f"block {block.name!r}: {error}") from None
        parts += sorted(f"{name} {describe_tensor(p)}" for name, p in program.block_parameters(block.name).items())
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(f"{len(part)} {part}".encode())
    return digest.hexdigest()


def load(path: Path) -> Profile | None:
    """The profile of a cache file, marked as cached; None if there is none.

    Raises:
        ValueError: if the file is no profile.
    """
    if not path.exists():
        return None
    try:
        return replace(Profile.from_json(path.read_text()), cached=True)
    except ValueError as error:
        raise ValueError(f"cached trace {path}: {error}; delete the file") from error


def store(path: Path, profile: Profile) -> None:
    """Write a cache file; it appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(profile.to_json())
    part.replace(path)


@functools.cache
def _own_code() -> str:
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.blake2b(b"".join(path.read_bytes() for path in sources)).hexdigest()
