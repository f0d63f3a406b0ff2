"""Small models with random weights, batches for them, and what the models themselves make of these.

Six samples (with fusion three, of two documents each) of different lengths, so there is always padding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg, CustomTextCLIP
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from pipeline import BlockProgram
from pipeline.adapters import Loss, program_of

VOCABULARY, LENGTH, NUM_SAMPLES = 61, 9, 6
_LLAMA = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def bert(kind: str = "Bert", *, dropout: float = 0.0, **options: Any) -> Any:
    config = getattr(hf, f"{kind}Config")(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24,
        max_position_embeddings=32, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, pad_token_id=0,
        **options,
    )  # fmt: skip
    return getattr(hf, f"{kind}Model")(config)


def vit(*, dropout: float = 0.0) -> Any:
    config = hf.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24, image_size=12, patch_size=4,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return hf.ViTModel(config)


def llama(kind: str = "LlamaForCausalLM", *, tied: bool = True, **options: Any) -> Any:
    family = kind.removesuffix("ForCausalLM").removesuffix("Model")
    head = {"head_dim": 4} if family == "Qwen3" else {}
    config = getattr(hf, f"{family}Config")(**_LLAMA, **head, tie_word_embeddings=tied, **options)
    return getattr(hf, kind)(config)


def gpt2(kind: str = "GPT2LMHeadModel", *, dropout: float = 0.0, **options: Any) -> Any:
    config = hf.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=3, n_head=4, n_positions=64, resid_pdrop=dropout,
        embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=1, eos_token_id=2, pad_token_id=0, **options,
    )  # fmt: skip
    return getattr(hf, kind)(config)


def t5(*, dropout: float = 0.0, **options: Any) -> Any:
    config = hf.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_decoder_layers=3, num_heads=4,
        relative_attention_num_buckets=8, relative_attention_max_distance=12, dropout_rate=dropout, pad_token_id=0,
        eos_token_id=1, decoder_start_token_id=0, **options,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


def clip(*, custom: bool = False, vision: Any = (), text: Any = ()) -> Any:
    image_tower = {"layers": 2, "width": 16, "head_width": 4, "patch_size": 4, "image_size": 12, **dict(vision)}
    text_tower = {
        "context_length": LENGTH, "vocab_size": VOCABULARY, "width": 16, "heads": 4, "layers": 2, **dict(text)
    }  # fmt: skip
    kind = CustomTextCLIP if custom else CLIP
    return kind(embed_dim=8, vision_cfg=CLIPVisionCfg(**image_tower), text_cfg=CLIPTextCfg(**text_tower))


def drawn(model: Any, *, seed: int = 0) -> Any:
    """The model in float64, every weight drawn anew: fresh ones hide faults (zeros, ones, equal layers)."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.3 * draw + (1.0 if parameter.dim() == 1 else 0.0))
    return model


def mask(*, left: bool = False, length: int = LENGTH) -> Tensor:
    """(6, length): 1 at tokens, 0 at padding; rows have length, length - 1, ... tokens, at least two."""
    num_tokens = torch.tensor([max(2, length - i) for i in range(NUM_SAMPLES)])
    right = (torch.arange(length) < num_tokens[:, None]).long()
    return right.flip(1) if left else right


def ids(mask: Tensor, *, seed: int = 3) -> Tensor:
    """Token ids (2 and above) with 0 at padding."""
    draw = torch.randint(2, VOCABULARY, mask.shape, generator=torch.Generator().manual_seed(seed))
    return draw * mask


