"""Wrong values are refused where they are built, naming field, value and what is allowed."""

import pytest

from data.config import DataConfig
from pipeline.config import ParallelConfig
from rag_mm.config import CheckpointConfig, Config, TrainConfig
from rag_mm.objectives import ObjectivesConfig
from rag_mm.reader.config import ReaderConfig
from retriever.config import IndexConfig, RetrieverConfig

WRONG = [
    (lambda: TrainConfig(steps=0), r"train\.steps is 0; it must be at least 1"),
    (lambda: TrainConfig(rename=1.5), r"train\.rename is 1\.5.*between 0 and 1"),
    (lambda: TrainConfig(learning_rate=-1.0), r"train\.learning_rate is -1\.0"),
    (lambda: TrainConfig(clip_norm=0.0), r"train\.clip_norm is 0\.0.*above 0"),
    (lambda: CheckpointConfig(keep=0), r"checkpoint\.keep is 0"),
    (lambda: ReaderConfig(width=10, heads=4), r"reader\.width is 10.*multiple of twice reader\.heads"),
    (lambda: ReaderConfig(fusion="prefix"), r"reader\.fusion is 'prefix'; allowed: fid, prepend"),
    (lambda: ReaderConfig(dropout=1.0), r"reader\.dropout is 1\.0"),
    (lambda: RetrieverConfig(k=0), r"retriever\.k is 0"),
    (lambda: IndexConfig(keep_versions=0), r"index\.keep_versions is 0"),
    (lambda: ObjectivesConfig(pdist_score_temperature=0.0), r"pdist_score_temperature is 0\.0.*above 0"),
    (lambda: ParallelConfig(num_microbatches=0), r"parallel\.num_microbatches is 0"),
    (lambda: DataConfig(fold=4), r"data\.fold is 4; allowed are 0, 1, 2 and 3"),
    (lambda: Config(data=DataConfig(image_size=20)), r"reader\.patch is 8.*divide data\.image_size \(20\)"),
    (lambda: Config(train=TrainConfig(batch_size=30)), r"train\.batch_size is 30.*multiple of"),
    (lambda: Config(objectives=ObjectivesConfig(generation=0.0)), r"objectives\.generation is 0.*or rag_sequence"),
    (
        lambda: Config(parallel=ParallelConfig(pipeline_stages=2, schedule="zero_bubble")),
        r"parallel.schedule is 'zero_bubble', which would lose",
    ),
    (lambda: ObjectivesConfig(loop_target_temperature=-1.0), r"objectives\.loop_target_temperature is -1\.0.*above 0"),
    (lambda: ObjectivesConfig(emdr2_token=-1.0), r"objectives\.emdr2_token is -1\.0.*0 \(off\) or more"),
    (lambda: ObjectivesConfig(contrastive_positives=0), r"objectives\.contrastive_positives is 0.*at least 1"),
    (
        lambda: Config(objectives=ObjectivesConfig(adist=1.0), reader=ReaderConfig(fusion="prepend")),
        r"objectives\.adist is 1\.0.*reader\.fusion 'prepend'.*use reader\.fusion fid",
    ),
    (
        lambda: Config(objectives=ObjectivesConfig(loop=1.0), retriever=RetrieverConfig(k=1)),
        r"objectives\.loop is 1\.0.*retriever\.k of 2 or more \(it is 1\)",
    ),
    (
        lambda: Config(
            objectives=ObjectivesConfig(contrastive_mined_negatives=1), index=IndexConfig(refresh="query_side")
        ),
        r"contrastive_mined_negatives is 1.*index\.refresh 'query_side'",
    ),
    (
        lambda: TrainConfig(retriever_frozen_first=0.6, retriever_frozen_last=0.5),
        r"retriever_frozen_first is 0\.6.*at most 1",
    ),
    (lambda: Config(objectives=ObjectivesConfig(contrastive=0.0)), r"train\.retriever_share is 0\.45"),
]


@pytest.mark.parametrize("build, message", WRONG)
def test_wrong_values(build, message: str):
    with pytest.raises(ValueError, match=message):
        build()


def test_the_reader_may_train_on_marginals_alone():
    for objective in ({"rag_sequence": 1.0}, {"rag_token": 1.0}):
        assert Config(objectives=ObjectivesConfig(generation=0.0, **objective)).objectives.generation == 0
