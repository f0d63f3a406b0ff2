"""Which configurations may go on with a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from data.command_line import dump
from data.config import DataConfig
from data.dataset import Dataset
from rag_mm.config import Config
from rag_mm.same_run import check_same_run


def state_of(config: Config, dataset: Dataset, *, without: tuple[str, str] | None = None) -> dict[str, Any]:
    written = yaml.safe_load(dump(config))
    if without is not None:
        del written[without[0]][without[1]]
    return {
        "data_fingerprint": dataset.fingerprint,
        "store_edits": dataset.store.num_edits,
        "config": yaml.safe_dump(written),
    }


def test_a_field_that_did_not_exist_then_counts_as_its_default(factbook_dir: Path):
    dataset = Dataset(str(factbook_dir))
    config = Config(data=DataConfig(dir=str(factbook_dir)))
    old = state_of(config, dataset, without=("reader", "fusion"))
    assert check_same_run(config, dataset, old) == []
    with pytest.raises(ValueError, match=r"reader.fusion is 'prepend', but .* was started with 'fid'"):
        check_same_run(replace(config, reader=replace(config.reader, fusion="prepend")), dataset, old)


def test_the_layout_may_change_and_the_model_may_not(factbook_dir: Path):
    dataset = Dataset(str(factbook_dir))
    config = Config(data=DataConfig(dir=str(factbook_dir)))
    state = state_of(config, dataset)
    other = replace(config, parallel=replace(config.parallel, pipeline_stages=2, towers="piped"))
    assert check_same_run(replace(other, reader=replace(config.reader, vision="once")), dataset, state) == []
    limits = replace(config, train=replace(config.train, max_bad_steps=3), data=replace(config.data, max_bad_share=0.5))
    assert check_same_run(limits, dataset, state) == []
    with pytest.raises(ValueError, match=r"train.spike_sigma is 6.0, but .* was started with 0.0"):
        check_same_run(replace(config, train=replace(config.train, spike_sigma=6.0)), dataset, state)
    with pytest.raises(ValueError, match=r"reader.width is 128, but .* was started with 64"):
        check_same_run(replace(config, reader=replace(config.reader, width=128)), dataset, state)
