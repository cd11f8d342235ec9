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
    ("settings", "rendering", "ending", "interpreter", "upstream", "tested", "manifest"),
    ("machine",),
    ("sampling",),
    ("plugins",),
    ("registry",),
    ("edge_programs",),
    ("graphs",),
    ("tune",),
    ("backends",),
    ("verification",),
    ("ops",),
    ("routing",),
    ("layers",),
    ("sparse",),
    ("nn",),
    ("tokens",),
    ("pyg", "dgl"),
    ("enabling",),
    ("watching",),
    ("profiling",),
    ("comparison",),
    ("inspection",),
    ("dist",),
    ("reordering",),
    ("transforms",),
    ("",),  # fastgraph itself: the names that users import
    ("cli",),
    ("pytest_plugin", "__main__"),
)
RANK = {room: rank for rank, rooms in enumerate(ROOMS) for room in rooms}

# The rooms of fastgraph.dist, likewise.
DIST = (
    ("ranks",),
    ("tensor",),
    ("operators",),
    ("graphs",),
    ("files", "balance", "forecast"),
    ("running",),
    ("",),  # fastgraph.dist itself
    ("__main__",),
)
DIST_RANK = {room: rank for rank, rooms in enumerate(DIST) for room in rooms}
STARTED_ANEW = ("dist.running.child", "dist")
"""The first module of a process of its own, which therefore imports all of fastgraph.dist."""


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
    """The imports of the package by a module when it runs, in functions, too."""
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


def rank(module: str) -> tuple[int, int]:
    """The floor of a module's room, and in ``dist`` that of the room within."""
    room, _, rest = module.partition(".")
    return RANK[room], DIST_RANK[rest.partition(".")[0]] if room == "dist" else 0


def are_apart(i: Import) -> bool:
    """True if two modules are in different rooms of ``dist`` on one floor."""
    (importer, *_), (imported, *_) = within(i.importer), within(i.imported)
    return rank(i.importer) == rank(i.imported) and importer != imported


def within(module: str) -> list[str]:
    return module.removeprefix("dist.").split(".") if module.startswith("dist.") else [""]


def upward(found: list[Import]) -> list[str]:
    return [
        f"{i.place} imports fastgraph.{i.imported}, which stands above fastgraph.{i.importer}"
        for i in found
        if rank(i.imported) > rank(i.importer) and (i.importer, i.imported) != STARTED_ANEW
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
        room, _, rest = name.partition(".")
        assert room in RANK, f"{name} is in no room of {__file__}"
        if room == "dist":
            assert rest.partition(".")[0] in DIST_RANK, f"{name} is in no room of {__file__}"


def test_rooms_exist_and_say_what_may_enter() -> None:
    known = modules()
    for room in filter(None, DIST_RANK):
        doc = ast.get_docstring(ast.parse(known[f"dist.{room}"].read_text()))
        assert doc, f"fastgraph.dist.{room}"
        if known[f"dist.{room}"].name == "__init__.py":
            assert "may enter" in doc, f"fastgraph.dist.{room} does not say what may enter"


def test_the_architecture_names_every_room_and_module_of_dist() -> None:
    text = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    table = text.partition("Within `dist/`:")[2].partition("Native code")[0]
    rows = {row.split("|")[1].strip().strip("`"): row for row in table.splitlines() if "|" in row}
    for name, path in modules().items():
        first, _, rest = name.removeprefix("dist.").partition(".")
        if not name.startswith("dist."):
            continue
        if not rest:
            assert f"{first}/" in rows or f"{first}.py" in rows, f"no row for {name}"
        elif path.name != "__init__.py":
            named = rest.partition(".")[0]
            words = (f"`{named}.py`", f"`{named}/`")
            assert any(word in rows[f"{first}/"] for word in words), f"no word of {name}"


def test_imports_point_one_way() -> None:
    assert not (found := upward(all_imports())), "\n".join(found)


def test_rooms_of_dist_on_one_floor_are_apart() -> None:
    assert not (found := [i for i in all_imports() if are_apart(i)]), found


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


@pytest.mark.parametrize(
    ("importer", "imported", "is_upward", "is_apart"),
    [
        ("dist.ranks.world", "dist.tensor.layout", True, False),
        ("dist.tensor.sharded", "dist.operators.rules", True, False),
        ("dist.operators.modes", "dist", True, False),
        ("dist.tensor.layout", "dist.ranks.world", False, False),
        ("dist.operators.heads.graph", "dist.operators.rules", False, False),
        ("dist.files.shards", "dist.balance.shares", False, True),
        ("dist.files.shards", "dist.files.storage", False, False),
        ("dist.running.child", "dist", False, False),
        ("dist.ranks.world", "cli.main", True, False),
        ("cli.main", "dist.ranks.world", False, False),
    ],
)
def test_which_ways_imports_within_dist_may_point(
    importer: str, imported: str, is_upward: bool, is_apart: bool
) -> None:
    found = Import(importer, imported, "")
    assert bool(upward([found])) == is_upward
    assert are_apart(found) == is_apart


def test_a_circle_is_found() -> None:
    found = [Import("graphs.a", "graphs.b", ""), Import("graphs.b", "graphs.a", "")]
    assert set(circle(found)) == {"graphs.a", "graphs.b"}
    assert not circle(found[:1])
