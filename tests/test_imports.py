"""Imports point one way: train.py -> rag_mm -> {retriever, data, pipeline}.

The retriever may use data; data and pipeline use none of the others; nobody
imports train.py, the tests or the benchmarks. Files are parsed, not imported, so
an import inside a function or under TYPE_CHECKING counts like any other.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

MAY_IMPORT: dict[str, set[str]] = {
    "train": {"rag_mm"},
    "rag_mm": {"retriever", "data", "pipeline"},
    "retriever": {"data"},
    "data": set(),
    "pipeline": set(),
}
# Top-level names that resolve to this repository when a program runs from its root.
OURS = {*MAY_IMPORT, "tests", "benchmarks"}


def sources(owner: str, root: Path = ROOT) -> list[Path]:
    """The files of one package, or the one file of a top-level module."""
    module = root / f"{owner}.py"
    return [module] if module.exists() else sorted((root / owner).rglob("*.py"))


def imported_names(source: str) -> list[tuple[int, str]]:
    """(line, top-level name) of every absolute import, import_module("...") included."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in {"import_module", "__import__"}:
                names = [str(node.args[0].value)]
        found += [(node.lineno, name.partition(".")[0]) for name in names]
    return found


def violations(owner: str, root: Path = ROOT) -> list[str]:
    allowed = MAY_IMPORT[owner] | ({owner} if owner != "train" else set())
    return [
        f"{path.relative_to(root)}:{line} imports {name}"
        for path in sources(owner, root)
        for line, name in imported_names(path.read_text(encoding="utf-8"))
        if name in OURS - allowed
    ]


@pytest.mark.parametrize("owner", MAY_IMPORT)
def test_imports_point_one_way(owner: str) -> None:
    assert sources(owner), f"{owner} has no files: was it renamed?"
    assert not violations(owner), "\n".join(violations(owner))


@pytest.mark.parametrize(
    ("owner", "line", "allowed"),
    [
        ("train", "from rag_mm.config import Config", True),
        ("train", "import retriever.build", False),
        ("rag_mm", "from pipeline import Block", True),
        ("rag_mm", "from . import reader", True),
        ("rag_mm", "import train", False),
        ("retriever", "from data.document_store import DocumentStore", True),
        ("retriever", "import pipeline.trace as trace", False),
        ("data", "import numpy, retriever", False),
        ("data", "def f():\n    from rag_mm import config", False),
        ("pipeline", "if TYPE_CHECKING:\n    import data.loader", False),
        ("pipeline", 'importlib.import_module("rag_mm.reader")', False),
        ("pipeline", "import database, torch.utils.data", True),
        ("pipeline", "from tests import oracle", False),
    ],
)
def test_checker_sees_each_kind_of_import(tmp_path: Path, owner: str, line: str, allowed: bool) -> None:
    path = tmp_path / ("train.py" if owner == "train" else f"{owner}/deep/inside.py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line)
    assert (not violations(owner, tmp_path)) == allowed
