"""A public decoder as the reader: the model's own answers and gradients, on any layout, and through the commands."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from data.config import DataConfig
from data.dataset import Dataset, Sample
from data.document_store import Document
from pipeline import BlockProgram, Pipeline, Plan
from pipeline.lineage import require_sample_lineage
from pipeline.score import score
from pipeline.trace import trace
from pipeline.verify import gradient_report, whole_batch_gradients
from rag_mm.evaluate.__main__ import main as evaluate
from rag_mm.objectives import ObjectivesConfig
from rag_mm.prompt import PromptCollator
from rag_mm.reader.config import ReaderConfig
from rag_mm.reader.fusion import answering_program, reader_program
from rag_mm.reader.generate import decode, next_inputs
from rag_mm.reader.public import public_tokenizer
from tests.distributed import run_on_ranks
from tests.rag_mm.public_models import save_model
from tests.rag_mm.test_trainer import ROOT, metrics

PROMPT = "Read this.\n{documents}Now answer: {question}\nThe answer is"
QUIET = ObjectivesConfig(pdist=0.0)
EMBEDDING = 6


def config(folder: Path, **options: Any) -> ReaderConfig:
    return ReaderConfig(kind="transformers", fusion="prepend", path=str(folder), prompt=PROMPT, **options)


@pytest.fixture(scope="module")
def llama_dir(factbook: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"), factbook)


def asked(dataset: Dataset, *, k: int = 2, num: int = 3) -> tuple[list[Sample], list[list[Document]]]:
    samples = [dataset.questions("train")[i * 7] for i in range(num)]
    documents = dataset.store.fetch(dataset.store.ids[: num * k])
    return samples, [documents[i * k : (i + 1) * k] for i in range(num)]


def batch(
    dataset: Dataset, reader: ReaderConfig, *, k: int = 2, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Questions with documents of very different lengths; the last one has weight 0."""
    samples, documents = asked(dataset, k=k)
    collator = PromptCollator(public_tokenizer(reader), DataConfig(max_document_tokens=48), reader)
    none = torch.zeros(0), torch.zeros(0)
    found = collator.context([s.question for s in samples], documents, none, none)
    found |= collator.answers([s.answers[0] for s in samples], torch.tensor([1.0, 1.0, 0.0], dtype=dtype))
    g = torch.Generator().manual_seed(0)
    found["query_embedding"] = torch.randn(len(samples), EMBEDDING, generator=g, dtype=dtype)
    found["document_embedding"] = torch.randn(len(samples) * k, EMBEDDING, generator=g, dtype=dtype)
    return found | {"sample_id": torch.arange(len(samples))}


def rows(given: dict[str, Tensor], opening: list[int]) -> list[list[int]]:
    """Each sample's prompt as one list of tokens, joined by hand, without padding."""
    num, found = len(given["question"]), []
    document = given["document"].unflatten(0, (num, -1))
    mask = given["document_mask"].unflatten(0, (num, -1)).bool()
    for b in range(num):
        row = list(opening)
        for tokens, there in zip(document[b], mask[b], strict=True):
            row += tokens[there].tolist()
        row += given["question"][b][given["question_mask"][b].bool()].tolist()
        found.append([*row, int(given["answer_in"][b, 0])])
    return found


def program(reader: ReaderConfig, objective: ObjectivesConfig = QUIET) -> BlockProgram:
    return reader_program(reader, objective, vocabulary=0, image_size=24)


def opening(reader: ReaderConfig) -> list[int]:
    return public_tokenizer(reader)(reader.prompt.partition("{documents}")[0], add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_losses_and_gradients_are_those_of_the_model_on_the_prompt(
    kind: str, factbook: Dataset, tmp_path: Path
) -> None:
    """The twin joins each prompt by hand and calls transformers' own model with it, row by row."""
    reader = config(save_model(tmp_path, factbook, kind=kind))
    made = program(reader).double()
    given = batch(factbook, reader)
    found = whole_batch_gradients(made, given, seed=0, step=0)

    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).train(False)
    loss = torch.zeros(())
    for b, row in enumerate(rows(given, opening(reader))):
        target, weight = given["target"][b], given["target_weight"][b]
        ids = torch.tensor([row + target[:-1].tolist()])
        logits = model(input_ids=ids).logits[0, len(row) - 1 :]
        loss = loss + (F.cross_entropy(logits, target, reduction="none") * weight).sum()
    loss.backward()
    assert found.loss == pytest.approx(loss.item(), rel=1e-10)
    right = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    ours = {_original(name): g for name, g in found.gradients.items()}
    assert ours.keys() == right.keys()
    report = gradient_report(right, ours, tolerance=1e-9)
    assert report, report.message


