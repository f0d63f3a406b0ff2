"""Names of the original model: all of them, ties included, to a file and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from pipeline import Block, BlockProgram
from pipeline.adapters import from_original, load_original, original_names, program_of, sequential, to_original
from tests.pipeline.adapters.models import CASES, Case, drawn, llama, t5


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_round_trip_through_a_file(case: Case, tmp_path: Path) -> None:
    """Out of one program under the model's names, into another with other weights, bit for bit."""
    model = drawn(case.make(), seed=1)
    program = case.program(model)
    names = original_names(program, model)
    save_file(to_original(program.named_parameters_global(), names), tmp_path / "model.safetensors")
    other_model = drawn(case.make(), seed=2)
    other = case.program(other_model)
    load_original(other, load_file(tmp_path / "model.safetensors"), original_names(other, other_model))
    theirs = other.named_parameters_global()
    assert all(torch.equal(p, theirs[n]) for n, p in program.named_parameters_global().items())
    assert torch.equal(next(iter(other(case.batch()).values())), next(iter(program(case.batch()).values())))


def test_tied_names_are_all_known_and_the_first_is_the_one_in_files() -> None:
    model = llama()
    names = original_names(program_of(model), model)
    assert names["model.embed_tokens.weight"] == ("model.embed_tokens.weight", "lm_head.weight")
    assert names["model.layers.1.layer.mlp.up_proj.weight"] == ("model.layers.1.mlp.up_proj.weight",)
    model = t5()
    tied = original_names(program_of(model), model)["encoder.embed.embed_tokens.weight"]
    assert tied[0] == "shared.weight" and "lm_head.weight" in tied and len(tied) == 4


def test_a_whole_state_dict_with_ties_loads_into_the_model() -> None:
    model = drawn(llama())
    program = program_of(model)
    state = to_original(program.named_parameters_global(), original_names(program, model), ties=True)
    llama().double().load_state_dict(state, strict=True)


def test_stored_buffers_have_names_too() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    names = original_names(sequential(model), model)
    assert names["layer.1.running_mean"] == ("1.running_mean",) and len(names) == 7
    load_original(sequential(model), {**model.state_dict(), "1.running_mean": torch.arange(4.0)}, names)
    assert torch.equal(model[1].running_mean, torch.arange(4.0))


def test_mistakes_are_named() -> None:
    model = llama()
    program = program_of(model)
    names = original_names(program, model)
    state = to_original(program.named_parameters_global(), names)
    norm = "model.norm.weight"
    with pytest.raises(ValueError, match=r"unknown global name 'model.nrm.weight' \(did you mean 'model.norm.weight'"):
        to_original({"model.nrm.weight": state[norm]}, names)
    with pytest.raises(ValueError, match=r"'model.norm.weight' is missing"):
        from_original({n: t for n, t in state.items() if n != norm}, names)
    with pytest.raises(ValueError, match=r"'extra' and 0 more belong to no block"):
        from_original({**state, "extra": state[norm]}, names)
    assert list(from_original({**state, "extra": state[norm]}, names, strict=False)) == list(names)
    with pytest.raises(ValueError, match="are one tied tensor, but their values differ"):
        from_original({**state, "lm_head.weight": state["model.embed_tokens.weight"] + 1}, names)
    before = model.model.norm.weight.clone()
    with pytest.raises(ValueError, match=r"'model.norm.weight' has shape \(3,\); the program's has \(16,\)"):
        load_original(program, {**state, norm: torch.zeros(3)}, names)
    assert torch.equal(model.model.norm.weight, before)
    own = BlockProgram([Block("x", nn.Linear(2, 2), ("x",), ("y",))], inputs=("x",), outputs=("y",))
    with pytest.raises(ValueError, match=r"'x.weight' is no tensor of this LlamaForCausalLM"):
        original_names(own, model)
