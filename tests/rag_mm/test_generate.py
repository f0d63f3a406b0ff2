"""Answering with caches and over stages against the slow twin: the training program on each growing prefix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipeline import BlockProgram, Pipeline, Plan
from pipeline.decoding import Decoding
from pipeline.score import score
from rag_mm.reader.fusion import answering_program
from rag_mm.reader.generate import decode, next_inputs
from tests.distributed import run_on_ranks
from tests.rag_mm.reader_batch import V, reader, reader_batch

BOS, END, MAX = 1, 23, 6
FUSIONS = ("fid", "prepend")
# ranks: cuts of fid's 7 blocks and of prepend's 6
CUTS = {1: ([], []), 2: ([5], [3]), 3: ([3, 6], [2, 4])}


def lively_reader(fusion: str, *, seed: int = 1, **objectives: float) -> BlockProgram:
    """Untrained readers repeat themselves; with sharper pointers and gates they say several things."""
    program = reader(fusion, **{"pdist": 1.0, "rag_sequence": 1.0, **objectives}).eval()
    pointer = program.blocks[-1].module.pointer
    with torch.no_grad():
        pointer.query.weight.mul_(12.0)
        pointer.vocabulary.bias.normal_(std=3.0, generator=torch.Generator().manual_seed(seed))
    return program


def context(rows: int = 4, *, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    batch = reader_batch(rows)
    answering = answering_program(reader("fid"))
    names = [name for name in answering.inputs if name != "answer_in"]
    return {n: batch[n].detach().to(dtype) if batch[n].is_floating_point() else batch[n] for n in names}


def twin_distribution(program: BlockProgram, given: dict[str, Tensor], answer: Tensor) -> Tensor:
    """p(v | answer so far) (B, T, V): what the training program's head computes for its statistics."""
    pointer, seen = program.blocks[-1].module.pointer, []
    original = pointer.distribution
    pointer.distribution = lambda *parts: seen.append(original(*parts)) or seen[-1]
    try:
        ones = torch.ones(len(answer), dtype=given["query_embedding"].dtype)
        batch = {**given, "answer_in": answer, "target": answer, "sample_weight": ones, "distill_weight": ones}
        weight = torch.ones(answer.shape, dtype=ones.dtype)
        with torch.no_grad():
            program.run({**batch, "target_weight": weight, "sample_id": torch.arange(len(answer))})
    finally:
        del pointer.distribution
    return seen[-1]


def twin_greedy(program: BlockProgram, given: dict[str, Tensor]) -> Tensor:
    answer = torch.full((len(given["question"]), 1), BOS)
    done = torch.zeros(len(answer), dtype=torch.bool)
    while answer.shape[1] <= MAX and not done.all():
        following = twin_distribution(program, given, answer)[:, -1].argmax(-1).masked_fill(done, END)
        done |= following == END
        answer = torch.cat([answer, following[:, None]], dim=1)
    return answer[:, 1:]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("fusion", FUSIONS)
def test_logits_with_caches_equal_the_training_program(fusion: str, dtype: torch.dtype, tolerance: float) -> None:
    """In pieces of one, two and more tokens; the documents are ragged and some pictures are missing."""
    program, given = lively_reader(fusion).to(dtype), context(dtype=dtype)
    answer = torch.randint(1, V, (4, 7), generator=torch.Generator().manual_seed(1))
    answer[:, 3:5] = given["document"][::2, 6:8]  # a copy under way counts in the pointer
    right = twin_distribution(program, given, answer)
    answering = answering_program(program)
    pipeline = Pipeline(answering, Plan.from_cuts(answering, []))
    for ends in ([1, 2, 3, 4, 5, 6, 7], [2, 5, 7], [7]):
        decoding, parts, past = Decoding(pipeline, given, next_inputs(pipeline), logits="logits", cache=True), [], 0
        with torch.no_grad():
            for end in ends:
                parts.append(decoding.next_scores(answer[:, :end], past))
                past = end
        torch.testing.assert_close(torch.cat(parts, 1).exp().to(dtype), right, atol=tolerance, rtol=0)


def layouts(num_ranks: int, fusion: str) -> dict[str, object]:
    program = answering_program(lively_reader(fusion))
    cuts = CUTS[num_ranks][FUSIONS.index(fusion)]
    plan = Plan.from_cuts(program, cuts, schedule="gpipe")
    pipeline, given = Pipeline(program, plan, timeout_s=30), context()
    how = {"num_samples": 4, "bos": BOS, "end": END, "max_tokens": MAX}
    found: dict[str, object] = {}
    for cache in (True, False):
        found[f"greedy {cache}"] = decode(pipeline, given, **how, cache=cache)
        found[f"beam {cache}"] = decode(pipeline, given, **how, num_beams=3, cache=cache)
    prompt = torch.full((4, 1), BOS)
    answer_inputs = next_inputs(pipeline)
    found["score"] = score(pipeline, given, prompt=prompt, continuations=CANDIDATES, next_inputs=answer_inputs)
    found["score by 2"] = score(
        pipeline, given, prompt=prompt, continuations=CANDIDATES, next_inputs=answer_inputs, rows_at_once=2
    )
    return found


CANDIDATES = [
    [[5, END], [7, 8, 9, END], [END], [11, 12, 13, 14, 15, END]],
    [[20, 22, END]],
    [[5], [5, 5], [5, 5, 5]],
    [[30, END], [31, 32, END], [33, END], [34, END], [35, 36, 37, END]],
]


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_layout_answers_as_the_training_program_would(num_ranks: int, fusion: str) -> None:
    ranks = [layouts(1, fusion)] if num_ranks == 1 else run_on_ranks(layouts, num_ranks, num_ranks, fusion)
    program, given = lively_reader(fusion), context()
    greedy = twin_greedy(program, given)
    assert len({tuple(row) for row in greedy.tolist()}) == 4, "four different answers"
    assert (greedy == END).any() and not (greedy == END).any(1).all(), "ragged: some end, some do not"
    right = []
    for b, own in enumerate(CANDIDATES):
        one = {n: t[2 * b : 2 * b + 2] if len(t) == 8 else t[b : b + 1] for n, t in given.items()}
        for tokens in own:
            p = twin_distribution(program, one, torch.tensor([[BOS, *tokens[:-1]]]))[0]
            right.append(sum(p[i, t].log().item() for i, t in enumerate(tokens)))
    for found in ranks:
        for cache in (True, False):
            assert torch.equal(found[f"greedy {cache}"], greedy)
            assert torch.equal(found[f"beam {cache}"], found["beam False"])
        assert not torch.equal(found["beam True"], greedy), "three beams find something better"
        for name in ("score", "score by 2"):
            assert [len(row) for row in found[name]] == [len(own) for own in CANDIDATES]
            torch.testing.assert_close(
                torch.cat(found[name]), torch.tensor(right, dtype=torch.float64), atol=1e-10, rtol=1e-10
            )
