"""How often the retriever finds a right document for questions it is not trained on, at each refresh and as often else.

hit@k over training questions falls behind what it means once a retriever learns them by heart; that over a fixed sample
of the dev split shows it, for the price of embedding the sample and one search. Nothing trains on it.
"""

from __future__ import annotations

from data.dataset import Dataset
from data.samples import forbidden_of
from rag_mm.config import Config
from rag_mm.memory import Memory
from rag_mm.towers import Towers, embed_all
from retriever.embed import pictures


class DevHits:
    """Measures on ``train.dev_questions`` questions, spread evenly over the dev split."""

    def __init__(self, config: Config, dataset: Dataset) -> None:
        self.config = config
        self._questions = dataset.questions("dev")
        count = min(config.train.dev_questions, len(self._questions))
        self._places = [i * len(self._questions) // count for i in range(count)]

    def measure(self, memory: Memory, towers: Towers) -> float | None:
        """Share of the questions with a right document among the k found; None if no question names one.

        A collective: all ranks call it and get the same.
        """
        samples = [s for s in self._questions.read(self._places) if s.weight and s.gold] if self._places else []
        if not samples:
            return None
        data = self.config.data
        image, has_image = pictures([s.image for s in samples], data.image_size, transform=data.image_transform)
        features = towers.encoder.features([s.question for s in samples], image, has_image, side="query")
        query, barred = embed_all(towers, features), forbidden_of(samples)
        ids, _ = memory.search(query, k=self.config.retriever.k, forbidden=barred)
        return sum(bool(set(s.gold) & set(names)) for s, names in zip(samples, ids, strict=True)) / len(samples)
