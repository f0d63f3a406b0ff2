"""One function that finds the adapter of a model.

Models are recognised by the names of their classes, so ``transformers`` and ``open_clip`` are imported
only by the adapters that need them.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from pipeline.program import BlockProgram, nearest

_LLAMA = "pipeline.adapters.causal:llama_program"
_GPT2 = "pipeline.adapters.causal:gpt2_program"
_BERT = "pipeline.adapters.encoders:bert_program"
# (package that defines the class, class) -> where its adapter is.
_ADAPTERS = {
    ("torch", "Sequential"): "pipeline.adapters.sequential:sequential",
    ("transformers", "BertModel"): _BERT,
    ("transformers", "RobertaModel"): _BERT,
    ("transformers", "XLMRobertaModel"): _BERT,
    ("transformers", "ViTModel"): "pipeline.adapters.encoders:vit_program",
    **{
        ("transformers", f"{family}{kind}"): _LLAMA
        for family in ("Llama", "Mistral", "Qwen2", "Qwen3")
        for kind in ("ForCausalLM", "Model")
    },
    ("transformers", "GPT2LMHeadModel"): _GPT2,
    ("transformers", "GPT2Model"): _GPT2,
    ("transformers", "T5ForConditionalGeneration"): "pipeline.adapters.t5:t5_program",
    ("open_clip", "CLIP"): "pipeline.adapters.clip:clip_program",
    ("open_clip", "CustomTextCLIP"): "pipeline.adapters.clip:clip_program",
}


def supported() -> tuple[str, ...]:
    """Classes that `program_of` knows, as ``package.Class``."""
    return tuple(f"{package}.{name}" for package, name in _ADAPTERS)


def program_of(model: nn.Module, **options: Any) -> BlockProgram:
    """The block program of a model: its own submodules as blocks, weights untouched.

    Args:
        model: of a class in `supported`, or a subclass that keeps its ``forward``.
        options: of the adapter, such as ``with_loss``, ``sample_id``, ``padding`` or ``tower``.

    Raises:
        ValueError: for an unknown class (names the supported ones and the nearest) or an unknown option.
    """
    adapter = _adapter(model)
    allowed = [p.name for p in inspect.signature(adapter).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for name in options:
        if name not in allowed:
            raise ValueError(
                f"{adapter.__name__} has no option {name!r}{nearest(name, allowed)}; allowed: {', '.join(allowed)}"
            )
    needed = [
        p.name
        for p in inspect.signature(adapter).parameters.values()
        if p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name not in options
    ]
    if needed:
        raise ValueError(f"{adapter.__name__} needs the option {needed[0]!r} for a {type(model).__name__}")
    return adapter(model, **options)


def _adapter(model: nn.Module) -> Callable[..., BlockProgram]:
    for kind in type(model).__mro__:
        where = _ADAPTERS.get((kind.__module__.partition(".")[0], kind.__name__))
        if where is not None:
            module, _, function = where.partition(":")
            return getattr(importlib.import_module(module), function)
    name = type(model).__name__
    known = {full.partition(".")[2]: full for full in supported()}
    raise ValueError(
        f"no adapter for {type(model).__module__}.{name}{nearest(name, known)}; supported: {', '.join(supported())}. "
        "Other models are written as a BlockProgram by hand (docs/pipeline.md)"
    )
