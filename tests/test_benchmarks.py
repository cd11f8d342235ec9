"""Benchmarks, which no test runs, import what there is."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_NEEDS_DGL = "fastgraph.dgl"


def imported(file: Path) -> list[tuple[str, str]]:
    """Names and the modules of ``fastgraph`` that a file takes them of, within functions, too."""
    nodes = ast.walk(ast.parse(file.read_text()))
    found = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    ours = [node for node in found if node.module.partition(".")[0] == "fastgraph"]
    return [(node.module, alias.name) for node in ours for alias in node.names]


def exists(module: str, name: str) -> bool:
    found = importlib.import_module(module)
    in_it = hasattr(found, "__path__") and importlib.util.find_spec(f"{module}.{name}") is not None
    return in_it or hasattr(found, name)


@pytest.mark.parametrize("folder", ["benchmarks", "examples"])
def test_names_exist(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    names = {name for file in files for name in imported(file)}
    assert names
    has_dgl = importlib.util.find_spec("dgl") is not None
    looked_at = [n for n in sorted(names) if has_dgl or not n[0].startswith(_NEEDS_DGL)]
    assert [f"{module}.{name}" for module, name in looked_at if not exists(module, name)] == []
