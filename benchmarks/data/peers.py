"""Other loaders on the same samples, in an environment of their own (their pins are not ours).

    python -m benchmarks.data.peers --make FOLDER     # once: an environment with the three, on top of this one

`benchmarks.data.loading --peers FOLDER` then starts ``FOLDER/bin/python -m benchmarks.data.peers --run NAME ...`` for
each of them, which converts the shards to the peer's own format if it needs one, and reads an epoch whenever it
is told to, in one process, with the same decode work.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

VERSIONS = {"litdata": "0.2.76", "mosaicml-streaming": "0.13.0", "megatron-energon": "7.4.1"}
NAMES = tuple(VERSIONS)
Epoch = Callable[[], Iterable[Any]]


def make(folder: Path) -> None:
    """A virtual environment that sees this one's packages and holds the peers."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    query = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = Path(subprocess.run([python, "-c", query], check=True, capture_output=True, text=True).stdout.strip())
    (site / "beneath.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    for name, version in VERSIONS.items():
        wanted = f"{name}=={version}"
        done = subprocess.run([python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", wanted])
        print(f"{wanted}: {'installed' if done.returncode == 0 else 'could not be installed'}")


def litdata(shards: Path, work: Path, *, shuffle: bool) -> Epoch:
    """Its own chunks of bytes; ``StreamingDataset``."""
    import litdata
    from litdata.streaming.cache import Cache

    from benchmarks.data.pictures import decode, raw_samples

    target = work / "litdata"
    if not (target / "index.json").exists():
        cache = Cache(str(target), chunk_bytes="64MB")
        for i, (_, members) in enumerate(raw_samples(shards)):
            cache._add_item(i, dict(members))
        cache.done()
        cache.merge()
    return lambda: (decode(sample) for sample in litdata.StreamingDataset(str(target), shuffle=shuffle))


def mosaicml_streaming(shards: Path, work: Path, *, shuffle: bool) -> Epoch:
    """Its own MDS shards; ``StreamingDataset``."""
    from streaming import MDSWriter, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    from benchmarks.data.pictures import decode, raw_samples

    target = work / "streaming"
    if not (target / "index.json").exists():
        with MDSWriter(out=str(target), columns={"jpg": "bytes", "json": "bytes"}) as writer:
            for _, members in raw_samples(shards):
                writer.write({name: members[name] for name in ("jpg", "json")})
    clean_stale_shared_memory()
    dataset = StreamingDataset(local=str(target), shuffle=shuffle, batch_size=32)
    return lambda: (decode(sample) for sample in dataset)


def megatron_energon(shards: Path, work: Path, *, shuffle: bool) -> Epoch:
    """The same tars, by ``wds`` files with its own index beside them; crude samples, so that our decode runs."""
    from megatron.energon import WorkerConfig, get_loader, get_train_dataset, get_val_dataset

    from benchmarks.data.pictures import decode

    target = work / "energon"
    _prepare_energon(shards, target)
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    options: dict[str, Any] = {"worker_config": config, "batch_size": None}
    task = _crude_task(decode)
    if shuffle:
        dataset: Any = get_train_dataset(
            target, shuffle_buffer_size=16384, max_samples_per_sequence=256, task_encoder=task, repeat=False, **options
        )
    else:
        dataset = get_val_dataset(target, split_part="train", task_encoder=task, **options)

    def epoch() -> Iterator[Any]:
        yield from get_loader(dataset)

    return epoch


def _crude_task(decode: Callable[[Any], Any]) -> Any:
    from megatron.energon import CrudeSample, DefaultTaskEncoder, basic_sample_keys, stateless
    from megatron.energon.task_encoder.cooking import Cooker

    @stateless
    def cook(sample: dict[str, Any]) -> Any:
        members = {"jpg": sample["jpg"], "json": sample["json"]}
        return CrudeSample({**basic_sample_keys(sample), "decoded": decode(members)})

    class Task(DefaultTaskEncoder):  # type: ignore[misc]
        decoder = None
        cookers = [Cooker(cook)]  # noqa: RUF012

    return Task()


def _prepare_energon(shards: Path, target: Path) -> None:
    from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

    meta = target / ".nv-meta"
    if meta.exists():
        return
    target.mkdir(parents=True)
    for tar in sorted(shards.glob("*.tar")):
        (target / tar.name).symlink_to(tar)
    names = [tar.name for tar in sorted(shards.glob("*.tar"))]
    WebdatasetPreparator.prepare_dataset(
        target, names, split_parts_ratio=[("train", 1.0)], progress_fn=lambda items, _: items, workers=1
    )
    (meta / "dataset.yaml").write_text("__module__: megatron.energon\n__class__: CrudeWebdataset\n")


def run(name: str, shards: Path, work: Path, *, shuffle: bool) -> None:
    """Read an epoch for each line on stdin; answer with seconds and samples as JSON, or with what went wrong."""
    import torch

    torch.set_num_threads(1)
    makers = {"litdata": litdata, "mosaicml-streaming": mosaicml_streaming, "megatron-energon": megatron_energon}

    def answer(**what: Any) -> None:
        print(json.dumps(what), flush=True)

    try:
        epoch = makers[name](shards, work, shuffle=shuffle)
        answer(ready=True)
        for _ in sys.stdin:
            start, count = time.perf_counter(), 0
            for _ in epoch():
                count += 1
            answer(seconds=time.perf_counter() - start, samples=count)
    except Exception as error:
        answer(problem=f"{type(error).__name__}: {error}"[:300])


class PeerProcess:
    """A module of this package in the peers' environment, which is told lines and answers with lines of JSON.

    Attributes:
        problem: why it cannot, or None.
    """

    def __init__(self, folder: Path, module: str, name: str, shards: Path, work: Path, *more: str) -> None:
        command = [
            str(folder / "bin" / "python"), "-W", "ignore", "-m", module, "--run", name,
            "--shards", str(shards), "--work", str(work), *more,
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.problem: str | None = None
        self._answer()

    def ask(self, line: str) -> dict[str, Any]:
        """What it answers to a line; empty once there is a problem."""
        if self.problem is not None:
            return {}
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        return {} if self.problem is not None else answer

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):  # what a library prints there is not for us
                answer: dict[str, Any] = json.loads(line)
                self.problem = answer.get("problem")
                return answer
        self.problem = f"its process ended with {self.process.wait()}"
        return {}

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


class Peer(PeerProcess):
    """A peer that reads epochs in its own process."""

    def __init__(self, folder: Path, name: str, shards: Path, work: Path, *, shuffle: bool) -> None:
        super().__init__(folder, "benchmarks.data.peers", name, shards, work, *(["--shuffle"] if shuffle else []))

    def epoch(self) -> tuple[float, int]:
        """Seconds and samples of an epoch; nan once there is a problem."""
        answer = self.ask("epoch")
        return (answer["seconds"], answer["samples"]) if answer else (float("nan"), 0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data.peers", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--make", type=Path, metavar="FOLDER", help="make the environment and end")
    parser.add_argument("--run", choices=NAMES, help="read epochs as one of them")
    parser.add_argument("--shards", type=Path)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--shuffle", action="store_true")
    given = parser.parse_args()
    if given.make is not None:
        make(given.make)
    elif given.run is not None:
        run(given.run, given.shards, given.work, shuffle=given.shuffle)
    else:
        parser.error("give --make FOLDER, or --run NAME with --shards and --work")


if __name__ == "__main__":
    main()