def images() -> Tensor:
    return torch.randn(NUM_SAMPLES, 3, 12, 12, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def tokens(*, padded: bool = True, left: bool = False) -> dict[str, Tensor]:
    """A batch of token ids; with the mask if padded, with positions too if padded on the left."""
    m = mask(left=left)
    if not padded:
        return {"input_ids": ids(torch.ones_like(m))}
    batch = {"input_ids": ids(m), "attention_mask": m}
    return {**batch, "position_ids": (m.cumsum(1) - 1).clamp(min=0)} if left else batch


def pairs(*, decoder_padding: bool, fid: bool) -> dict[str, Tensor]:
    """A batch for T5; with fusion every two rows of the encoder belong to one row of the decoder."""
    m = mask(length=5)
    decoder = {"decoder_input_ids": ids(m, seed=9)}
    if decoder_padding:
        decoder["decoder_attention_mask"] = m
    if fid:
        decoder = {name: t[: NUM_SAMPLES // 2] for name, t in decoder.items()}
        decoder["sample_id"] = torch.arange(NUM_SAMPLES // 2)
    return {**tokens(), **decoder}


def model_outputs(model: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    result = model(**batch)
    names = ("logits", "last_hidden_state", "pooler_output")
    return {name: result[name] for name in names if result.get(name) is not None}


def fused_outputs(model: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Fusion in decoder with nothing but the model's own forward."""
    rows = batch["decoder_input_ids"].shape[0]
    states = model.encoder(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    return model_outputs(
        model,
        {
            "encoder_outputs": BaseModelOutput(last_hidden_state=states.reshape(rows, -1, states.shape[-1])),
            "attention_mask": batch["attention_mask"].reshape(rows, -1),
            **{name: tensor for name, tensor in batch.items() if name.startswith("decoder_")},
        },
    )


def _features(model: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    encode = {"image": model.encode_image, "text": model.encode_text}
    return {f"{name}_features": encode[name](tensor) for name, tensor in batch.items()}


@dataclass(frozen=True)
class Case:
    """A model, the options of its adapter, a batch, and the model's own outputs."""

    name: str
    make: Callable[[], Any]
    batch: Callable[[], dict[str, Tensor]]
    options: dict[str, Any] = field(default_factory=dict)
    outputs: Callable[[Any, Mapping[str, Tensor]], dict[str, Tensor]] = model_outputs

    def __str__(self) -> str:
        return self.name

    def program(self, model: Any, **more: Any) -> BlockProgram:
        return program_of(model, **self.options, **more)


def _causal_cases(name: str, make: Callable[[], Any]) -> list[Case]:
    no_mask = {"padding": False}
    return [
        Case(name, make, tokens),
        Case(f"{name}-left", make, lambda: tokens(left=True), {"positions": True}),
        Case(f"{name}-unpadded", make, lambda: tokens(padded=False), no_mask),
    ]


def eager(make: Callable[[], Any]) -> Callable[[], Any]:
    """The model with attention written out, which wants masks of another kind."""

    def built() -> Any:
        model = make()
        model.set_attn_implementation("eager")
        return model

    return built


SLIDING = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


def _cases() -> list[Case]:
    both: dict[str, Any] = {"tower": "both"}
    return [
        Case("bert", bert, tokens),
        Case("bert-eager", eager(bert), tokens),
        Case(
            "bert-types", bert,
            lambda: {**tokens(padded=False), "token_type_ids": (torch.arange(LENGTH) > 4).long().expand(6, -1)},
            {"padding": False, "token_types": True},
        ),
        Case("roberta", lambda: bert("Roberta"), tokens),
        Case("xlm-roberta", lambda: bert("XLMRoberta"), tokens),
        Case("vit", vit, lambda: {"pixel_values": images()}),
        *_causal_cases("llama", llama),
        # Not left-padded in float64: transformers' own softmax in float32 then has rows of nothing but -inf.
        *(case for case in _causal_cases("llama-eager", eager(llama)) if "left" not in case.name),
        Case("llama-untied", lambda: llama(tied=False), tokens),
        Case("llama-rope", lambda: llama(rope_parameters=LLAMA3_ROPE), tokens),
        Case("llama-headless", lambda: llama("LlamaModel"), tokens),
        *_causal_cases("mistral-sliding", lambda: llama("MistralForCausalLM", sliding_window=3)),
        *_causal_cases("qwen2-sliding", lambda: llama("Qwen2ForCausalLM", **SLIDING)),
        *_causal_cases("qwen3", lambda: llama("Qwen3ForCausalLM")),
        *_causal_cases("gpt2", gpt2),
        Case("gpt2-eager", eager(gpt2), tokens),
        Case("gpt2-headless", lambda: gpt2("GPT2Model"), tokens),
        Case("t5", t5, lambda: pairs(decoder_padding=False, fid=False)),
        Case("t5-eager", eager(t5), lambda: pairs(decoder_padding=True, fid=False), {"decoder_padding": True}),
        Case(
            "t5-gated", lambda: t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
            lambda: pairs(decoder_padding=True, fid=False), {"decoder_padding": True},
        ),
        Case("fid", t5, lambda: pairs(decoder_padding=False, fid=True), {"fid": True}, fused_outputs),
        Case(
            "fid-padded", t5, lambda: pairs(decoder_padding=True, fid=True), {"fid": True, "decoder_padding": True},
            fused_outputs,
        ),
        Case("clip", clip, lambda: {"image": images(), "text": ids(mask())}, both, _features),
        Case(
            "clip-custom", lambda: clip(custom=True, vision={"pool_type": "avg", "final_ln_after_pool": True},
                                        text={"pool_type": "last", "no_causal_mask": True, "proj_bias": True}),
            lambda: {"image": images(), "text": ids(mask())}, both, _features,
        ),
        Case("clip-image", clip, lambda: {"image": images()}, {"tower": "image"}, _features),
        Case("clip-text", clip, lambda: {"text": ids(mask())}, {"tower": "text"}, _features),
    ]  # fmt: skip


CASES = _cases()


class Probe(nn.Module):
    """A loss in which every element of every output counts, each in its own way."""

    def forward(self, *outputs_and_weight: Tensor) -> Tensor:
        *outputs, weight_B = outputs_and_weight
        parts = [o.reshape(weight_B.shape[0], -1) for o in outputs]
        return sum((p * torch.arange(p.shape[1]).cos()).sin().sum(1, keepdim=True) for p in parts) * weight_B[:, None]  # type: ignore[return-value]


def probe(outputs: Collection[str]) -> Loss:
    return Loss(Probe(), (*outputs, "sample_weight"))


def in_stages(
    program: BlockProgram, batch: Mapping[str, Tensor], cuts: tuple[int, ...], *, recomputed: Collection[str] = ()
) -> dict[str, Tensor]:
    """Outputs of a program run stage by stage, each given nothing but its carry and its batch inputs."""
    carry: dict[str, Tensor] = {}
    for first, last in zip((0, *cuts), (*cuts, len(program.blocks)), strict=True):
        given = {name: batch[name] for name in program.inputs_of(first, last, recomputed=recomputed)}
        assert list(carry) == list(program.carry(first, recomputed=recomputed))
        carry = program.run({**given, **carry}, first, last, recomputed=recomputed)
    return carry


def model_gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Gradients of a scalar by the model's own names, zeros where nothing arrives."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), found, strict=True)}
