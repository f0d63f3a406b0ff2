"""Generation over stages and with caches against plain runs of the whole program."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from pipeline import Block, BlockProgram, Pipeline, Plan
from pipeline.beam import Beams, likeliest
from pipeline.generate import Generated, generate
from pipeline.score import score
from tests.distributed import run_on_ranks
from tests.pipeline.causal_program import END, D, V, causal_program, log_likelihood, next_inputs, source_batch

PROMPT = torch.tensor([[1, 2], [3, 1], [2, 2]])
MAX = 5
# ranks: cuts, schedule, recomputed
LAYOUTS: dict[int, list[tuple[list[int], str, tuple[str, ...]]]] = {
    1: [([], "1f1b", ())],
    2: [([4], "1f1b", ()), ([4], "1f1b", ("positions",)), ([1, 2, 4], "interleaved", ("positions",))],
    3: [([2, 4], "gpipe", ())],
}


def run(pipeline: Pipeline, *, num_beams: int = 1, cache: bool = True, max_tokens: int = MAX) -> Generated:
    return generate(
        pipeline, source_batch(), prompt=PROMPT, next_inputs=next_inputs, end=END, max_tokens=max_tokens,
        num_beams=num_beams, cache=cache,
    )  # fmt: skip


def greedy_by_plain_runs() -> tuple[list[list[int]], list[float]]:
    program, source = causal_program(), source_batch()["source"]
    rows, scores = [], []
    for i in range(len(PROMPT)):
        tokens, score = PROMPT[i].tolist(), 0.0
        for _ in range(MAX):
            with torch.no_grad():
                env = {"source": source[i : i + 1], **next_inputs(torch.tensor([tokens]), 0)}
                log_p = program.run(env)["logits"][0, -1].log_softmax(-1)
            tokens.append(int(log_p.argmax()))
            score += log_p.max().item()
            if tokens[-1] == END:
                break
        rows.append(tokens[PROMPT.shape[1] :])
        scores.append(score)
    return rows, scores


def _layouts(num_ranks: int) -> list[tuple[Tensor, Tensor]]:
    found = []
    for cuts, schedule, recomputed in LAYOUTS[num_ranks]:
        for num_beams, cache in ((1, True), (1, False), (3, True), (3, False)):
            program = causal_program()
            plan = Plan.from_cuts(
                program, cuts, schedule=schedule, num_microbatches=4, num_ranks=num_ranks, recomputed=recomputed
            )
            done = run(Pipeline(program, plan, timeout_s=30), num_beams=num_beams, cache=cache)
            found.append((done.tokens, done.score))
            if num_ranks == 1:
                assert program.blocks[0].module.calls == 1, "what depends on no token runs once"
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_layout_generates_what_plain_runs_do(num_ranks: int) -> None:
    ranks = [_layouts(1)] if num_ranks == 1 else run_on_ranks(_layouts, num_ranks, num_ranks)
    rows, scores = greedy_by_plain_runs()
    assert len({len(row) for row in rows}) > 1, "the samples end at different lengths"
    beams = _layouts(1)[2]
    for rank in ranks:
        for i, (tokens, sums) in enumerate(rank):
            if i % 4 < 2:
                width = max(len(row) for row in rows)
                assert tokens.tolist() == [row + [END] * (width - len(row)) for row in rows]
                assert sums.tolist() == pytest.approx(scores, rel=1e-9)
            else:
                assert torch.equal(tokens, beams[0])
                torch.testing.assert_close(sums, beams[1])


def answers(max_tokens: int) -> list[list[int]]:
    """Every answer: words that are not END, then END, or ``max_tokens`` words without it."""
    words = [t for t in range(V) if t != END]
    found = [list(a) for a in itertools.product(words, repeat=max_tokens)]
    for length in range(max_tokens):
        found += [[*a, END] for a in itertools.product(words, repeat=length)]
    return found


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_a_beam_that_holds_everything_finds_the_best_of_all_answers(penalty: float) -> None:
    program, length = causal_program(), 3
    source = source_batch()["source"]
    done = generate(
        Pipeline(program, Plan.from_cuts(program, [])), source_batch(), prompt=PROMPT, next_inputs=next_inputs,
        end=END, max_tokens=length, num_beams=(V - 1) ** length, length_penalty=penalty,
    )  # fmt: skip
    for i in range(len(PROMPT)):
        every = [(log_likelihood(program, source[i], PROMPT[i].tolist(), a), a) for a in answers(length)]
        score, best = max(every, key=lambda item: item[0] / len(item[1]) ** penalty)
        assert done.tokens[i, : len(best)].tolist() == best
        assert done.score[i].item() == pytest.approx(score)


def test_a_block_that_looks_at_other_positions_is_refused_with_caches() -> None:
    program = causal_program(shift=True)
    pipeline = Pipeline(program, Plan.from_cuts(program, []))
    with pytest.raises(ValueError, match="block 'shift' cannot run on new positions alone"):
        run(pipeline)
    assert run(pipeline, cache=False).tokens.shape[0] == len(PROMPT)


def test_mistakes() -> None:
    program = causal_program()
    pipeline = Pipeline(program, Plan.from_cuts(program, []))
    with pytest.raises(ValueError, match="did you mean 'logits'"):
        generate(
            pipeline, source_batch(), prompt=PROMPT, next_inputs=next_inputs, end=END, max_tokens=1, logits="logit"
        )
    with pytest.raises(ValueError, match="max_tokens is 0"):
        run(pipeline, max_tokens=0)
    with pytest.raises(ValueError, match=r"prompt has shape \(3, 0\)"):
        generate(pipeline, {}, prompt=PROMPT[:, :0], next_inputs=next_inputs, end=END, max_tokens=1)
    with pytest.raises(ValueError, match="gives input 'source'"):
        generate(pipeline, {}, prompt=PROMPT, next_inputs=next_inputs, end=END, max_tokens=1)
    with pytest.raises(ValueError, match=r"gives 'token', which is no batch input \(did you mean 'tokens'\?\)"):
        generate(pipeline, source_batch(), prompt=PROMPT, next_inputs=lambda t, _: {"token": t}, end=END, max_tokens=1)


def plain_program(block: str) -> BlockProgram:
    """Tokens -> embedding -> one block -> head that also reads the source; everything is called ``h``."""
    torch.manual_seed(3)
    module = {"linear": nn.Linear(D, D), "attention": Attention()}[block]
    return (
        BlockProgram(
            [
                Block("embed", nn.Embedding(V, D), ("tokens",), ("h",)),
                Block(block, module, ("h",), ("h",)),
                Block("head", Join(), ("h", "source"), ("logits",)),
            ],
            inputs=("tokens", "source"),
            outputs=("logits",),
        )
        .double()
        .eval()
    )


class Attention(nn.Module):
    """Causal attention without a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(D, 3 * D)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.project(h).chunk(3, dim=-1)
        mask = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).tril()
        return h + ((q @ k.mT).masked_fill(~mask, -torch.inf)).softmax(-1) @ v


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(V, D), nn.Linear(D, V)

    def forward(self, h: Tensor, source: Tensor) -> Tensor:
        return self.out(h * (1.0 + self.table(source).sum(1, keepdim=True)))


