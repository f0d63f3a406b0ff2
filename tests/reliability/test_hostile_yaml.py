"""Configuration files that somebody made to do harm: one sentence and status 2, in bounded time and memory."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from data import command_line
from rag_mm.config import Config

ROOT = Path(__file__).parents[2]
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)
MERGES = "a0: &a0 {k: v}\n" + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 10))
NASTY = {
    "a billion laughs": (LAUGHS, "anchors and aliases"),
    "a billion merges": (MERGES, "anchors and aliases"),
    "laughs inside of a text": (f"parallel:\n  pins: {LAUGHS!r}\n", "parallel.pins"),
    "an alias of itself": ("train: &t\n  x: *t\n", "anchors and aliases"),
    "code": ("run_dir: !!python/object/apply:os.system ['touch MARKER']\n", "the tag"),
    "code by name": ("run_dir: !!python/name:os.system\n", "the tag"),
    "a module": ("run_dir: !!python/module:antigravity\n", "the tag"),
    "a tag of its own": ("run_dir: !x y\n", "the tag !x"),
    "a number that is none": ("train:\n  steps: !!int ''\n", "the tag"),
    "deep lists": ("run_dir: " + "[" * 20_000, "levels deep"),
    "deep mappings": ("{a: " * 20_000, "levels deep"),
    "deep blocks": ("- " * 20_000, "levels deep"),
    "deep keys": ("? " * 20_000, "levels deep"),
    "a number of 5000 digits": (f"train:\n  steps: {'9' * 5000}\n", "digits"),
    "a number of a million bits": (f"train:\n  steps: 0x{'f' * 250_000}\n", "64 bits"),
    "a date that does not exist": ("run_dir: 2026-99-99\n", "month"),
    "a list as a key": ("[a]: b\n[a]: c\n", "not valid YAML"),
    "a long key": ("? " + "k" * 100_000 + "\n: 1\n", "does not exist"),
    "a long value": (f"train:\n  steps: {'v' * 100_000}\n", "train.steps"),
    "too long": ("# " + "x" * (300 << 10), "at most 262144 are read"),
    "not UTF-8": ("run_dir: \udcff\n", "utf-8"),
    "NUL": ("run_dir: a\0b\n", "not valid YAML"),
    "UTF-16": ("\udcff\udcfer\0u\0n\0", "utf-8"),
    "two documents": ("run_dir: a\n---\nrun_dir: b\n", "not valid YAML"),
}


@pytest.mark.parametrize("name", NASTY)
def test_nasty_files_end_in_one_sentence(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    text, reason = NASTY[name]
    Path("c.yaml").write_bytes(text.encode(errors="surrogateescape"))
    begun = time.process_time()
    status, said = parsed(["--config", "c.yaml"], capsys)
    assert status == 2 and reason in said and said.count("\n") == 1 and len(said) < 1000
    assert time.process_time() - begun < 5  # the largest take half a second
    assert not Path("MARKER").exists()


def parsed(argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    try:
        command_line.parse(Config, argv, prog="tool", description="")
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code, capsys.readouterr().err
    return 0, ""


FRAGMENTS = st.sampled_from(
    ["train", "steps", "run_dir", ":", ": ", "\n", "\n  ", "- ", "[", "]", "{", "}", ",", "&a ", "*a", "!!int ", "!x ",
     "|\n", ">\n", "? ", "<<: ", "'", '"', "#", "%YAML 1.1\n", "---\n", "...\n", "0x", "1:60:60", "2026-02-30", ".inf",
     "~", "\t", "\0", "\x85", "é", "\ufeff", "@", "`", "9" * 30]
)  # fmt: skip


@settings(max_examples=15)
@given(st.one_of(st.lists(FRAGMENTS, max_size=25).map(lambda parts: "".join(parts).encode()), st.binary(max_size=200)))
def test_any_bytes_are_a_configuration_or_one_sentence(data: bytes):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr(command_line.sys, "stderr", type("Said", (), {"write": lambda self, text: said.append(text)})())
        path = Path(folder) / "c.yaml"
        path.write_bytes(data)
        try:
            command_line.parse(Config, ["--config", str(path)], prog="tool", description="")
        except SystemExit as end:
            assert end.code == 2 and "".join(said).count("\n") == 1


@given(st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**63), st.text(max_size=5), st.floats(allow_nan=False)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=8,
).filter(lambda value: isinstance(value, dict)))  # fmt: skip
@settings(max_examples=60)
def test_what_is_read_is_what_safe_yaml_reads(contents: dict[str, object]):
    class WithoutAnchors(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    text = yaml.dump(contents, Dumper=WithoutAnchors, allow_unicode=True)
    assert command_line.read_yaml(text, what="it") == yaml.safe_load(text)


@pytest.mark.parametrize("path", ["/dev/zero", "/proc/self/mem", "/"])
def test_devices_and_folders_are_not_read(path: str, capsys: pytest.CaptureFixture[str]):
    status, said = parsed(["--config", path], capsys)
    assert status == 2 and path in said


def test_laughs_take_no_memory(tmp_path: Path):
    """In a process that may not take more than 400 MB beyond what its imports took."""
    path = tmp_path / "c.yaml"
    path.write_text(LAUGHS)
    program = (
        "import resource, sys; from data import command_line; from tests.data.test_command_line import Config\n"
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize() + (400 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size, size))\n"
        "command_line.parse(Config, ['--config', sys.argv[1]], prog='tool', description='')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (60, 60)),
    )  # fmt: skip
    assert done.returncode == 2 and "anchors and aliases" in done.stderr
