"""An index refresh beside the steps: a snapshot of the retriever's weights, and the process that embeds with it.

The snapshot is on disk before the step that it belongs to goes on. Whatever happens from then on, also kill -9 of
everything, the refresh can be done again from it with the same result, so a resumed run adopts the same version at the
same step. Ranks write their own parts of the weights, as they do in checkpoints, so nothing is gathered. The process
runs on the first rank's machine; the price is its memory (one encoder, one index) and what it takes from the steps.

In the run folder: ``refresh/step-<s>/`` are snapshots, kept while a checkpoint names them; ``refresh/job.log`` is what
the process said last.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import retriever
from rag_mm.mesh import Mesh
from rag_mm.saver import BEAT_S
from rag_mm.towers import Towers
from retriever import checkpoint_files as files
from retriever.durable_files import put_folder, remove_folder
from retriever.shared_disk import patiently, twice

_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "RAG_MM_STORE", "MASTER_ADDR", "MASTER_PORT")  # the job is none


class RefreshError(RuntimeError):
    """The process that embeds failed; the message says how."""


@dataclass(frozen=True)
class Pending:
    """A refresh that is not adopted yet.

    Attributes:
        step: before which the snapshot was taken: the version's number.
        weights: hash of what documents are embedded with.
    """

    step: int
    weights: str


class BackgroundRefresh:
    """One refresh at a time. Every method is called by all ranks alike, between steps.

    Args:
        num_edits: of the document store, which the version covers.
        say: told that a snapshot is written once more.

    Attributes:
        pending: the refresh under way, or None.
    """

    def __init__(
        self,
        run_dir: Path,
        towers: Towers,
        mesh: Mesh,
        *,
        num_edits: int,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.run_dir, self.towers, self.mesh, self.num_edits, self._say = run_dir, towers, mesh, num_edits, say
        self.folder = run_dir / "refresh"
        self.pending: Pending | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self, step: int) -> None:
        """Write the snapshot, durably, and begin to embed.

        Raises:
            OSError: on every rank, if it could not be written.
        """
        assert self.pending is None, "one refresh at a time"
        weights = self.towers.weights_hash()
        # A disk that fails does so on all ranks at once here, so all of them write again.
        twice(lambda: self._write(step, weights), what=f"the snapshot of step {step}", say=self._say)
        self.pending = Pending(step, weights)
        self._on_first(self._start)

    def _write(self, step: int, weights: str) -> None:
        """The snapshot, whole or an OSError on every rank."""
        temporary = self.folder / f".step-{step}.tmp"

        def prepare() -> None:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)

        self._on_first(prepare)
        tensors = {f"retriever.{name}": tensor.contiguous() for name, tensor in self.towers.tensors_here().items()}
        written = files.write_tensors(temporary, tensors, rank=self.mesh.rank, group=None, no_dist=self.mesh.size == 1)
        gathered = self.mesh.gather(written)

        def seal() -> None:
            everything = {name: entry for one in gathered for name, entry in one.items()}
            files.seal(temporary, {"step": step, "weights": weights}, everything)
            put_folder(temporary, self.snapshot(step))

        self._on_first(seal)

    def resume(self, pending: Pending, *, wait_s: float) -> None:
        """Begin again to embed, with the snapshot of a refresh that was under way.

        Args:
            wait_s: longest wait until the snapshot is seen.

        Raises:
            ValueError: on every rank, if the snapshot is damaged.
            OSError: on every rank, if it cannot be read.
        """

        def check() -> None:
            folder = self.snapshot(pending.step)
            patiently(
                lambda: files.verify(folder), folder=folder, limit_s=wait_s, until=(files.IncompleteCheckpointError,)
            )
            if files.read_state(folder)["weights"] != pending.weights:
                raise ValueError(
                    f"{folder} is not the snapshot that the checkpoint names; go back to another checkpoint"
                )

        self._on_first(check)
        self.pending = pending
        self._on_first(self._start)

    def poll(self, *, wait: bool = False) -> bool:
        """Whether the version is there.

        Args:
            wait: for a moment, if it is not.

        Raises:
            RefreshError: on every rank, if the process failed.
        """
        status: int | None = None
        if self._process is not None:
            try:
                status = self._process.wait(timeout=BEAT_S if wait else 0)
            except subprocess.TimeoutExpired:
                status = None
        status = self.mesh.broadcast(status)
        if status is not None and status != 0:
            how = f"was ended by signal {-status}" if status < 0 else f"failed with exit status {status}"
            raise RefreshError(self.mesh.broadcast(self._complaint(how)))
        return status == 0

    def end(self) -> None:
        """The version is adopted."""
        self.close()
        self.pending = None

    def close(self) -> None:
        """End the process; the refresh stays pending, for a checkpoint to name it."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.kill()
            self._process.wait()
            self._process = None

    def prune(self, named: Collection[int]) -> None:
        """Delete the snapshots (on the first rank) but those of the steps in ``named`` and of what is under way."""
        kept = {self.snapshot(step) for step in named} | ({self.snapshot(self.pending.step)} if self.pending else set())
        if self.mesh.is_first and self.folder.is_dir():
            for left in self.folder.glob(".step-*.tmp"):
                shutil.rmtree(left, ignore_errors=True)
            for folder in sorted(self.folder.glob("step-*")):
                if folder not in kept:
                    remove_folder(folder)

    def snapshot(self, step: int) -> Path:
        """Folder of the weights that a refresh begun before ``step`` embeds with."""
        return self.folder / f"step-{step}"

    def _start(self) -> None:
        assert self.pending is not None
        for left in (self.run_dir / "index" / "versions").glob(".*.tmp"):  # of a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        root = str(Path(retriever.__file__).parents[1])
        places = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {name: value for name, value in os.environ.items() if name not in _RANK}
        command = [
            sys.executable, "-W", "ignore", "-m", "retriever.reembed", "--config", str(self.run_dir / "config.yaml"),
            "--data.at_edit", str(self.num_edits), "--index.checkpoint", str(self.snapshot(self.pending.step)),
            "--index.dir", str(self.run_dir / "index"), "--version", str(self.pending.step),
        ]  # fmt: skip
        with (self.folder / "job.log").open("wb") as log:
            # A session of its own: an interrupt from the terminal is for training, which ends it.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
                env={**environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(places)},
            )  # fmt: skip

    def _complaint(self, how: str) -> str | None:
        if self._process is None:
            return None
        assert self.pending is not None
        log = self.folder / "job.log"
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        last = lines[-1] if lines else "it said nothing; was it ended, or short of memory?"
        return (
            f"the process that embeds the memory with the weights of step {self.pending.step} (index.refresh async) "
            f"{how}: {last} ({log} has all it said). Mend that, then run the same command to go on from the last "
            "checkpoint"
        )

    def _on_first(self, act: Callable[[], None]) -> None:
        """Do something on the first rank; what goes wrong is raised on all."""
        problem: OSError | ValueError | None = None
        if self.mesh.is_first:
            try:
                act()
            except (OSError, ValueError) as error:
                problem = OSError(str(error)) if isinstance(error, OSError) else ValueError(str(error))
        problem = self.mesh.broadcast(problem)
        if problem is not None:
            raise problem