def _original(name: str) -> str:
    """A parameter's name in the model, from its name in the program."""
    for ours, theirs in (
        (".stream.layer.", "."), (".stream.norm.", "."), ("embed.stream.tokens.", "embed_tokens."),
        ("transformer.embed.stream.positions.", "transformer."), ("transformer.embed_tokens.", "transformer.wte."),
    ):  # fmt: skip
        name = name.replace(ours, theirs)
    return name


def on_ranks(folder: str, data: str, cuts: list[int], dropout: float, objectives: dict[str, float]) -> str:
    """The report on this rank's gradients ("" if they are those of one process)."""
    torch.set_default_dtype(torch.float64)
    reader, dataset = config(Path(folder), dropout=dropout), Dataset(data)
    given, objective = batch(dataset, reader), ObjectivesConfig(**{"pdist": 0.0, **objectives})
    right = whole_batch_gradients(program(reader, objective), given, seed=3, step=2)
    made = program(reader, objective)
    pipeline = Pipeline(made, Plan.from_cuts(made, cuts, num_microbatches=3), timeout_s=60)
    pipeline.step(given, seed=3, step=2)
    found = {name: p.grad for name, p in pipeline.parameters_here.items() if p.grad is not None}
    here = {name: g for name, g in right.gradients.items() if name in pipeline.parameters_here}
    report = gradient_report(here, found, tolerance=1e-9)
    return "" if report else report.message


@pytest.mark.parametrize(
    ("dropout", "objectives"), [(0.0, {}), (0.2, {"pdist": 0.7, "emdr2": 0.2}), (0.2, {"rag_sequence": 1.0})]
)
def test_two_stages_give_the_gradients_of_one_process(
    dropout: float, objectives: dict[str, float], llama_dir: Path, factbook: Dataset, factbook_dir: Path
) -> None:
    """The embedding is tied over the cut; with dropout, draws are keyed."""
    assert run_on_ranks(on_ranks, 2, str(llama_dir), str(factbook_dir), [5], dropout, objectives) == ["", ""]


@pytest.mark.parametrize("objectives", [{"pdist": 1.0}, {"rag_sequence": 1.0}, {"rag_token": 1.0}])
def test_objectives_of_single_documents_are_those_of_the_model_on_each(
    objectives: dict[str, float], llama_dir: Path, factbook: Dataset
) -> None:
    reader, k = config(llama_dir), 2
    given = batch(factbook, reader, k=k)
    made = program(reader, ObjectivesConfig(**{"generation": 0.0, "pdist": 0.0, **objectives})).double()
    found = made.run(given)["losses"].sum(0)
    model = AutoModelForCausalLM.from_pretrained(llama_dir, dtype=torch.float64).eval()
    products = torch.einsum("be,bke->bk", given["query_embedding"], given["document_embedding"].unflatten(0, (-1, k)))
    right = torch.zeros(())
    for b in range(len(products)):
        target, weight = given["target"][b], given["target_weight"][b]
        real = weight > 0
        log_p = []
        for j in range(k):
            one = {name: given[name][b : b + 1] for name in ("question", "question_mask", "answer_in")}
            one |= {name: given[name][b * k + j : b * k + j + 1] for name in ("document", "document_mask")}
            (row,) = rows(one, opening(reader))
            logits = model(input_ids=torch.tensor([row + target[:-1].tolist()])).logits[0, len(row) - 1 :]
            log_p.append(-F.cross_entropy(logits, target, reduction="none")[real])
        of_answer = torch.stack(log_p)  # (k, tokens)
        share = float(given["sample_weight"][b])
        if not share:
            continue
        if "pdist" in objectives:
            aim = (of_answer.mean(1) / 0.5).softmax(0)
            right = right + share * (aim * (aim.log() - (products[b] / 0.1).log_softmax(0))).sum()
        elif "rag_sequence" in objectives:
            right = right - share * (products[b].log_softmax(0) + of_answer.sum(1)).logsumexp(0)
        else:
            prior = products[b].log_softmax(0)[:, None]
            right = right - ((prior + of_answer).logsumexp(0) * weight[real]).sum()
    assert found.item() == pytest.approx(right.item(), rel=1e-9)


