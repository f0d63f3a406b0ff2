"""Finding the adapter of a model, and what is said where there is none."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import transformers as hf
from torch import nn

from pipeline.adapters import program_of, squared_error, supported
from tests.pipeline.adapters.models import bert, clip, llama


class MyBert(hf.BertModel):
    """A subclass that computes the same."""


class Scaled(hf.LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class BertModule(nn.Module):
    pass


def test_a_subclass_with_the_same_forward_is_taken() -> None:
    assert program_of(MyBert(bert().config)).blocks[0].name == "embeddings"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: program_of(BertModule()),
            r"no adapter for .*BertModule \(did you mean 'BertModel'\?\); supported: torch.S",
        ),
        (lambda: program_of(nn.Linear(1, 1)), "no adapter for torch.*Linear.*supported: .*open_clip.CLIP"),
        (
            lambda: program_of(bert(), paddings=True),
            r"no option 'paddings' \(did you mean 'padding'\?\); allowed: padding, t",
        ),
        (lambda: program_of(clip()), "clip_program needs the option 'tower' for a CLIP"),
        (lambda: program_of(clip(), tower="images"), r"tower is 'images'; allowed: image, text, both \(did you mean"),
        (lambda: program_of(Scaled(llama().config)), "Scaled overrides forward of LlamaForCausalLM"),
        (lambda: program_of(bert(), with_loss=squared_error("pooled")), "one of: last_hidden_state, pooler_output"),
        (lambda: program_of(bert(is_decoder=True)), "this adapter lists encoders"),
        (
            lambda: program_of(clip(vision={"layers": [1, 1, 1, 1], "image_size": 32}), tower="image"),
            "is a ModifiedResNet",
        ),
        (
            lambda: program_of(clip(vision={"attentional_pool": True, "attn_pooler_heads": 4}), tower="both"),
            "pools by attention",
        ),
        (lambda: program_of(clip(custom=True, text={"embed_cls": True}), tower="text"), "has a class token"),
    ],
)
def test_errors_name_what_is_there_and_what_to_do(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_every_supported_class_exists_and_has_its_adapter() -> None:
    for name in supported():
        package, _, kind = name.partition(".")
        module = {"torch": "torch.nn", "open_clip": "open_clip.model"}.get(package, package)
        assert isinstance(getattr(sys.modules[module], kind), type), name


def test_importing_the_package_imports_neither_transformers_nor_open_clip() -> None:
    code = "import pipeline.adapters, sys; print([m for m in ('transformers', 'open_clip') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_blocks_that_nothing_reads_are_left_out() -> None:
    program = program_of(bert(), with_loss=squared_error("last_hidden_state"))
    assert "pooler" not in [block.name for block in program.blocks]
    assert program_of(bert()).outputs == ("last_hidden_state", "pooler_output")
