"""JSON that other programs may have written or a disk may have damaged: read so that the mistake names the file.

``json.loads`` says neither which file was wrong, nor does it stop at a size, and nesting that is deep enough
ends in a ``RecursionError``. Every small JSON file of an artefact (``dataset.json``, ``splits.json``, a manifest) is
read through here: one ``ValueError`` with the path, whatever was wrong with the contents.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

LARGEST = 1 << 30  # bytes; ids and entities of the largest data sets take less


def read_json(path: str | Path, *, kind: type = dict, largest: int = LARGEST, advice: str = "") -> Any:
    """The value in a JSON file.

    Args:
        kind: what the outermost value must be.
        largest: bytes that are read at most.
        advice: what to do about a file that is damaged, for the message.

    Raises:
        OSError: if there is no such file or it cannot be read.
        ValueError: names the file: not a regular file, too large, not UTF-8, not JSON, or of another kind.
    """
    advice = f"; {advice}" if advice else ""
    try:
        value = json.loads(read_regular(path, largest=largest).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is damaged: not UTF-8 (byte {error.start}){advice}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged: not JSON ({error}){advice}") from None
    except RecursionError:
        raise ValueError(f"{path} is damaged: nested too deeply{advice}") from None
    except ValueError as error:  # a number of thousands of digits, or what `read_regular` says
        text = str(error)
        raise ValueError(f"{text if str(path) in text else f'{path} is damaged: {text}'}{advice}") from None
    if not isinstance(value, kind):
        raise ValueError(f"{path} is damaged: it holds a {type(value).__name__}, not a {kind.__name__}{advice}")
    return value


def read_regular(path: str | Path, *, largest: int = LARGEST, pipes: bool = False) -> bytes:
    """The bytes of a regular file (or of what a link leads to); a device would never end, a pipe might not.

    Args:
        largest: bytes that are read at most.
        pipes: a pipe will do: the user named it, as the shell's ``<(command)`` does.

    Raises:
        OSError: if there is no such file or it cannot be read.
        ValueError: if it is something else, or larger than ``largest`` bytes.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if pipes else os.O_NONBLOCK))
    try:
        status = os.fstat(descriptor)
        if not (stat.S_ISREG(status.st_mode) or (pipes and stat.S_ISFIFO(status.st_mode))):
            raise ValueError(f"{path} is not a regular file")
        parts, left = [], 0 if status.st_size > largest else largest + 1
        while left > 0 and (part := os.read(descriptor, min(left, 1 << 20))):
            parts.append(part)
            left -= len(part)
    finally:
        os.close(descriptor)
    if left == 0:
        raise ValueError(f"{path} has {max(status.st_size, largest + 1)} bytes; at most {largest} are read")
    return b"".join(parts)
