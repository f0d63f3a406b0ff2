"""The dual encoder: one embedding for questions and documents made of text, a picture, or both.

A side (questions, documents) is a text tower, a picture tower and what fuses their vectors; kinds of towers are in
`retriever.towers`, fusions in `retriever.fusion`. Questions and documents share one side by default, so that what a
question says and what a title says fall on one place. Separate sides cost twice the weights, and allow one of them to
stand still (an index that never ages) or to learn what only questions look like. The shared side's weights, or the
questions', have the plain names (``text.gate``); those of the documents' own side begin with ``document.``.

Shapes: N rows, E embedding width, S side of a picture.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from retriever import features as feature_files
from retriever.config import Frozen, RetrieverConfig
from retriever.features import IS_DOCUMENT, Features, Featurizer, rows
from retriever.fusion import Fusion, make_fusion
from retriever.towers.interface import ImageBackend, TextBackend, Tower
from retriever.towers.kinds import image_backend
from retriever.towers.trigram_bag import TextTower

__all__ = ["DualEncoder", "EncoderSide", "Features", "TextTower", "rows"]


class EncoderSide(nn.Module):
    """Towers and fusion of questions, of documents, or of both.

    Attributes:
        text, image: a tower, or None.
        log_weight: (2,) of the text and the picture part.
    """

    text: Tower | None
    image: Tower | None

    def __init__(self, text: Tower | None, image: Tower | None, fusion: Fusion, log_weight: nn.Parameter) -> None:
        super().__init__()
        self.text, self.image, self.fusion, self.log_weight = text, image, fusion, log_weight

    def forward(self, features: Features) -> Tensor:
        """Embeddings (N, E)."""
        towers = {"text": self.text, "image": self.image}
        parts = [(tower.part(features), features[f"has_{name}"]) for name, tower in towers.items() if tower is not None]
        return self.fusion(parts, (0.5 * self.log_weight).exp())

    def copied(self) -> EncoderSide:
        """Another side with weights of its own that are equal to these."""
        text, image = copy.deepcopy(self.text), copy.deepcopy(self.image)
        return EncoderSide(text, image, copy.deepcopy(self.fusion), copy.deepcopy(self.log_weight))


class DualEncoder(EncoderSide):
    """Embeds rows of text and pictures; the score of two rows is the inner product of their embeddings.

    It is the side of questions itself, and that of documents too unless they have one of their own.

    Args:
        weights: read the towers' own weight files; not needed where a checkpoint replaces them.

    Attributes:
        document: the documents' own side, None where the sides are one.
        documents_follow: embed documents with the questions' side for now, although they have one of their own.
        log_scale: the contrastive objective's own learned scale (inverse temperature); nothing else uses it.
        featurizer: makes the features that ``forward`` takes.

    Raises:
        ValueError: if the configuration's towers cannot be made, or do not fit each other.
    """

    MAX_SCALE = 100.0
    document: EncoderSide | None

    def __init__(
        self, config: RetrieverConfig, *, image_size: int, image_transform: str = "square", weights: bool = True
    ) -> None:
        featurizer, pictures = Featurizer(config), image_backend(config, image_size)
        text = None if featurizer.text is None else featurizer.text.tower(weights=weights)
        image = None if pictures is None else pictures.tower(weights=weights)
        dims = {name: tower.dim for name, tower in (("text", text), ("image", image)) if tower is not None}
        fusion = make_fusion(config.fusion, dims, shared_dim=config.shared_dim)
        super().__init__(text, image, fusion, nn.Parameter(torch.zeros(2)))
        self.config, self.image_transform, self.featurizer = config, image_transform, featurizer
        self._pictures = pictures
        self.log_scale = nn.Parameter(torch.tensor(math.log(14.0)))
        self.document, self.documents_follow = None, False
        if config.towers == "separate":
            self.separate()
        self.freeze(config.freeze)

    @classmethod
    def empty(cls, config: RetrieverConfig, *, image_size: int, image_transform: str = "square") -> DualEncoder:
        """One whose weights are meta tensors, without memory; what is not in checkpoints (position ids) is there."""
        with torch.random.fork_rng(devices=[]):
            encoder = cls(config, image_size=image_size, image_transform=image_transform, weights=False)
        state, ghosts = set(encoder.state_dict()), dict[int, Tensor]()  # a ghost for each tensor: ties stay ties
        for path, module in encoder.named_modules():
            for store in (module._parameters, module._buffers):
                for name, tensor in store.items():
                    if tensor is not None and (f"{path}.{name}" if path else name) in state:
                        ghost = tensor.detach().to("meta")
                        if isinstance(tensor, nn.Parameter):
                            ghost = nn.Parameter(ghost, requires_grad=tensor.requires_grad)
                        store[name] = ghosts.setdefault(id(tensor), ghost)
        return encoder

    @property
    def dim(self) -> int:
        """E, the width of an embedding."""
        return self.fusion.dim

    def separate(self) -> EncoderSide:
        """Give documents a side of their own, a copy of the shared one as it is now; gives that side."""
        if self.document is None:
            self.document = self.copied()
            self.featurizer.needs_side = True
        return self.document

    def sides(self) -> list[EncoderSide]:
        """The questions' side, and the documents' if it is another."""
        return [self] if self.document is None else [self, self.document]

    def side_of(self, features: Features) -> EncoderSide:
        """The side that embeds these rows.

        Raises:
            ValueError: if there are two, and rows are of both or do not say.
        """
        if self.document is None or self.documents_follow:
            return self
        if IS_DOCUMENT not in features:
            raise ValueError("documents have a side of their own, but these rows do not say whether they are documents")
        flag = features[IS_DOCUMENT]
        if flag.any() and not flag.all():
            raise ValueError("these rows are questions and documents mixed; embed them one after the other")
        return self.document if flag.any() else self

    def freeze(self, what: Frozen) -> None:
        """Stop training a part for good: its parameters want no gradients, so no optimiser holds them.

        Raises:
            ValueError: for one side of towers that are shared.
        """
        if what in ("query", "document") and self.document is None:
            raise ValueError(
                f"retriever.freeze is {what!r}, but retriever.towers is 'shared', so questions and documents have one "
                "side; use separate towers, or freeze text, image or all"
            )
        frozen: list[nn.Module | nn.Parameter | None] = []
        if what == "query":
            frozen = [self.text, self.image, self.fusion, self.log_weight]
        elif what == "document":
            frozen = [self.document]
        elif what in ("text", "image"):
            frozen = [getattr(side, what) for side in self.sides()]
        elif what == "all":
            frozen = [part for side in self.sides() for part in (side.text, side.image, side.fusion, side.log_weight)]
        for part in frozen:
            if part is not None:
                part.requires_grad_(False)

    def features(
        self,
        texts: Sequence[str],
        images_N3SS: Tensor,
        has_image_N: Tensor,
        *,
        side: feature_files.Side | None = None,
    ) -> dict[str, Tensor]:
        """Tensors that ``forward`` takes; see `retriever.features.Featurizer`."""
        return self.featurizer(texts, images_N3SS, has_image_N, side=side)

    def forward(self, features: Features) -> Tensor:
        """Embeddings (N, E) of rows of one side."""
        side = self.side_of(features)
        return super().forward(features) if side is self else side(features)

    def scale(self) -> Tensor:
        """The contrastive scale, clamped."""
        return self.log_scale.exp().clamp(max=self.MAX_SCALE)

    def fit(self, texts: Iterable[str]) -> None:
        """Let towers that start from what texts are like (trigram gates) see some; ``texts`` is read once, if at all.

        To be called before the sides are apart in anything but name: both get the same.
        """
        if not isinstance(self.text, TextTower):
            return
        self.text.fit(texts)
        if self.document is not None and isinstance(self.document.text, TextTower):
            with torch.no_grad():
                self.document.text.gate.copy_(self.text.gate)

    def describe(self) -> dict[str, Any]:
        """All but the weights and the pictures' size that decides what an embedding means."""
        described: dict[str, Any] = {"fusion": self.config.fusion}
        backends: dict[str, TextBackend | ImageBackend | None] = {
            "text": self.featurizer.text,
            "image": self._pictures,
        }
        for name, backend in backends.items():
            described[name] = "none" if backend is None else backend.describe()
        if self.config.fusion != "blocks" and self.config.shared_dim:
            described["shared_dim"] = self.config.shared_dim
        if self.document is not None:
            described["towers"] = "separate"
        described |= {f"{side}_prefix": text for side, text in self.featurizer.prefix.items() if text}
        return described
