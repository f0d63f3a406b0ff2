"""Whether a configuration may go on with a checkpoint, or would make another run of it.

A run is one experiment: what moves its numbers stays as it was when it began. Layout, places and limits may change.
"""

from __future__ import annotations

from typing import Any

from data.command_line import dump, read_yaml
from data.dataset import Dataset
from rag_mm.code_version import code_version, differences
from rag_mm.config import Config

# What may differ between the parts of one run without changing its numbers.
CHANGEABLE = (
    "data.dir", "data.cache_dir", "data.cache_gib", "data.workers", "index.dir", "index.checkpoint",
    "index.batch_size", "index.keep_versions", "index.sharded",
    "reader.vision", "train.threads", "train.max_bad_steps", "data.max_bad_share",
)  # fmt: skip


def check_same_run(config: Config, dataset: Dataset, state: dict[str, Any]) -> list[str]:
    """Whether this configuration may go on with a checkpoint; gives what has to be said about it.

    Raises:
        ValueError: names the first field whose change would make it another run.
    """
    if state["data_fingerprint"] != dataset.fingerprint:
        raise ValueError(
            f"{config.run_dir} was trained on other data ({state['data_fingerprint'][:12]}) than {config.data.dir} "
            f"({dataset.fingerprint[:12]}); use another --run-dir"
        )
    said = differences(state.get("code"), code_version())
    if state["store_edits"] != dataset.store.num_edits:
        said.append(
            f"the document store has {dataset.store.num_edits} edits, {state['store_edits']} when the checkpoint was "
            "written: from here on the run reads other documents"
        )
    old = read_yaml(state["config"], what=f"the configuration in the checkpoint of {config.run_dir}")
    new = read_yaml(dump(config), what="the configuration")
    defaults = read_yaml(dump(Config()), what="the configuration")  # of fields that did not exist when the run began
    for section in ("data", "retriever", "index", "reader", "objectives", "train"):
        for name, value in new[section].items():
            before = old[section].get(name, defaults[section][name])
            if before == value or f"{section}.{name}" in CHANGEABLE:
                continue
            if f"{section}.{name}" == "train.steps":
                said.append(
                    f"train.steps was {before} and is {value}: rates and phases depend on it, so they jump here"
                )
                continue
            raise ValueError(
                f"{section}.{name} is {value!r}, but {config.run_dir} was started with {before!r}; "
                "use the same value or another --run-dir"
            )
    return said
