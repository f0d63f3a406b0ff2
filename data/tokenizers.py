"""Any transformers tokenizer, made to fit what the reader asks of one.

The reader pads with id 0, begins answers with a token of their own, and ends answers and document lines with a newline
that is a token of its own, so that the end of an answer can be copied from a document. A tokenizer that was trained
on the data set (`data.vocabulary`) has all that. Others miss some of it: BERT's drop newlines, GPT-2's have no padding,
and few pad with 0. What is missing is added at the end of the vocabulary, and the ids 0 and that of the padding are
swapped; a warning says both. Weights that were trained with a tokenizer know nothing of the swap, so such an embedding
table would have to be swapped likewise.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NEWLINE = "\n"
_PROBES = ("a\nb", "a: 1\nb c\n", "x.\n", "\ny")


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer of a local folder, as it is or in a `FittedTokenizer`.

    Raises:
        ValueError: if there is none.
    """
    from transformers import AutoTokenizer

    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"data.tokenizer is {str(folder)!r}, which is not a folder; save_pretrained makes one")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"data.tokenizer is {str(folder)!r}, which holds no tokenizer: {error}") from None
    if fits(tokenizer):
        return tokenizer
    fitted = FittedTokenizer(tokenizer)
    warnings.warn(f"data.tokenizer is {str(folder)!r}, which is used with changes: {fitted.changes}", stacklevel=2)
    return fitted


def fits(tokenizer: Any) -> bool:
    """Whether the reader can use it as it is."""
    return tokenizer.pad_token_id == 0 and tokenizer.bos_token_id is not None and _keeps_newlines(tokenizer)


def _keeps_newlines(tokenizer: Any) -> bool:
    ids = tokenizer(NEWLINE, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        return False
    probed = tokenizer(list(_PROBES), add_special_tokens=False)["input_ids"]
    return all(row.count(ids[0]) == text.count(NEWLINE) for row, text in zip(probed, _PROBES, strict=True))


class FittedTokenizer:
    """The part of a tokenizer's interface that this framework uses, over one that lacked something.

    Attributes:
        added: what was added to the vocabulary.
        pad_token_id: 0.
        bos_token_id: what answers begin with.
    """

    pad_token_id = 0

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers import AddedToken

        self.tokenizer = tokenizer
        self.added: list[str] = []
        if tokenizer.pad_token_id is None:
            tokenizer.add_special_tokens({"pad_token": "<pad>"})
            self.added.append("<pad>")
        if tokenizer.bos_token_id is None:
            if tokenizer.cls_token_id is None:
                tokenizer.add_special_tokens({"bos_token": "<bos>"})
                self.added.append("<bos>")
            else:
                tokenizer.bos_token = tokenizer.cls_token
        if not _keeps_newlines(tokenizer):
            tokenizer.add_tokens([AddedToken(NEWLINE, normalized=False, single_word=False)])
            self.added.append(NEWLINE)
        if not _keeps_newlines(tokenizer):
            raise ValueError(f"{tokenizer.name_or_path} does not keep newlines apart even if they are added to it")
        self._pad = tokenizer.pad_token_id
        self.bos_token_id = self._swap(tokenizer.bos_token_id)

    @property
    def changes(self) -> str:
        """What was changed, in words."""
        added = [f"added to its {len(self)} entries: {', '.join(map(repr, self.added))}"] if self.added else []
        return "; ".join([*added, *([f"ids 0 and {self._pad} are swapped"] if self._pad else [])])

    def _swap(self, token: int) -> int:
        return self._pad if token == 0 else 0 if token == self._pad else token

    def __len__(self) -> int:
        return len(self.tokenizer)

    @property
    def all_special_ids(self) -> list[int]:
        return [self._swap(token) for token in self.tokenizer.all_special_ids]

    def __call__(self, text: str | Sequence[str], *, add_special_tokens: bool) -> dict[str, Any]:
        ids = self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        if isinstance(text, str):
            return {"input_ids": [self._swap(token) for token in ids]}
        return {"input_ids": [[self._swap(token) for token in row] for row in ids]}

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        swapped = [self._swap(int(token)) for token in ids]
        return str(self.tokenizer.decode(swapped, skip_special_tokens=skip_special_tokens))
