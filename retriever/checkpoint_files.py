"""What a checkpoint is on disk: safetensors of every rank, and a ``state.json`` that seals them.

The tensors are written and read by ``torch.distributed.checkpoint`` in its safetensors storage, so that nothing
in a checkpoint is a pickle: its own ``.metadata`` file, which is one, does not exist here, and reading a
checkpoint that somebody else made runs none of their code. ``state.json`` comes last and names every file with
its size and SHA-256, and itself by the checksum of its contents: a checkpoint that is cut short, has a
flipped bit or holds a foreign file is found before a tensor is read, and named. The price is one more
pass over the files on loading.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException

from data.json_files import read_json
from retriever.durable_files import sha256, sync
from retriever.shared_disk import patiently

STATE = "state.json"
FORMAT = 2
SUFFIX = ".safetensors"


class DamagedCheckpointError(ValueError):
    """A checkpoint whose files are not those that were written."""


class IncompleteCheckpointError(DamagedCheckpointError):
    """One of a checkpoint's files is missing; a shared disk may show it later."""


def write_tensors(
    folder: Path, tensors: Mapping[str, Tensor], *, rank: int, group: Any, no_dist: bool
) -> dict[str, Any]:
    """Write this rank's tensors, durably; with several ranks all of ``group`` call it.

    Args:
        tensors: contiguous, by global name; what several ranks give under one name is written once.
        rank: of this process in ``group``.

    Returns:
        size and checksum of each file that this rank wrote, by name.

    Raises:
        OSError: on every rank, if a rank could not write.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with _one_process_is_wanted():
        try:
            dcp.save(dict(tensors), storage_writer=writer, process_group=group, no_dist=no_dist)
        except CheckpointException as error:
            causes = "; ".join(sorted({str(cause) for cause, _ in error.failures.values()}))
            raise OSError(causes) from error
    mine = sorted(folder.glob(f"shard-{rank + 1:05d}-*{SUFFIX}"))
    return {path.name: {"size": path.stat().st_size, "sha256": sha256(path)} for path in mine}


def seal(folder: Path, state: Mapping[str, Any], files: Mapping[str, Any]) -> None:
    """Write ``state.json``, which makes the folder a checkpoint, and make all of it durable."""
    document = {"format": FORMAT, **state, "files": dict(files)}
    document["checksum"] = _checksum(document)
    with (folder / STATE).open("w", encoding="utf-8") as file:
        json.dump(document, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    sync(folder)


def read_state(folder: Path) -> dict[str, Any]:
    """``state.json`` of a checkpoint.

    Raises:
        FileNotFoundError: there is no checkpoint.
        DamagedCheckpointError: it is not what was written.
    """
    path = folder / STATE
    try:
        document: dict[str, Any] = read_json(path)
        checksum, right = document["checksum"], _checksum(document)
        found = document["format"]
    except FileNotFoundError:
        raise FileNotFoundError(
            f"no checkpoint at {folder}; expected a folder such as RUN/checkpoints/step-900"
        ) from None
    except ValueError as error:
        raise DamagedCheckpointError(str(error)) from None
    except KeyError as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error} is missing") from None
    if found != FORMAT:
        raise DamagedCheckpointError(f"{path} has format {found}, this version reads {FORMAT}")
    if checksum != right:
        raise DamagedCheckpointError(f"{path} is damaged: its contents do not have the checksum in it")
    files = document.get("files")
    if not isinstance(files, dict) or not all(
        isinstance(entry, dict) and isinstance(entry.get("size"), int) and isinstance(entry.get("sha256"), str)
        for entry in files.values()
    ):
        raise DamagedCheckpointError(f"{path} is damaged: files must name each file's size and sha256")
    return document


def verify(folder: Path, *, rank: int = 0, num_ranks: int = 1) -> None:
    """Read a checkpoint's files and compare their checksums; each rank takes every ``num_ranks``-th one.

    Raises:
        FileNotFoundError: there is no checkpoint.
        DamagedCheckpointError: names the file that is missing, foreign, cut short or changed.
    """
    files = read_state(folder)["files"]
    there = {path.name for path in folder.glob(f"*{SUFFIX}")}
    for name in sorted(there - set(files)):
        raise DamagedCheckpointError(f"{folder / name} is not a file of this checkpoint; remove it")
    for name in sorted(set(files) - there):
        raise IncompleteCheckpointError(f"{folder / name} is missing")
    for name in sorted(files)[rank::num_ranks]:
        path, right = folder / name, files[name]
        if not path.is_file():  # a pipe or a device would never end
            raise DamagedCheckpointError(f"{path} is not a regular file")
        if path.stat().st_size != right["size"]:
            raise DamagedCheckpointError(f"{path} has {path.stat().st_size} bytes, {right['size']} were written")
        if sha256(path) != right["sha256"]:
            raise DamagedCheckpointError(f"{path} has changed since it was written (its checksum differs)")


def load_tensors(tensors: Mapping[str, Tensor], folder: Path, *, no_dist: bool, wait_s: float = 0.0) -> None:
    """Fill tensors in place from a checkpoint that any layout wrote; `verify` it first.

    Args:
        wait_s: longest time in which what cannot be read is read again.

    Raises:
        OSError: on every rank, if one could not read; names the checkpoint.
        ValueError: if one is missing in the checkpoint or has another shape there; names the checkpoint.
    """
    with _one_process_is_wanted():
        try:
            dcp.load(dict(tensors), storage_reader=_Reader(folder, wait_s), no_dist=no_dist)
        except CheckpointException as error:
            causes = "; ".join(sorted({str(cause) for cause, _ in error.failures.values()}))
            # What a rank meets when it reads the names of the tensors, torch tells in an error of another kind.
            if any(isinstance(cause, OSError) for cause, _ in error.failures.values()) or "read failed" in causes:
                raise OSError(f"the checkpoint {folder} could not be read: {causes}") from error
            raise ValueError(f"the checkpoint {folder} does not fit this configuration: {causes}") from error


class _Reader(HuggingFaceStorageReader):
    """Reads again what a disk refuses once: here, before the ranks tell each other that a rank failed."""

    def __init__(self, folder: Path, wait_s: float) -> None:
        super().__init__(str(folder))
        self._folder, self._wait_s = folder, wait_s

    def read_metadata(self, *arguments: Any, **options: Any) -> Any:
        return self._patiently(lambda: super(_Reader, self).read_metadata(*arguments, **options))

    def read_data(self, *arguments: Any, **options: Any) -> Any:
        return self._patiently(lambda: super(_Reader, self).read_data(*arguments, **options))

    def _patiently(self, read: Callable[[], Any]) -> Any:
        def opened() -> Any:
            try:
                return read()
            except RuntimeError as error:  # safetensors' word for a file that does not open, whatever the reason
                if "unable to open file" in str(error):
                    raise OSError(errno.EIO, str(error)) from error
                raise

        return patiently(opened, folder=self._folder, limit_s=self._wait_s) if self._wait_s else opened()


def _checksum(document: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in document.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


@contextmanager
def _one_process_is_wanted() -> Iterator[None]:
    """Keep torch from warning that a checkpoint is read or written without torch.distributed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
