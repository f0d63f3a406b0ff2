"""A run's folder, opened to answer with: its configuration, its data, and the weights of this rank's stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from data.command_line import parse
from data.dataset import Dataset
from rag_mm import checkpoint
from rag_mm.config import Config
from rag_mm.evaluate.layout import Layout, LayoutConfig, answering_plan
from rag_mm.mesh import Mesh
from rag_mm.model import Model, empty_model
from rag_mm.reader.fusion import answering_program
from retriever import index as index_files
from retriever import versions
from retriever.build import build_index
from retriever.embed import make_manifest
from retriever.index import Index
from retriever.manifest import read_manifest


@dataclass(frozen=True)
class Run:
    """A run's folder, opened: its configuration, data and weights.

    Attributes:
        model: with the weights of this rank's stages.
        step: of the checkpoint that the weights come from.
    """

    directory: Path
    config: Config
    dataset: Dataset
    model: Model
    step: int
    layout: Layout

    def index(self, *, directory: Path | None = None, console: Console | None = None) -> Index | None:
        """An index of these weights and of the store as it is now; only what changed is embedded again.

        All ranks call it and share the embedding. Gives it to the ranks that search, None to the others.
        """
        layout, config = self.layout, self.config
        where = directory or self.directory / "index-eval"
        how: dict[str, Any] = {"image_size": config.data.image_size, "batch_size": config.index.batch_size}
        weights, store = layout.document_hash(), self.dataset.store
        if not layout.mesh.is_first:
            layout.embed_documents(store, None, **how)
            layout.mesh.barrier()
            return self._placed(index_files.load(where), console) if layout.searches else None
        asked = False

        def embed(ids: Sequence[str], progress: Callable[[int], None] | None) -> torch.Tensor:
            nonlocal asked
            asked = True
            embedding = layout.embed_documents(store, ids, progress=progress, **how)
            assert embedding is not None
            return embedding

        try:
            index = build_index(
                self.model.encoder, self.dataset, directory=where, keep=config.index.keep_versions, console=console,
                embed=embed, weights=weights, **how,
            )  # fmt: skip
            return self._placed(index, console)
        finally:
            if not asked:  # the other ranks wait for what they are to embed
                layout.embed_documents(store, [], **how)
            layout.mesh.barrier()

    def built_index(self, folder: Path, *, console: Console | None = None) -> Index | None:
        """The index that ``python -m retriever.build`` made of these weights and of the store as it is now.

        All ranks call it, and all refuse one that does not fit. Gives it to the ranks that search, None to the others;
        searched on the CPU, its lists stay on the disk.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is of other weights, of another store or of an earlier edit; says what makes one that is not.
        """
        store, config = self.dataset.store, self.config
        weights = self.layout.document_hash()
        version = versions.current(folder)
        manifest = read_manifest(folder / "versions" / str(version) / "manifest.json")
        needed = make_manifest(self.model.encoder, store, image_size=config.data.image_size, weights=weights)
        try:
            manifest.check(needed, where=str(folder))
            if manifest.num_edits < store.num_edits:
                raise ValueError(
                    f"the index at {folder} covers {manifest.num_edits} of the {store.num_edits} edits of the store"
                )
        except ValueError as error:
            made_by = checkpoint.checkpoint_dir(self.directory, self.step)
            raise ValueError(
                f"{error}; `python -m retriever.build --config {self.directory / 'config.yaml'} "
                f"--index.checkpoint {made_by} --index.dir {folder}` brings it there"
            ) from None
        if not self.layout.searches:
            return None
        index = index_files.load(folder, version=version, mapped=config.index.device == "cpu")
        return self._placed(index, console)

    def _placed(self, index: Index, console: Console | None) -> Index:
        """On the device that ``index.device`` names."""
        say = (console or Console(stderr=True)).print
        return index.placed(self.config.index.device, say=say)


def load_run(
    run_dir: str | Path,
    step: int | None = None,
    *,
    data_dir: str | Path | None = None,
    parallel: LayoutConfig | None = None,
) -> Run:
    """Open a run; with several ranks, all of them call it, and each reads the weights of its own stages.

    Args:
        step: of the checkpoint; the latest by default.
        data_dir: the data set, where it is not the one that the run's configuration names.
        parallel: the ranks that answer, where there are several.

    Raises:
        FileNotFoundError: if there is no such run, checkpoint or data set; says what makes one.
        ValueError: if the layout does not fit the ranks that were started, or the model.
    """
    directory, parallel = Path(run_dir), parallel or LayoutConfig()
    config, chosen = find_checkpoint(directory, step)
    dataset = Dataset.of(config.data, directory=data_dir or "")
    model = empty_model(config, dataset)
    reader = answering_program(model.reader)
    mesh = Mesh(num_stages=parallel.pipeline_stages, num_replicas=parallel.data_replicas)
    plan = answering_plan(reader, parallel, directory)
    model = dataclasses.replace(model, reader=reader)
    layout = Layout(model, mesh, plan, piped=parallel.towers == "piped", timeout_s=parallel.timeout_s)
    checkpoint.load(directory, chosen, layout.tensors_here(), mesh=mesh)
    model.encoder.eval()
    return Run(directory, config, dataset, model, chosen, layout)


def find_checkpoint(directory: Path, step: int | None = None) -> tuple[Config, int]:
    """The configuration of a run and the step of a checkpoint that it keeps.

    Raises:
        FileNotFoundError: if there is no such run or checkpoint; says what makes one.
    """
    command = f"python train.py --config configs/quickstart.yaml --run-dir {directory}"
    if not (directory / "config.yaml").exists():
        raise FileNotFoundError(f"no run at {directory}; train one with `{command}`")
    config = read_config(directory)
    steps = checkpoint.list_steps(directory)
    if not steps:
        raise FileNotFoundError(f"the run at {directory} has no checkpoint yet; go on training with `{command}`")
    if step is not None and step not in steps:
        known = ", ".join(map(str, steps))
        raise FileNotFoundError(f"--step is {step}, but the run at {directory} keeps checkpoints of step {known}")
    return config, steps[-1] if step is None else step


def read_config(run_dir: Path) -> Config:
    """The resolved configuration that a run wrote; its ``run_dir`` is where it lies now."""
    config = parse(Config, ["--config", str(run_dir / "config.yaml")], prog="config.yaml", description="")
    return dataclasses.replace(config, run_dir=str(run_dir))
