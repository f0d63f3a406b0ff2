"""The command ``python train.py``: starts the ranks, trains, and says how it ended.

Every rank runs this; what the user did wrong is said once, by the first, before or instead of a traceback.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from data.ahead import WorkerError
from data.bad_data import BadDataError
from data.command_line import fail, parse
from data.dataset import Dataset
from pipeline.roll_call import LostRankError
from rag_mm import checkpoint, launch
from rag_mm.background_refresh import RefreshError
from rag_mm.config import Config
from rag_mm.disk_advice import advice
from rag_mm.proof import ProofError
from rag_mm.trainer import Trainer
from rag_mm.training_batches import BatchMismatchError


def main(argv: Sequence[str]) -> int:
    """Entry point of ``train.py``; the exit status."""
    config = parse(
        Config,
        argv,
        prog="python train.py",
        description="Train a retriever and a reader jointly. Started again on the same --run-dir, training goes on.",
    )
    os.environ.setdefault("OMP_NUM_THREADS", str(config.train.threads))
    ranks = config.parallel.pipeline_stages * config.parallel.data_replicas
    if not launch.is_rank():
        _check_before_start(config)
        if ranks > 1:
            return launch.launch(argv, num_ranks=ranks)
    elif os.environ["RANK"] == "0":
        _check_before_start(config)
    try:
        roll_call = launch.join(timeout_s=config.parallel.timeout_s, threads=config.train.threads)
    except LostRankError as error:
        print(error, file=sys.stderr)
        return launch.EXIT_FAILED
    first = not launch.is_rank() or os.environ["RANK"] == "0"
    with launch.Interrupt(at_once=True) as interrupt, contextlib.ExitStack() as held:
        try:
            if first:
                held.enter_context(launch.only_one(Path(config.run_dir)))
            with launch.watched(roll_call):
                trainer = Trainer(config, roll_call)
                trainer.resume()
                trainer.open_files()
        except LostRankError as error:
            print(f"rank {dist.get_rank()} stops: {error}", file=sys.stderr)
            return launch.EXIT_FAILED
        except (ValueError, FileNotFoundError) as error:  # the user's; every rank finds the same
            if first:
                fail(str(error))
            return launch.EXIT_USER
        except (ProofError, BadDataError) as error:
            if first:
                print(error, file=sys.stderr)
            return launch.EXIT_FAILED
        except OSError as error:
            if first:
                what = advice(str(error), config.run_dir)
                print(
                    f"{config.run_dir} could not be read or written: {error}; nothing was trained and nothing is lost: "
                    f"{what}, then run the same command again",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
            return launch.EXIT_FAILED
        try:
            status = trainer.run(interrupt)
        except (LostRankError, WorkerError) as error:
            print(f"rank {trainer.mesh.rank} stops: {error}", file=sys.stderr)
            return launch.EXIT_FAILED
        except (BatchMismatchError, RefreshError) as error:
            if first:
                print(error, file=sys.stderr)
            return launch.EXIT_FAILED
        except OSError as error:
            if first:
                there = checkpoint.last_of(config.run_dir)
                print(
                    f"{config.run_dir} could not be written: {error}; {there}: {advice(str(error), config.run_dir)}, "
                    "then run the same command to go on from it",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
            os._exit(launch.EXIT_FAILED)  # a thread that still tries to write would hold the process
    launch.leave()
    return status


def _check_before_start(config: Config) -> None:
    """What can be said about the user's input before any rank is started."""
    try:
        dataset = Dataset.of(config.data)
    except (OSError, ValueError) as error:
        fail(str(error))
    if config.train.documents == "retrieved" and config.retriever.k > len(dataset.store):
        fail(
            f"retriever.k is {config.retriever.k}; the memory holds {len(dataset.store)} documents, "
            "so it must be at most that"
        )
    if config.train.documents == "retrieved" and config.retriever.rerank > len(dataset.store):
        fail(
            f"retriever.rerank is {config.retriever.rerank}; the memory holds {len(dataset.store)} documents, "
            "so it must be at most that"
        )
    if config.parallel.plan and not Path(config.parallel.plan).is_file():
        fail(f"parallel.plan is {config.parallel.plan!r}, which is not a file; make one with `python -m pipeline.plan`")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