def only_tokens(tokens: Tensor, past: int) -> dict[str, Tensor]:
    return {"tokens": tokens[:, past:]}


def test_a_name_written_anew_by_every_block_moves_with_the_tokens() -> None:
    program = plain_program("linear")
    pipeline, tokens = Pipeline(program, Plan.from_cuts(program, [])), PROMPT
    for _ in range(4):
        with torch.no_grad():
            logits = program.run({**source_batch(), "tokens": tokens})["logits"]
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
    for cache in (True, False):
        done = generate(
            pipeline, source_batch(), prompt=PROMPT, next_inputs=only_tokens, end=-1, max_tokens=4, cache=cache
        )
        assert torch.equal(done.tokens, tokens[:, 2:])


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:, :1]], ids=["two tokens", "one token"])
def test_attention_without_a_cache_is_refused_whatever_the_prompt(prompt: Tensor) -> None:
    program = plain_program("attention")
    pipeline = Pipeline(program, Plan.from_cuts(program, []))
    with pytest.raises(ValueError, match="block 'attention' cannot run on new positions alone"):
        generate(pipeline, source_batch(), prompt=prompt, next_inputs=only_tokens, end=-1, max_tokens=3, num_beams=2)


def test_nan_is_said() -> None:
    program = plain_program("linear")
    program.blocks[1].module.weight.data.fill_(float("nan"))
    pipeline = Pipeline(program, Plan.from_cuts(program, []))
    with pytest.raises(ValueError, match="NaN"):
        generate(pipeline, source_batch(), prompt=PROMPT, next_inputs=only_tokens, end=-1, max_tokens=2, cache=False)


