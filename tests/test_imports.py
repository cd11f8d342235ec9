"""Imports point one way: from what users call to what computes, and never in a circle."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[1] / "fastgraph"

# Each room may import those above it. Modules in one room stand on each other as they need to.
ROOMS = (
    ("settings", "rendering", "ending", "interpreter", "upstream", "manifest"),
    ("machine",),
    ("hookspecs",),
    ("registry",),
    ("graphs",),
    ("tune",),
    ("backends",),
    ("verification",),
    ("ops",),
    ("routing",),
    ("layers",),
    ("pyg", "dgl"),
    ("enabling",),
    ("watching",),
    ("comparison",),
    ("inspection",),
    ("dist",),
    ("reordering",),
    ("",),  # fastgraph itself: the names that users import
    ("cli",),
    ("pytest_plugin", "__main__"),
)
RANK = {room: rank for rank, rooms in enumerate(ROOMS) for room in rooms}


class Import(NamedTuple):
    importer: str
    imported: str
    place: str


def modules() -> dict[str, Path]:
    """Files by the names of their modules within the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, source: str, known: set[str]) -> Iterator[Import]:
    """What a module imports of the package when it runs, in functions, too."""
    for node in executed(ast.parse(source)):
        place = f"{path.relative_to(PACKAGE.parent)}:{getattr(node, 'lineno', 0)}"
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            targets = [t if t.removeprefix("fastgraph.") in known else node.module for t in full]
        for target in targets:
            if target == "fastgraph" or target.startswith("fastgraph."):
                yield Import(name, target.removeprefix("fastgraph").removeprefix("."), place)


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those for type checkers alone."""
    yield node
    for child in ast.iter_child_nodes(node):
        is_for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        if not is_for_types:
            yield from executed(child)


def all_imports() -> list[Import]:
    known = modules()
    return [
        i for name, path in known.items() for i in imports(name, path, path.read_text(), set(known))
    ]


def rank(module: str) -> int:
    return RANK[module.partition(".")[0]]


def upward(found: list[Import]) -> list[str]:
    return [
        f"{i.place} imports fastgraph.{i.imported}, which stands above fastgraph.{i.importer}"
        for i in found
        if rank(i.imported) > rank(i.importer)
    ]


def circle(found: list[Import]) -> list[str]:
    """The modules of a circle, if there is one."""
    graph: dict[str, set[str]] = {}
    for i in found:
        graph.setdefault(i.importer, set()).add(i.imported)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_every_module_has_a_room() -> None:
    for name in modules():
        assert name.partition(".")[0] in RANK, f"{name} is in no room of {__file__}"


def test_imports_point_one_way() -> None:
    assert not (found := upward(all_imports())), "\n".join(found)


def test_no_modules_import_each_other() -> None:
    assert not (found := circle(all_imports())), " -> ".join(found)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("from fastgraph.pyg import propagate", ["pyg.propagate"]),
        ("from fastgraph import ops, settings", ["ops", "settings"]),
        ("def f():\n    import fastgraph.cli.main", ["cli.main"]),
        ("if TYPE_CHECKING:\n    from fastgraph.pyg import propagate", []),
        ("import torch", []),
    ],
)
def test_what_counts_as_an_import(line: str, expected: list[str]) -> None:
    found = list(imports("graphs.graph", PACKAGE / "graphs/graph.py", line, set(modules())))
    assert [i.imported for i in found] == expected
    assert [i.split(" ")[0] for i in upward(found)] == [
        i.place for i in found if i.imported != "settings"
    ]


def test_a_circle_is_found() -> None:
    found = [Import("graphs.a", "graphs.b", ""), Import("graphs.b", "graphs.a", "")]
    assert set(circle(found)) == {"graphs.a", "graphs.b"}
    assert not circle(found[:1])
