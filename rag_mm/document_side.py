"""The documents' own side of the retriever where the index must never age (``index.refresh: query_side``).

Documents are embedded once and their towers stand still from then on, so the index is always right and costs nothing;
what the questions' towers can still do is move towards it. Until then shared towers train as one: the copy has a place
in checkpoints from the first step on, so that every one of them is whole for evaluation and every rank's memory is
the same throughout. The price is the memory of one more side.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rag_mm.towers import Towers
from retriever.embed import DOCUMENT


class DocumentSide:
    """That side, over dealt or piped towers.

    Until the first index is made it follows the questions' side, or is trained apart from it if ``retriever.towers`` is
    separate.
    """

    def __init__(self, towers: Towers) -> None:
        self.towers, self.encoder = towers, towers.encoder

    @torch.no_grad()
    def catch_up(self) -> None:
        """Give it the questions' weights, as long as it follows them."""
        if self.encoder.documents_follow:
            here = self.towers.tensors_here()
            for name, tensor in here.items():
                if name.startswith(DOCUMENT):
                    tensor.copy_(here[name.removeprefix(DOCUMENT)])

    def stand_still(self) -> None:
        """Stop it for good with the weights that it has: no gradient reaches it, and no optimiser moves it."""
        self.encoder.documents_follow = False
        self.encoder.freeze("document")
        for trained in (self.towers.replicated, self.towers.sharded):
            for name in [name for name in trained if name.startswith(DOCUMENT)]:
                del trained[name]

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within it, documents are embedded with it: as they will be when the reader trains."""
        follow, self.encoder.documents_follow = self.encoder.documents_follow, False
        yield
        self.encoder.documents_follow = follow