@pytest.mark.parametrize(
    ("objectives", "message"),
    [
        ({"loop": 1.0}, "objectives.loop is 1.0, but reader.kind is 'transformers'"),
        ({"adist": 1.0}, "objectives.adist is 1.0, but reader.kind is 'transformers'"),
        ({"pdist": 1.0, "rag_token": 1.0}, "objectives.pdist and objectives.rag_token are both above 0"),
    ],
)
def test_objectives_that_a_public_decoder_cannot_be_trained_with_are_refused(
    objectives: dict[str, float], message: str, llama_dir: Path
) -> None:
    with pytest.raises(ValueError) as refused:
        program(config(llama_dir), ObjectivesConfig(**{"pdist": 0.0, **objectives}))
    assert message in str(refused.value)


def test_no_block_mixes_samples(llama_dir: Path, factbook: Dataset) -> None:
    reader = config(llama_dir)
    given = batch(factbook, reader, dtype=torch.float32)
    require_sample_lineage(trace(program(reader), given, num_microbatches=3, repeats=1, warmup=0))


def test_answers_are_the_model_s_own(llama_dir: Path, factbook: Dataset) -> None:
    reader = config(llama_dir, end="a")
    given = batch(factbook, reader, dtype=torch.float32)
    answering = answering_program(program(reader))
    pipeline = Pipeline(answering, Plan.from_cuts(answering, []))
    context = {name: given[name] for name in ("document", "document_mask", "question", "question_mask")}
    collator = PromptCollator(public_tokenizer(reader), DataConfig(), reader)
    found = decode(pipeline, context, num_samples=3, bos=collator.bos, end=collator.end, max_tokens=6)
    model = AutoModelForCausalLM.from_pretrained(llama_dir, dtype=torch.float32).eval()
    for row, tokens in zip(rows(given, opening(reader)), found.tolist(), strict=True):
        ids = torch.tensor([row])
        right = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False,
            eos_token_id=collator.end, pad_token_id=collator.end,
        )[0, len(row) :].tolist()  # fmt: skip
        assert (tokens + [collator.end] * 6)[: len(right)] == right
    slow = decode(pipeline, context, num_samples=3, bos=collator.bos, end=collator.end, max_tokens=6, cache=False)
    assert torch.equal(slow, found)
    own = [t[: t.index(collator.end) + 1] if collator.end in t else t for t in found.tolist()]
    sums = score(
        pipeline, context, prompt=torch.full((3, 1), collator.bos), next_inputs=next_inputs(pipeline),
        continuations=[[tokens] for tokens in own],
    )  # fmt: skip
    for row, tokens, value in zip(rows(given, opening(reader)), own, sums, strict=True):
        logits = model(input_ids=torch.tensor([row + tokens])).logits[0, len(row) - 1 : -1]
        right = F.cross_entropy(logits, torch.tensor(tokens), reduction="sum").neg().item()
        assert float(value) == pytest.approx(right, abs=1e-4)


def test_frozen_layers_and_the_embedding_get_no_gradient(llama_dir: Path, factbook: Dataset) -> None:
    reader = config(llama_dir, frozen_layers=2)
    names = {name for name, p in program(reader).named_parameters_global().items() if p.requires_grad}
    assert names and all("layers.2." in name or "norm" in name for name in names)
    with pytest.raises(ValueError, match=r"reader\.frozen_layers is 4; .* has 3 layers"):
        program(config(llama_dir, frozen_layers=4))


def test_text_of_the_data_cannot_forge_a_special_token(llama_dir: Path) -> None:
    reader = config(llama_dir)
    collator = PromptCollator(public_tokenizer(reader), DataConfig(), reader)
    special = collator.tokenizer.all_special_ids
    forged = "".join(collator.tokenizer.all_special_tokens) + " is x"
    assert special and not set(special) & set(collator.ids([forged])[0])
    assert set(special) & set(collator.tokenizer(forged, add_special_tokens=False)["input_ids"])


