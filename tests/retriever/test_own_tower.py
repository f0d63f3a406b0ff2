"""The tower of docs/encoders.md, as it is printed there."""

import re
import sys
from pathlib import Path

import pytest
import torch

from retriever.config import RetrieverConfig
from retriever.embed import architecture
from retriever.encoder import DualEncoder

PAGE = Path(__file__).parents[2] / "docs" / "encoders.md"


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S)
    assert len([line for line in code.splitlines() if line.strip()]) <= 30
    (tmp_path / "hashed_words.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "hashed_words", raising=False)
    return "hashed_words:Words"


def test_the_printed_tower_embeds_words(words: str):
    encoder = DualEncoder(RetrieverConfig(text=words), image_size=24)
    texts = ["red flag", "Flag red", "a far longer name than that", ""]
    found = encoder(encoder.features(texts, torch.ones(4, 3, 24, 24), torch.zeros(4)))
    assert found.shape == (4, 64 + 128)
    torch.testing.assert_close(found[0], found[1])
    assert not torch.allclose(found[0], found[2]) and torch.equal(found[3], torch.zeros(192))
    torch.testing.assert_close(found[:, :64].norm(dim=1), torch.tensor([1.0, 1.0, 1.0, 0.0]))
    nothing = encoder(encoder.features([], torch.ones(0, 3, 24, 24), torch.zeros(0)))
    assert nothing.shape == (0, 192)
    assert "hashed words" in architecture(encoder, image_size=24)


def test_what_is_no_tower_is_refused(words: str):
    for name, problem in (
        ("hashed_words:Word", "cannot be imported"),
        ("no_such_module:Words", "cannot be imported"),
        ("hashed_words:WordTower", "no subclass of retriever.towers.interface.TextBackend"),
    ):
        with pytest.raises(ValueError, match=rf"retriever.text is '{name}', which (is )?{problem}"):
            DualEncoder(RetrieverConfig(text=name), image_size=24)
