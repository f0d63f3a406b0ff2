"""A flat index made into one that is quicker to search, in memory: what training searches when its memory is large.

The kind is a faiss factory string (`retriever.sizing` chooses one by size). How hard a search must look is measured on
queries, as in a build job (`retriever.recall`), and both go into the manifest. The same vectors and queries give the
same index, so a run repeats; for a moment the vectors are held twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy
from torch import Tensor

from data.dataset import Dataset
from retriever.embed import pictures
from retriever.faiss_import import faiss
from retriever.features import Features, Featurizer
from retriever.index import Index
from retriever.recall import DEPTH, Exact, search_hard_enough
from retriever.sizing import kind_of, misfit, size_of


def approximate(index: Index, factory: str, *, query_QE: Tensor | None, num_queries: int, recall: float) -> Index:
    """Another kind of index of the same vectors.

    Args:
        index: flat and as it was made, without later additions.
        factory: as of `sizing.kind_of`; Flat gives the index itself.
        query_QE: what recall is measured with; None: ``num_queries`` of the vectors, spread evenly.
        recall: share of the exact ten best that a search is to find.

    Raises:
        ValueError: faiss cannot make such an index of so many vectors, or of this width.
    """
    count, dim = len(index), index.manifest.dim
    kind = kind_of(factory, count, dim)
    if kind == "Flat" or count < DEPTH:
        return index
    vectors = faiss.rev_swig_ptr(index.vectors.get_xb(), count * dim).reshape(count, dim)
    try:
        if problem := misfit(kind, count, dim):
            raise RuntimeError(problem)
        made = faiss.index_factory(dim, kind, faiss.METRIC_INNER_PRODUCT)
        if not made.is_trained:
            made.train(numpy.ascontiguousarray(vectors[_spread(count, size_of(kind, count, dim).train or count)]))
        made.add(vectors)
    except RuntimeError as error:
        raise ValueError(
            f"index.train_factory is {factory!r}, which does not fit {count} documents of width {dim}: {error}"
        ) from None
    query = vectors[_spread(count, num_queries)] if query_QE is None else query_QE.detach().float().numpy()
    query = numpy.ascontiguousarray(query)
    effort, reached = search_hard_enough(made, Exact.of(query, vectors, first=0), target=recall)
    manifest = replace(
        index.manifest, factory=kind, effort=effort, recall_at_10=reached, recall_queries=len(query) - len(query) // 2
    )
    return Index(made, index.ids, manifest)


def question_features(
    featurizer: Featurizer,
    dataset: Dataset,
    *,
    count: int,
    image_size: int,
    image_transform: str,
    batch_size: int,
) -> Iterator[Features]:
    """Features of training questions, spread evenly, in batches; nothing where there are fewer than ``count``."""
    questions = dataset.questions("train")
    if len(questions) < count:
        return
    places = _spread(len(questions), count).tolist()
    for start in range(0, count, batch_size):
        samples = questions.read(places[start : start + batch_size])
        image, has_image = pictures([s.image for s in samples], image_size, transform=image_transform, broken={})
        yield featurizer([s.question for s in samples], image, has_image, side="query")


def _spread(count: int, wanted: int) -> numpy.typing.NDArray[numpy.int64]:
    """Up to ``wanted`` places of ``count``, spread evenly."""
    return numpy.linspace(0, count - 1, num=min(wanted, count)).astype(numpy.int64)