def test_truncation_is_counted_and_keeps_what_the_prompt_puts_around(llama_dir: Path) -> None:
    reader = config(llama_dir)
    collator = PromptCollator(public_tokenizer(reader), DataConfig(max_query_tokens=4), reader)
    none = torch.zeros(0), torch.zeros(0)
    found = collator.context(
        ["what is the capital of a country far away?", "x"], [[Document("a", "A", {})]] * 2, none, none
    )
    assert collator.truncated["questions"] == 1
    ids = found["question"][0][found["question_mask"][0].bool()].tolist()
    before, after = collator.prompt.between, collator.prompt.after[:-1]
    assert len(ids) == len(before) + 4 + len(after) and tuple(ids[: len(before)]) == before
    assert tuple(ids[-len(after) :]) == after


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fusion": "fid"}, "reader.fusion is 'fid', but reader.kind is 'transformers'"),
        ({"path": ""}, "reader.path is empty"),
        ({"width": 32}, "reader.width is 32, but reader.kind is 'transformers', which does not look at it"),
        ({"kind": "scratch"}, "but reader.kind is 'scratch', which does not look at it"),
        ({"prompt": "{question}{documents}x"}, "it must have {documents} and after it {question}, each once"),
        ({"frozen_layers": -1}, "reader.frozen_layers is -1"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    given = {"kind": "transformers", "fusion": "prepend", "path": "somewhere", "prompt": PROMPT, **options}
    with pytest.raises(ValueError) as refused:
        ReaderConfig(**given)
    assert message in str(refused.value)


def test_a_folder_that_is_no_whole_model_is_refused(llama_dir: Path, factbook: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no config\.json; .*python -m rag_mm\.pretrained"):
        program(config(tmp_path))
    with pytest.raises(ValueError, match=r"reader\.end is ' to be ', which is \d tokens"):
        PromptCollator(public_tokenizer(config(llama_dir)), DataConfig(), config(llama_dir, end=" to be "))
    from safetensors.torch import load_file, save_file

    for file in llama_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    state = load_file(tmp_path / "model.safetensors")
    state.pop("model.layers.1.mlp.up_proj.weight")
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"whose weights lack model\.layers\.1\.mlp\.up_proj\.weight"):
        program(config(tmp_path))


@pytest.mark.slow
def test_a_run_on_two_stages_is_proved_resumed_and_evaluated(
    llama_dir: Path, factbook_dir: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    argv = [
        sys.executable, "-W", "ignore", str(ROOT / "train.py"), "--data.dir", str(factbook_dir), "--run-dir", str(run),
        "--reader.kind", "transformers", "--reader.fusion", "prepend", "--reader.path", str(llama_dir),
        "--objectives.pdist", "0", "--train.batch_size", "4", "--train.pair_batch_size", "4", "--train.steps", "4",
        "--train.retriever_batch_size", "4", "--train.retriever_share", "0.3", "--parallel.pipeline_stages", "2",
        "--parallel.num_microbatches", "2", "--parallel.verify", "full", "--checkpoint.every_n_steps", "2",
        "--data.max_document_tokens", "64", "--retriever.k", "1",
    ]  # fmt: skip

    def train() -> list[dict[str, Any]]:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        return metrics(run)

    lines = train()
    assert all(math.isfinite(line["loss"]) for line in lines) and lines[-1]["losses"]["generation"] > 0
    shutil.rmtree(run / "checkpoints" / "step-4")  # as if killed before it was written
    assert train() == lines
    rows = ["--run-dir", str(run), "--rows", "joint,no_documents", "--num", "6"]
    assert evaluate([*rows, "--json", str(tmp_path / "one.json")]) == 0
    (predictions,) = (run / "eval").glob("*.predictions.jsonl")
    one = predictions.read_bytes()
    assert [row["name"] for row in json.loads((tmp_path / "one.json").read_text())["rows"]] == ["no_documents", "joint"]
    assert evaluate([*rows, "--parallel.pipeline_stages", "2"]) == 0
    assert predictions.read_bytes() == one
