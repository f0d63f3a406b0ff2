"""What a run listens on: nothing but loopback, where its ranks find each other."""

from __future__ import annotations

import ipaddress
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.processes import children
from tests.rag_mm.test_trainer import ROOT, command

LISTENING = "0A"


def listening(pids: set[int]) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Addresses of the TCP sockets that these processes listen on."""
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(os.readlink(entry))
            except OSError:  # closed meanwhile
                continue
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and f"socket:[{fields[9]}]" in inodes:
                words = bytes.fromhex(fields[1].split(":")[0])  # of the machine's byte order, four bytes each
                found.append(ipaddress.ip_address(b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))))
    return found


@pytest.mark.slow
def test_ranks_listen_on_loopback_only(factbook_dir: Path, tmp_path: Path):
    two = ("--train.steps", "2000", "--parallel.pipeline_stages", "2", "--parallel.verify", "off")
    launcher = subprocess.Popen(command(factbook_dir, tmp_path, *two), cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 300
        while not (tmp_path / "metrics.jsonl").exists() or not (tmp_path / "metrics.jsonl").stat().st_size:
            assert launcher.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        found = listening({launcher.pid, *children(launcher.pid)})
    finally:
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(timeout=200)
    assert found and all(address.is_loopback for address in found), found
