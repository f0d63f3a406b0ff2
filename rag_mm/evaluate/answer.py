"""Answering questions with the weights of a run, on any layout, whatever layout trained them.

Queries and documents are embedded exactly as in training, but for augmentation. Documents are found in an
index of these very weights (any other is refused), and embedded anew for the reader, which weighs them by
their scores. More documents than the reader reads are searched for, so that hit@4 can be reported; the reader
sees the first ``retriever.k``.

Questions are read in windows (`rag_mm.evaluate.questions`), retrieved for in blocks (`rag_mm.evaluate.retrieval`) and
decoded in batches of questions of a field, whose answers are about as long as each other. Blocks and batches are
functions of the list of questions alone; replicas share them out whole, so no layout changes what is computed, only by
whom. Batches of another size may round differently in the last bit of a probability; a token changes only where two are
as close as that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from data.dataset import Dataset, Sample
from data.document_store import Document
from pipeline.score import score
from rag_mm.batch import document_text
from rag_mm.config import Config
from rag_mm.evaluate.candidates import Candidates, read_candidates, training_candidates
from rag_mm.evaluate.decoding import DecodingConfig
from rag_mm.evaluate.finished import Finished
from rag_mm.evaluate.layout import Layout
from rag_mm.evaluate.prediction import Prediction
from rag_mm.evaluate.questions import words_of
from rag_mm.evaluate.retrieval import BLOCK, DEPTH, Documents, Found, Retrieval
from rag_mm.evaluate.run import Run, find_checkpoint, load_run, read_config
from rag_mm.model import Model, weights
from rag_mm.reader.generate import decode, next_inputs
from retriever.embed import make_manifest
from retriever.index import Index

__all__ = [
    "DEPTH", "Answerer", "Documents", "Interrupted", "Prediction", "Run", "find_checkpoint", "load_run", "read_config",
    "weights",
]  # fmt: skip

WINDOW = 32 * BLOCK  # questions in memory at once


class Interrupted(Exception):
    """Asked to stop; what is done is kept. The message says how much."""


class Answerer:
    """Answers questions; with several ranks, all of them make the same calls.

    Args:
        index: of this model's weights, on ranks that search; None elsewhere, or if nothing will be retrieved.
        layout: the ranks that answer and their stages; everything on this process by default.
        decoding: the configuration's by default.
        depth: documents that are searched for (or k, if that is more).

    Raises:
        ValueError: if the index was made by other weights, k exceeds the memory, or the candidates are not to be had.
    """

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        model: Model,
        index: Index | None,
        *,
        layout: Layout | None = None,
        decoding: DecodingConfig | None = None,
        batch_size: int | None = None,
        depth: int = DEPTH,
    ) -> None:
        self.config, self.dataset, self.collator = config, dataset, model.collator
        self.layout = layout or Layout.whole(model)
        self.decoding = decoding or config.evaluate
        self.batch_size = batch_size or self.decoding.batch_size
        weights = self.layout.document_hash()
        if index is not None:
            needed = make_manifest(model.encoder, dataset.store, image_size=config.data.image_size, weights=weights)
            index.manifest.check(needed, where="hand")
            if config.retriever.k > len(index.ids):
                raise ValueError(
                    f"retriever.k is {config.retriever.k}; the memory holds only {len(index.ids)} documents"
                )
        self._retrieval = Retrieval(config, dataset, self.collator, self.layout, index, depth=depth)
        self._candidates: Candidates | None = None
        self._candidate_tokens: dict[str, list[int]] = {}
        if self.decoding.decoding == "score":
            file = self.decoding.candidates
            self._candidates = read_candidates(file) if file else training_candidates(dataset)

    def answer(
        self,
        samples: Sequence[Sample],
        documents: Documents = "retrieved",
        *,
        progress: Callable[[int], None] | None = None,
        row: str = "",
        finished: Finished | None = None,
        interrupt: Callable[[], bool] | None = None,
    ) -> list[Prediction]:
        """One prediction a sample, in order, on every rank.

        Args:
            documents: what the reader reads: what is retrieved, the document the question was made from, what BM25
                finds, or nothing (an empty document, as in training without documents).
            progress: called with the number of questions that are answered: at first those that were, then by batch.
            finished: predictions that are done already are taken from there, and new ones kept, under ``row``.
            interrupt: asked after each batch whether to stop.

        Raises:
            Interrupted: on every rank, if any was asked to stop.
        """
        words = words_of(samples)
        known = self.layout.mesh.broadcast(self._known(words, row, finished))
        if progress is not None and known:
            progress(len(known))
        for start in range(0, len(samples), WINDOW):
            if all(sample.id in known for sample in words[start : start + WINDOW]):
                continue
            window = samples[start : start + WINDOW]
            self._answer_window(window, documents, known, progress, row, finished, interrupt)
        return [known[sample.id] for sample in words]

    def _known(self, samples: Sequence[Sample], row: str, finished: Finished | None) -> dict[str, Prediction] | None:
        if not self.layout.mesh.is_first:
            return None
        if finished is None:
            return {}
        asked = {sample.id for sample in samples}
        return {name: prediction for name, prediction in finished.read(row).items() if name in asked}

    def _answer_window(
        self,
        samples: Sequence[Sample],
        documents: Documents,
        known: dict[str, Prediction],
        progress: Callable[[int], None] | None,
        row: str,
        finished: Finished | None,
        interrupt: Callable[[], bool] | None,
    ) -> None:
        mesh = self.layout.mesh
        todo = [b for b in batches(samples, self.batch_size) if any(samples[i].id not in known for i in b)]
        found = self._find(samples, sorted({i // BLOCK for b in todo for i in b}), documents)
        for first in range(0, len(todo), mesh.num_replicas):
            new: list[Prediction] = []
            mine = todo[first : first + mesh.num_replicas][mesh.replica : mesh.replica + 1]
            for batch in mine:
                answered = self._decode([samples[i] for i in batch], [found[i] for i in batch], documents)
                new = [prediction for prediction in answered if prediction.id not in known]
            keeps = new if self.layout.searches else []
            if finished is not None and keeps:
                finished.append(row, keeps)
            told = mesh.gather((keeps, interrupt is not None and interrupt()))
            for theirs, _ in told:
                known.update({prediction.id: prediction for prediction in theirs})
                if progress is not None and theirs:
                    progress(len(theirs))
            if any(asked for _, asked in told):
                raise Interrupted(f"interrupted; {len(known)} answers are safe, run the same command to go on")

    def _find(self, samples: Sequence[Sample], blocks: Sequence[int], documents: Documents) -> dict[int, Found]:
        """What is retrieved for the questions of some blocks, which the replicas share out."""
        mine = {}
        for block in blocks[self.layout.mesh.replica :: self.layout.mesh.num_replicas]:
            own = samples[block * BLOCK : (block + 1) * BLOCK]
            found = self._retrieval.find(own, documents)
            mine.update({block * BLOCK + i: item for i, item in enumerate(found)})
        return {i: item for theirs in self.layout.over_replicas(mine) for i, item in theirs.items()}

    @torch.no_grad()
    def _decode(self, samples: Sequence[Sample], found: Sequence[Found], documents: Documents) -> list[Prediction]:
        """Predictions of one batch; all ranks of a replica call it."""
        collator = self.collator
        question_image = collator.images([s.image for s in samples])
        if documents == "none":
            read = [[Document("", "", {})] for _ in samples]
            document_image = (torch.ones_like(question_image[0]), torch.zeros(len(samples)))
        else:
            unique = sorted({name for item in found for name in item.read})
            fetched = dict(zip(unique, self.dataset.store.read(unique), strict=True))
            read = [[fetched[name] for name in item.read] for item in found]
            document_image = self._document_images(unique, fetched, found)
        context = collator.context([s.question for s in samples], read, question_image, document_image)
        context["query_embedding"] = torch.stack([item.query_E for item in found])
        context["document_embedding"] = torch.cat([item.document_kE for item in found])
        answers, cut = self._texts(samples, context), self._truncated(samples, read, context)
        return [
            Prediction(
                sample.id,
                answer,
                item.ids,
                item.scores,
                len(item.read),
                (*truncated, *(["questions for the retriever"] * item.truncated)),
            )
            for sample, answer, item, truncated in zip(samples, answers, found, cut, strict=True)
        ]

    def _document_images(
        self, unique: Sequence[str], fetched: dict[str, Document], found: Sequence[Found]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pictures of all pairs, each different one decoded once."""
        image, has_image = self.collator.images([fetched[name].image for name in unique])
        place = {name: i for i, name in enumerate(unique)}
        rows = torch.tensor([place[name] for item in found for name in item.read])
        return image[rows], has_image[rows]

    def _texts(self, samples: Sequence[Sample], context: dict[str, torch.Tensor]) -> list[str]:
        how, collator, reader = self.decoding, self.collator, self.layout.reader
        if self._candidates is not None:
            return self._likeliest(self._candidates, samples, context)
        beam = {"num_beams": how.num_beams, "length_penalty": how.length_penalty} if how.decoding == "beam" else {}
        tokens = decode(
            reader, context, num_samples=len(samples), bos=collator.bos, end=collator.end,
            max_tokens=self.config.data.max_answer_tokens, **beam,
        )  # fmt: skip
        return [self._text(row) for row in tokens.tolist()]

    def _likeliest(
        self, candidates: Candidates, samples: Sequence[Sample], context: dict[str, torch.Tensor]
    ) -> list[str]:
        """The best candidate of each question."""
        texts = [candidates.of(sample.field) for sample in samples]
        tokens = {text: self._tokens(text) for own in texts for text in own}
        prompt = torch.full((len(samples), 1), self.collator.bos, dtype=torch.int64)
        sums = score(
            self.layout.reader, context, prompt=prompt, next_inputs=next_inputs(self.layout.reader),
            continuations=[[tokens[text] for text in own] for own in texts],
        )  # fmt: skip
        best = []
        for own, likelihood in zip(texts, sums, strict=True):
            values = likelihood.tolist()
            if self.decoding.score_by == "mean":
                values = [value / len(tokens[text]) for value, text in zip(values, own, strict=True)]
            best.append(own[values.index(max(values))])
        return best

    def _tokens(self, text: str) -> list[int]:
        """A candidate as the reader would write it, end included, and cut off where the reader would have to stop."""
        if text not in self._candidate_tokens:
            self._candidate_tokens[text] = self.collator.answer_ids(text)
        return self._candidate_tokens[text][: self.config.data.max_answer_tokens]

    def _truncated(
        self, samples: Sequence[Sample], read: Sequence[Sequence[Document]], context: dict[str, torch.Tensor]
    ) -> list[tuple[str, ...]]:
        """What was cut off for each question. Only texts that fill their limit are tokenised once more."""
        data = self.config.data
        documents = [document_text(document, None) for row in read for document in row]
        long_B = self._too_long([s.question for s in samples], context["question"], data.max_query_tokens)
        long_P = self._too_long(documents, context["document"], data.max_document_tokens)
        k, found = len(documents) // len(samples), []
        for b, sample in enumerate(samples):
            cut = ["questions"] * long_B[b] + ["documents"] * sum(long_P[b * k : (b + 1) * k])
            if self._candidates is not None:
                limit = data.max_answer_tokens
                own = self._candidates.of(sample.field)
                cut += ["candidates"] * sum(len(self._candidate_tokens[text]) > limit for text in own)
            found.append(tuple(cut))
        return found

    def _too_long(self, texts: Sequence[str], tokens_NL: torch.Tensor, limit: int) -> list[bool]:
        full = (tokens_NL != self.collator.pad).sum(1) >= limit
        return [bool(there) and len(self._ids(text)) > limit for text, there in zip(texts, full, strict=True)]

    def _ids(self, text: str) -> list[int]:
        return self.collator.ids([text])[0]

    def _text(self, tokens: list[int]) -> str:
        collator = self.collator
        kept = tokens[: tokens.index(collator.end)] if collator.end in tokens else tokens
        return collator.tokenizer.decode(kept, skip_special_tokens=True).strip()


def batches(samples: Sequence[Sample], batch_size: int) -> list[list[int]]:
    """Places of the questions that are decoded together: of one field where that goes, in the given order."""
    order = sorted(range(len(samples)), key=lambda i: (samples[i].field, samples[i].kind, i))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
