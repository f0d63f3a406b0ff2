"""Pieces: any number of workers and any interruption give the same bytes, and nothing is done twice."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data import prepare
from data.formats import conversion, processes
from data.formats.pieces import STATE
from tests.data.formats import examples
from tests.data.test_prepare import contents

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """120 passages and 30 questions with contexts: 12 and 3 pieces of ten."""
    root = tmp_path_factory.mktemp("source")
    rows = ["id\ttext\ttitle"] + [f"{i}\tPassage {i} says {i * i}.\tTitle {i % 7}" for i in range(120)]
    (root / "psgs.tsv").write_text("\n".join(rows) + "\n")
    contexts = [{"title": f"Title {i % 7}", "text": "-", "passage_id": str(i)} for i in range(120)]
    questions = [
        {"question": f"square of {i}?", "answers": [str(i * i)], "positive_ctxs": [contexts[i]],
         "hard_negative_ctxs": contexts[i + 1 : i + 3]}
        for i in range(30)
    ]  # fmt: skip
    examples.write_lines(root / "train.jsonl", questions)
    return [
        "dpr", "--passages", str(root / "psgs.tsv"), "--train", str(root / "train.jsonl"), "--rows-per-shard", "10",
        "--vocabulary", "300",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(source: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    assert prepare.main([*source, "--out", str(out), "--workers", "1"]) == 0
    return out


def test_two_workers_give_the_same_bytes(source: list[str], undisturbed: Path, tmp_path: Path):
    assert len(list((undisturbed / "documents").glob("*.tar"))) == 13  # 121 lines with the header
    assert prepare.main([*source, "--out", str(tmp_path / "out"), "--workers", "2"]) == 0
    assert contents(tmp_path / "out") == contents(undisturbed)


def test_a_failure_in_the_middle_is_gone_on_from(
    source: list[str], undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole, done = processes.convert, []

    def fails_at_the_eighth(job, piece):
        if len(done) == 7:
            raise OSError("disk full")
        done.append(piece)
        return whole(job, piece)

    monkeypatch.setattr(processes, "convert", fails_at_the_eighth)
    argv = [*source, "--out", str(tmp_path / "out"), "--workers", "1"]
    assert prepare.main(argv) == 1
    assert not (tmp_path / "out").exists()
    state = tmp_path / ".out.preparing" / STATE
    kept = {p.name: p.stat().st_mtime_ns for p in state.glob("documents-*.json")}
    assert len(kept) == 7

    seen: list[dict[str, int]] = []
    monkeypatch.setattr(processes, "convert", whole)
    monkeypatch.setattr(
        conversion, "finish", _then(conversion.finish, lambda: seen.append(
            {p.name: p.stat().st_mtime_ns for p in state.glob("documents-*.json") if p.name in kept}
        ))
    )  # fmt: skip
    assert prepare.main(argv) == 0
    assert seen == [kept]  # what was done was not done again
    assert contents(tmp_path / "out") == contents(undisturbed)


def _then(function, before):
    def wrapped(*args):
        before()
        return function(*args)

    return wrapped


def test_other_options_or_sources_are_not_mixed(
    source: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(conversion, "finish", lambda *args: (_ for _ in ()).throw(OSError("gone")))
    argv = [*source, "--out", str(tmp_path / "out"), "--workers", "1"]
    assert prepare.main(argv) == 1
    capsys.readouterr()
    assert prepare.main([*argv, "--passage-words", "3"]) == 2
    assert "was begun with other options (words was 0, is 3); give the same ones" in capsys.readouterr().err
    table = Path(source[source.index("--passages") + 1])
    stat = table.stat()
    os.utime(table, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    try:
        assert prepare.main(argv) == 2
        assert "psgs.tsv has changed since this conversion began" in capsys.readouterr().err
    finally:
        os.utime(table, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_a_finished_data_set_is_left_alone_and_another_is_not_overwritten(
    source: list[str], undisturbed: Path, capsys: pytest.CaptureFixture[str]
):
    before = contents(undisturbed)
    assert prepare.main([*source, "--out", str(undisturbed)]) == 0
    assert "already holds the data set dpr; nothing to do" in capsys.readouterr().out
    assert prepare.main([*source, "--out", str(undisturbed), "--passage-words", "9"]) == 2
    assert "which holds something else" in capsys.readouterr().err
    assert contents(undisturbed) == before


def test_two_at_once_do_not_mix(source: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    state = tmp_path / ".out.preparing" / STATE
    state.mkdir(parents=True)
    with (state / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert prepare.main([*source, "--out", str(tmp_path / "out")]) == 2
    assert f"another process is converting into {state.parent}; wait for it" in capsys.readouterr().err


def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(source: list[str], undisturbed: Path, tmp_path: Path):
    """Real processes: killed when 3 and 14 of 16 pieces are done, then run to the end."""
    argv = [sys.executable, "-m", "data.prepare", *source, "--out", str(tmp_path / "out"), "--workers", "2"]
    state = tmp_path / ".out.preparing" / STATE
    ended: list[int] = []
    for wanted in (3, 14):
        process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
        until = time.monotonic() + 120
        while process.poll() is None and len(list(state.glob("*-0*.json"))) < wanted and time.monotonic() < until:
            time.sleep(0.002)
        process.kill()
        ended.append(process.wait())
        _wait_for_orphans(process.pid)
    assert ended[0] == -signal.SIGKILL  # the second may have been done before its turn
    finished = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert contents(tmp_path / "out") == contents(undisturbed)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def _wait_for_orphans(session: int) -> None:
    """The workers of a killed process end by themselves."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        found = subprocess.run(["ps", "-o", "pid=", "-s", str(session)], capture_output=True, text=True).stdout.split()
        if not found:
            return
        time.sleep(0.02)
    raise AssertionError(f"processes {found} outlived the one that started them")


@pytest.mark.slow
def test_an_interruption_is_a_status_of_its_own(source: list[str], undisturbed: Path, tmp_path: Path):
    argv = [sys.executable, "-m", "data.prepare", *source, "--out", str(tmp_path / "out"), "--workers", "2"]
    process = subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    state, until = tmp_path / ".out.preparing" / STATE, time.monotonic() + 120
    while process.poll() is None and not list(state.glob("documents-*.json")) and time.monotonic() < until:
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
    _, error = process.communicate(timeout=60)
    assert process.returncode == 75 and error == "interrupted; the same command goes on from here\n"
    assert prepare.main([*source, "--out", str(tmp_path / "out"), "--workers", "1"]) == 0
    assert contents(tmp_path / "out") == contents(undisturbed)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(tmp_path: Path):
    """Five times the rows, as many a piece: the peak stays, but for the bytes of a hash and a place of each row."""
    peaks = []
    for rows in (20_000, 100_000):
        path = tmp_path / f"{rows}.tsv"
        with path.open("w") as file:
            file.write("id\ttext\ttitle\n")
            file.writelines(f"{i}\t{'word ' * 100}{i}\tTitle {i}\n" for i in range(rows))
        program = (
            "import resource, sys; from data import prepare; status = prepare.main(sys.argv[1:]); "
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); sys.exit(status)"
        )
        argv = ["dpr", "--passages", str(path), "--out", str(tmp_path / f"out{rows}"), "--workers", "1"]
        argv += ["--rows-per-shard", "5000", "--vocabulary", "0"]
        done = subprocess.run([sys.executable, "-c", program, *argv], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout.split()[-1]) / 1024)  # MB
    assert peaks[1] - peaks[0] < 12  # 50 MB of text more
