"""Kills runs at random moments and looks whether anything was lost.

    python -m benchmarks.reliability.torture [--kills 200] [--launched 60] [--minutes 20] [--seed 0] [--out FILE]

A run on two pipeline stages is killed with SIGKILL (one rank, or all processes), started again on its run folder,
killed again, until it is finished; then the next. A third of the kills wait for a moment that matters: a checkpoint
on its way, an index version on its way. After each kill the state must be readable, after the kill of one rank the
others must end within ``LIMIT_S`` and say which rank they lost, and a finished run must have, but for times, the
very ``metrics.jsonl`` of a run that was left alone: each step once, with its samples, its documents, its loss. One run
of six refreshes its index beside the steps, and is killed within such a refresh, too.
Conversions of a corpus are killed the same way, and their result must be the undisturbed one, byte for byte.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.reliability import victims
from benchmarks.reliability.victims import Victim
from rag_mm.metrics import read_metrics

RESULTS = Path(__file__).parent / "results"
LAUNCH_S = 8.0  # that importing everything takes, about
LIMIT_S = 60.0  # for the other ranks to end after one has died
TIMES = ("samples_per_s", "time_s", "peak_memory_bytes")
SETTINGS = (
    "--reader.width", "16", "--reader.heads", "2", "--reader.ffn_width", "24", "--reader.encoder_layers", "1",
    "--reader.dropout", "0.1", "--retriever.text_dim", "32", "--objectives.pdist", "0.5", "--train.batch_size", "8",
    "--train.retriever_batch_size", "8", "--train.pair_batch_size", "8", "--train.retriever_share", "0.2",
    "--train.distill_share", "0.1", "--checkpoint.every_n_steps", "3", "--parallel.verify", "off",
    "--parallel.timeout_s", "30", "--parallel.timeline", "false",
)  # fmt: skip
# How the index follows: often and between the steps, or beside them, which starts a process for each refresh.
REFRESHES = {
    "sync": ("--index.refresh_every_n_steps", "4"),
    "async": ("--index.refresh", "async", "--index.refresh_every_n_steps", "12", "--index.refresh_lag", "4"),
}
MOMENTS = {"checkpoint": "checkpoints/.step-*.tmp", "index": "index/versions/.*.tmp", "refresh": "refresh/step-*"}
SHARE_ASYNC = 1 / 6  # of the runs
REFRESH_S = 6.0  # that a refresh beside the steps takes, about


@dataclass
class Findings:
    """What was done and what went wrong.

    Attributes:
        kills: by what was killed and when.
        faults: what was lost or unreadable, in words; empty is the aim.
        end_s: seconds until the other ranks had ended, after the kill of one.
        waited_s: seconds that a step of the undisturbed run waited for checkpoints, of each step that did.
    """

    kills: Counter[str] = field(default_factory=Counter)
    finished: int = 0
    faults: list[str] = field(default_factory=list)
    end_s: list[float] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)


class Torture:
    """One session.

    Args:
        folder: where runs and logs go.
        dataset: a prepared factbook.
        steps: of each run.
        share_async: of the runs that refresh their index beside the steps.
    """

    def __init__(self, folder: Path, dataset: Path, *, steps: int, seed: int, share_async: float = 0.0) -> None:
        self.folder, self.dataset, self.steps, self.share_async = folder, dataset, steps, share_async
        self.random = random.Random(seed)
        self.found = Findings()
        self._runs = 0
        self._seconds: dict[str, float] = {}
        victims.preload()
        self.right = {refresh: self._undisturbed(refresh) for refresh in REFRESHES if share_async or refresh == "sync"}

    def _argv(self, run: Path, refresh: str) -> list[str]:
        plan = self.folder / "plan.json"
        return [
            "--data.dir", str(self.dataset), "--run-dir", str(run), "--train.steps", str(self.steps), *SETTINGS,
            *REFRESHES[refresh], "--parallel.pipeline_stages", "2",
            *(("--parallel.plan", str(plan)) if plan.exists() else ()),
        ]  # fmt: skip

    def _undisturbed(self, refresh: str) -> list[dict[str, Any]]:
        """The metrics of a run that is left alone; the first one's plan is everybody's: cuts may change last bits."""
        run = self.folder / ("undisturbed" if refresh == "sync" else f"undisturbed-{refresh}")
        argv, log = self._argv(run, refresh), self.folder / f"{run.name}.log"
        victim = victims.fork_ranks(argv, log, num_ranks=2, store=self.folder / "store")
        begun = time.monotonic()
        victim.wait(limit_s=600)
        self._seconds[refresh] = time.monotonic() - begun
        if victim.poll() != [0, 0]:
            raise RuntimeError(f"the undisturbed run failed: {victim.log.read_text()[-2000:]}")
        (self.folder / "plan.json").write_bytes((run / "plan.json").read_bytes())
        waits = [line["time_s"]["checkpoint"] for line in read_metrics(run)]
        self.found.waited_s += [seconds for seconds in waits if seconds > 1e-3]  # else it only looked
        return metrics(run)

    def run_until(self, stop: Callable[[], bool], *, launched: bool) -> None:
        """Kill runs until ``stop``; the last one is brought to its end."""
        while not stop():
            self._runs += 1
            run = self.folder / f"run-{self._runs}"
            refresh = "async" if self.random.random() < self.share_async else "sync"
            while self._start_and_kill(run, refresh, launched=launched, spare=stop()):
                pass
            self._compare(run, refresh)

    def _start_and_kill(self, run: Path, refresh: str, *, launched: bool, spare: bool) -> bool:
        """Start the run; gives whether it has to be started again."""
        log = self.folder / f"{run.name}.log"
        argv = self._argv(run, refresh)
        if launched:
            victim = victims.launch(argv, log)
        else:
            victim = victims.fork_ranks(argv, log, num_ranks=2, store=self.folder / "store")
        moments = ("any", "any", "any", "any", "checkpoint", "index" if refresh == "sync" else "refresh")
        when = "spared" if spare else self.random.choice(moments)
        seconds, killed = self._seconds[refresh], False
        if when == "any":
            killed = self._wait_for(victim, lambda: False, self.random.uniform(0, seconds + LAUNCH_S * launched))
        elif when != "spared":
            skip = self.random.randrange(3) if when != "refresh" else 0
            killed = self._wait_for(victim, appearing(run, MOMENTS[when], skip=skip), 2 * seconds + LAUNCH_S)
            longest = 0.02 if when != "refresh" else REFRESH_S
            killed = self._wait_for(victim, lambda: False, self.random.uniform(0, longest)) and killed
        if not killed or not victim.running():
            victim.wait(limit_s=600)
            statuses = victim.poll()
            if any(statuses):
                self._fault(run, f"a run that was left alone ended with {statuses}")
                return False
            return False
        self._kill(victim, run, when if refresh == "sync" else f"{when} (async refresh)", launched=launched)
        return True

    def _wait_for(self, victim: Victim, moment: Callable[[], bool], limit_s: float) -> bool:
        """Wait for a moment, at most so long; whether the victim still runs then."""
        end = time.monotonic() + limit_s
        while victim.running() and time.monotonic() < end:
            if moment():
                break
            time.sleep(0.0005)
        return victim.running()

    def _kill(self, victim: Victim, run: Path, when: str, *, launched: bool) -> None:
        ranks = victim.ranks()
        one = self.random.random() < 0.5 and len(ranks) == 2
        joined = "proof:" in self._said(victim)
        chosen = self.random.randrange(2) if one else None
        victim.kill([ranks[chosen]] if chosen is not None else [*victim.pids, *ranks])
        who = "one rank" if one else "all"
        self.found.kills[f"{'launched' if launched else 'forked'}, {who}, {when}"] += 1
        try:
            took = victim.wait(limit_s=LIMIT_S)
        except TimeoutError as error:
            self._fault(run, str(error))
            return
        if one:
            self.found.end_s.append(took)
            said = self._said(victim)
            if "Traceback" in said:
                self._fault(run, f"a trace instead of a sentence: {said}")
            elif joined and f"rank {chosen}" not in said and 0 not in victim.poll():  # the other was not done
                self._fault(run, f"nobody named rank {chosen}, but said: {said!r}")
        self._check_readable(run)

    def _said(self, victim: Victim) -> str:
        """What this start of a run has said so far."""
        return victim.log.read_text(errors="replace")[victim.said_before :]

    def _check_readable(self, run: Path) -> None:
        from rag_mm import checkpoint
        from retriever import checkpoint_files
        from retriever import index as index_files

        try:
            step, said = checkpoint.newest_usable(run)
            if said:
                self._fault(run, f"damaged checkpoints: {said}")
            lines = read_metrics(run)
            if step is not None:
                if len(lines) < step:
                    self._fault(run, f"a checkpoint of step {step}, but {len(lines)} lines of metrics")
                state = checkpoint.read_state(run, step)
                if state["index_version"] is not None:
                    index_files.load(run / "index", version=state["index_version"])
                if state.get("refresh") is not None:  # one that is to be begun again from its snapshot
                    checkpoint_files.verify(run / "refresh" / f"step-{state['refresh']['step']}")
            if (run / "index" / "CURRENT").exists():
                index_files.load(run / "index")
        except (OSError, ValueError) as error:
            self._fault(run, f"unreadable: {type(error).__name__}: {error}")

    def _compare(self, run: Path, refresh: str = "sync") -> None:
        self.found.finished += 1
        if left := victims.left_of(run, limit_s=LIMIT_S):
            self._fault(run, f"processes are left: {left}")
        lines = metrics(run)
        if [line["step"] for line in lines] != list(range(1, self.steps + 1)):
            self._fault(run, f"steps {[line['step'] for line in lines]}")
        for right, line in zip(self.right[refresh], lines, strict=False):
            if right != line:
                names = [name for name in right if right[name] != line.get(name)]
                self._fault(run, f"step {line['step']} differs in {names}")
                return

    def convert(self, kills: int) -> None:
        """Kill conversions of a corpus; the result must be that of one that was left alone."""
        corpus = self.folder / "psgs.tsv"
        rows = (f'{i}\t"passage {i} of {"a corpus " * 20}"\ttitle {i // 5}\n' for i in range(6000))
        corpus.write_text("id\ttext\ttitle\n" + "".join(rows))
        right = self._converted(corpus, self.folder / "right", kills=0)[0]
        left, round_ = kills, 0
        while left > 0:
            round_ += 1
            result, used = self._converted(corpus, self.folder / f"converted-{round_}", kills=left)
            left -= used
            self.found.finished += 1
            if result != right:
                self._fault(self.folder / f"converted-{round_}", "another result than the undisturbed conversion")

    def _converted(self, corpus: Path, out: Path, *, kills: int) -> tuple[str, int]:
        from data.prepare import main

        argv = [
            "dpr", "--out", str(out), "--passages", str(corpus), "--workers", "1", "--rows-per-shard", "500",
            "--vocabulary", "0",
        ]  # fmt: skip
        used, log = 0, self.folder / f"{out.name}.log"
        while True:
            begun = time.monotonic()
            victim = Victim([victims.fork(main, argv, log=log, environment={})], log, launched=False)
            limit = self.random.uniform(0, self._convert_s) if used < min(kills, 6) else 600.0
            if self._wait_for(victim, lambda: False, limit):
                victim.kill(victim.pids)
                victim.wait(limit_s=LIMIT_S)
                used += 1
                self.found.kills["forked, data preparation, any"] += 1
                continue
            if victim.poll() != [0]:
                raise RuntimeError(f"the conversion failed: {log.read_text()[-2000:]}")
            if not kills:
                self._convert_s = time.monotonic() - begun
            return folder_hash(out), used

    _convert_s = 5.0

    def _fault(self, run: Path, what: str) -> None:
        self.found.faults.append(f"{run.name}: {what}")
        print(f"FAULT {run.name}: {what}", flush=True)


def appearing(run: Path, pattern: str, *, skip: int) -> Callable[[], bool]:
    """Whether something of that name has appeared, after ``skip`` others that have come since."""
    known = set(run.glob(pattern))

    def moment() -> bool:
        known.update(found for found in run.glob(pattern))
        return len(known) > skip and any(path.exists() for path in run.glob(pattern))

    return moment


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run without what clocks and memory say."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def folder_hash(folder: Path) -> str:
    """Of names and contents of all files."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def session(
    folder: Path, dataset: Path, *, launched: int, forked: int, conversions: int, minutes: float, steps: int, seed: int,
    share_async: float = 0.0,
) -> Findings:  # fmt: skip
    """As many kills of each sort, or as many as fit into the time."""
    end = time.monotonic() + 60 * minutes
    torture = Torture(folder, dataset, steps=steps, seed=seed, share_async=share_async)
    torture.convert(conversions)

    def enough(kind: str, number: int) -> bool:
        done = sum(n for name, n in torture.found.kills.items() if name.startswith(kind) and "preparation" not in name)
        return done >= number or time.monotonic() > end

    torture.run_until(lambda: enough("forked", forked), launched=False)
    torture.run_until(lambda: enough("launched", launched), launched=True)
    return torture.found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reliability.torture", description=str(__doc__).split("\n")[0]
    )
    parser.add_argument("--kills", type=int, default=200, help="in all (default 200)")
    parser.add_argument("--launched", type=int, default=60, help="of them of runs that were launched whole (60)")
    parser.add_argument("--minutes", type=float, default=20, help="stop killing after so many minutes (20)")
    parser.add_argument("--steps", type=int, default=30, help="of each run (30)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (0)")
    parser.add_argument("--data", type=Path, default=Path("data/factbook"), help="prepared factbook")
    parser.add_argument("--out", type=Path, default=RESULTS / "torture.json", help="where the findings go")
    given = parser.parse_args(argv)
    if not 0 <= given.launched <= given.kills:
        parser.error(f"--launched is {given.launched}; it must be between 0 and --kills ({given.kills})")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from benchmarks.pipeline.measuring import machine

    conversions = (given.kills - given.launched) // 7
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        found = session(
            Path(folder), given.data.resolve(), launched=given.launched,
            forked=given.kills - given.launched - conversions, conversions=conversions,
            minutes=given.minutes, steps=given.steps, seed=given.seed, share_async=SHARE_ASYNC,
        )  # fmt: skip
    rows = [{"killed": name, "kills": number} for name, number in sorted(found.kills.items())]
    result = {
        "machine": machine(), "date": time.strftime("%Y-%m-%d"),
        "kills": sum(found.kills.values()), "finished_runs": found.finished,
        "faults": found.faults, "slowest_end_s": max(found.end_s, default=0.0),
        "checkpoint_wait_s": statistics.median(found.waited_s or [0.0]),
        "minutes": (time.monotonic() - begun) / 60, "seed": given.seed, "steps": given.steps, "rows": rows,
    }  # fmt: skip
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "machine"}, indent=2))
    return 1 if found.faults or result["kills"] < given.kills else 0


if __name__ == "__main__":
    raise SystemExit(main())