def test_ties_go_to_the_smallest_token() -> None:
    """Against sorting (-p, index) pairs; few different values, so ties are everywhere, also at the edge."""
    p = torch.randint(0, 4, (200, 12), generator=torch.Generator().manual_seed(0)).double()
    for count in (1, 2, 5, 12):
        values, index = likeliest(p, count)
        for row, found in enumerate(index.tolist()):
            right = sorted(range(12), key=lambda i: (-p[row, i].item(), i))[:count]
            assert found == right and values[row].tolist() == [p[row, i].item() for i in right]


@pytest.mark.parametrize("rows_at_once", [1, 2, 100])
def test_scores_are_the_log_likelihoods_of_plain_runs(rows_at_once: int) -> None:
    """Ragged continuations, one that goes on after END; the block that depends on no token runs once."""
    program, source = causal_program(), source_batch()["source"]
    continuations = [[[0, 1, END], [2, END], [END]], [[5, 3, 1, 0]], [[1], [1, 1], [END, 2]]]
    found = score(
        Pipeline(program, Plan.from_cuts(program, [])), source_batch(), prompt=PROMPT, continuations=continuations,
        next_inputs=next_inputs, rows_at_once=rows_at_once,
    )  # fmt: skip
    assert program.blocks[0].module.calls == 1
    for i, own in enumerate(continuations):
        right = [log_likelihood(program, source[i], PROMPT[i].tolist(), tokens) for tokens in own]
        assert found[i].tolist() == pytest.approx(right, rel=1e-12)


def _scored(num_ranks: int) -> list[list[float]]:
    found = []
    for cuts, schedule, recomputed in LAYOUTS[num_ranks]:
        program = causal_program()
        plan = Plan.from_cuts(
            program, cuts, schedule=schedule, num_microbatches=4, num_ranks=num_ranks, recomputed=recomputed
        )
        sums = score(
            Pipeline(program, plan, timeout_s=30), source_batch(), prompt=PROMPT,
            continuations=[[[0, 1], [2]], [[3, END, 1]], [[5], [4]]], next_inputs=next_inputs,
        )  # fmt: skip
        found.append(torch.cat(sums).tolist())
    return found


def test_scores_over_stages_are_those_of_one_process() -> None:
    (right,) = _scored(1)
    for num_ranks in (2, 3):
        for rank in run_on_ranks(_scored, num_ranks, num_ranks):
            for sums in rank:
                assert sums == pytest.approx(right, rel=1e-12)


def test_mistakes_of_scoring() -> None:
    program = causal_program()
    pipeline, given = Pipeline(program, Plan.from_cuts(program, [])), {"next_inputs": next_inputs}
    with pytest.raises(ValueError, match="continuations of 1 samples and prompts of 3"):
        score(pipeline, source_batch(), prompt=PROMPT, continuations=[[[1]]], **given)
    with pytest.raises(ValueError, match="sample 1 has no continuation, or one without tokens"):
        score(pipeline, source_batch(), prompt=PROMPT, continuations=[[[1]], [[]], [[1]]], **given)
    shifted = causal_program(shift=True)
    with pytest.raises(ValueError, match="block 'shift' cannot run on new positions alone"):
        score(
            Pipeline(shifted, Plan.from_cuts(shifted, [])), source_batch(), prompt=PROMPT,
            continuations=[[[1, 2]]] * 3, **given,
        )  # fmt: skip


def test_greedy_takes_the_smallest_of_equally_likely_tokens() -> None:
    p = torch.randint(0, 3, (64, 300), generator=torch.Generator().manual_seed(0)).double()
    beams = Beams(end=-1)
    beams.start(64, max_tokens=2)
    right = [row.index(max(row)) for row in p.tolist()]
    assert beams.choose(p)["token"].tolist() == right
