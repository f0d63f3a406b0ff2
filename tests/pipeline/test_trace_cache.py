"""A trace is found again if, and only if, nothing that it depends on has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline import Block, BlockProgram, Profile, trace
from pipeline.keyed_modules import make_keyed


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def program_of(
    *, width: int = 4, function: Callable[[Tensor], Tensor] = torch.tanh, p: float = 0.0, name: str = "b"
) -> BlockProgram:
    module = nn.Sequential(nn.Linear(3, width), Apply(function), nn.Dropout(p))
    return BlockProgram([Block(name, module, ("x",), ("losses",))], inputs=("sample_id", "x"), outputs=("losses",))


def run(program: BlockProgram, folder: Path, *, rows: int = 4, **more: Any) -> Profile:
    batch = {"sample_id": torch.arange(rows), "x": torch.randn(rows, 3)}
    options: dict[str, Any] = {"num_microbatches": 1, "repeats": 1, **more}
    return trace(program, batch, cache_dir=folder, **options)


def test_a_second_trace_is_read(tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    first = run(program_of(), tmp_path)
    again = run(program_of(), tmp_path, progress=lambda *now: told.append(now))  # other weights, same program
    assert again == first and again.cached and not first.cached
    assert told == [(1, 1, "cached")] and len(list(tmp_path.iterdir())) == 1


def double(x: Tensor) -> Tensor:
    return x * 2


def triple(x: Tensor) -> Tensor:
    return x * 3


def frozen() -> BlockProgram:
    return program_of().requires_grad_(False)


def keyed() -> BlockProgram:
    return make_keyed(program_of(p=0.5))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: program_of(width=5), {}),
        (lambda: program_of(name="c"), {}),
        (lambda: program_of(function=double), {}),
        (lambda: program_of(function=triple), {}),
        (lambda: program_of(function=lambda x: x * 4), {}),
        (lambda: program_of(p=0.5).eval(), {}),
        (lambda: program_of(p=0.25).eval(), {}),
        (lambda: program_of().eval(), {}),
        (lambda: program_of().double(), {}),
        (frozen, {}),
        (keyed, {}),
        (program_of, {"rows": 6}),
        (program_of, {"num_microbatches": 2}),
        (program_of, {"lineage": False}),
        (program_of, {"repeats": 2}),
    ],
)
def test_a_change_is_seen(tmp_path: Path, make: Callable[[], BlockProgram], options: dict[str, Any]) -> None:
    run(program_of(), tmp_path)
    run(program_of(function=lambda x: x * 5), tmp_path)
    program = make()
    if next(program.parameters()).dtype == torch.float64:
        batch = {"sample_id": torch.arange(4), "x": torch.randn(4, 3).double()}
        assert not trace(program, batch, cache_dir=tmp_path, num_microbatches=1, repeats=1).cached
    else:
        assert not run(program, tmp_path, **options).cached
    assert len(list(tmp_path.iterdir())) == 3


def test_the_number_of_threads_counts(tmp_path: Path) -> None:
    run(program_of(), tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert not run(program_of(), tmp_path).cached
    finally:
        torch.set_num_threads(threads)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    run(program_of(), tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text("{}")
    with pytest.raises(ValueError, match=f"{path.name}.*delete the file"):
        run(program_of(), tmp_path)
