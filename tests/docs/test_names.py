"""Files and targets of make that pages name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fastgraph import ops
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
