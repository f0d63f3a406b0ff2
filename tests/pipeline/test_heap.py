"""A process that keeps freed memory asks the system for none of it again."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from pipeline.heap import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(2 << 20) for _ in range(32)]  # 8 MiB each
    del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(*[faults() for _ in range(4)])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
def test_pages_are_mapped_once() -> None:
    last = {}
    for mode in ("keep", "default"):
        # glibc raises this threshold by itself, or not, as it goes; told once, it gives each tensor's pages back.
        environment = {**os.environ, "GLIBC_TUNABLES": f"glibc.malloc.mmap_threshold={1 << 20}"}
        program = [sys.executable, "-c", PROGRAM, mode]
        done = subprocess.run(program, capture_output=True, text=True, check=True, env=environment)
        last[mode] = int(done.stdout.split()[-1])
    assert last["keep"] < 100  # of 256 MiB, which are 65,536 pages
    assert last["default"] > 20_000
