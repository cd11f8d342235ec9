"""Files and targets of make that pages name are there."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

import fastgraph
from fastgraph import dist, ops
from tests.docs.blocks import ROOT, pages

# In code, and the first words of a line of a block.
_MAKE = re.compile(r"(?:`|^)make ([a-z][a-z0-9-]*)", re.MULTILINE)
_PATH = re.compile(r"`((?:benchmarks|docs|examples|fastgraph|tests|\.ci)/[\w./-]*)`")
# Files that are made, and the name that stands for any.
_OTHERS = re.compile(r"NAME|^fastgraph/lib")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_what_pages_name_exists(page: Path) -> None:
    text = page.read_text()
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    missing = {f"make {name}" for name in _MAKE.findall(text) if name not in targets}
    paths = (path for path in _PATH.findall(text) if not _OTHERS.search(path))
    missing |= {path for path in paths if not (ROOT / path).exists()}
    assert not missing


def test_pages_link_to_pages_that_exist() -> None:
    """Those at the root, which mkdocs sees in another folder or not at all."""
    for page in ROOT.glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)[^):]*\)", page.read_text()):
            assert (ROOT / target).exists(), f"{page.name}: {target}"


def test_every_operator_has_a_place_in_the_public_api() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    missing = [name for name in ops.__all__ if f"::: fastgraph.ops.{name}.{name}\n" not in text]
    assert not missing


@pytest.mark.parametrize("package", [fastgraph, dist], ids=["fastgraph", "fastgraph.dist"])
def test_every_public_name_has_a_place_in_the_public_api(package: ModuleType) -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    named = set(re.findall(rf"\b{re.escape(package.__name__)}\.(\w+)$", text, re.MULTILINE))
    named |= set(re.findall(rf"`{re.escape(package.__name__)}\.(\w+)`", text))
    assert not set(package.__all__) - named


@pytest.mark.parametrize(
    "name", [f"fastgraph.{n}" for n in fastgraph.__all__] + [f"dist.{n}" for n in dist.__all__]
)
def test_public_functions_describe_their_arguments(name: str) -> None:
    package, _, own = name.rpartition(".")
    value = getattr(fastgraph if package == "fastgraph" else dist, own)
    assert inspect.getdoc(value)
    if inspect.isfunction(value):
        described = re.findall(r"^ {4}\*{0,2}(\w+): ", inspect.getdoc(value), re.MULTILINE)
        assert set(inspect.signature(value).parameters) <= set(described)
