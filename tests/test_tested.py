"""Tested versions: one table, with which the project's files agree, and a warning outside of it."""

from __future__ import annotations

import re
import tomllib
import types
import warnings
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from fastgraph import tested
from fastgraph.tested import TESTED, UntestedVersionWarning, VersionRange, check

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def dotted(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))


def numbers_of(text: str) -> tuple[int, int]:
    first, second = text.split(".")[:2]
    return int(first), int(second)


@pytest.mark.parametrize("name", TESTED)
def test_the_lowest_is_what_the_package_asks_for(name: str) -> None:
    listed = [*PROJECT["dependencies"], *chain(*PROJECT["optional-dependencies"].values())]
    asked = {r.name.replace("-", "_"): r.specifier for r in map(Requirement, listed)}[name]
    assert str(asked) == f">={dotted(TESTED[name].first)}"


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_pages_name_the_ends_of_torchs(page: str) -> None:
    text = " ".join((ROOT / page).read_text().split())
    begin, listed = re.search(
        r"every torch from ([\d.]+) on \(tested with ([^)]*)\)", text
    ).groups()  # type: ignore[union-attr]
    versions = [numbers_of(found) for found in re.findall(r"\d+\.\d+", listed)]
    assert numbers_of(begin) == versions[0] == TESTED["torch"].first
    assert max(versions) == TESTED["torch"].last


def test_targets_test_the_ends_of_dgls_and_a_torch_within() -> None:
    make = (ROOT / "Makefile").read_text()
    dgl = re.search(r"^DGL := (.*)$", make, re.MULTILINE)[1].split()  # type: ignore[index]
    assert numbers_of(dgl[0]) == TESTED["dgl"].first
    assert numbers_of(dgl[-1]) == TESTED["dgl"].last
    torch = re.search(r"^TORCH \?= torch==(.*)$", make, re.MULTILINE)[1]  # type: ignore[index]
    assert TESTED["torch"].includes(torch)


@pytest.mark.parametrize("name", TESTED)
def test_what_is_installed_here_is_tested(name: str) -> None:
    try:
        installed = version(name.replace("_", "-"))
    except PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    assert TESTED[name].includes(installed)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2.9.1", False),
        ("2.10.0", True),
        ("2.11.0a0+git1", True),
        ("2.15.9", True),
        ("2.16.0", False),
        ("3.0", False),
        ("unknown", True),
        ("", True),
    ],
)
def test_which_versions_are_within(text: str, expected: bool) -> None:
    assert VersionRange("torch", (2, 10), (2, 15)).includes(text) is expected


def module(name: str, text: str) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__version__ = text  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize(
    ("name", "title"), [("torch", "torch"), ("torch_geometric", "PyG"), ("dgl", "DGL")]
)
def test_the_warning_names_the_library_and_both_ends(name: str, title: str) -> None:
    first, last = map(dotted, TESTED[name][1:])
    with pytest.warns(UntestedVersionWarning) as caught:
        check(module(name, "99.3.1"))
    assert f"tested with {title} {first} to {last}, and this is 99.3.1" in str(caught[0].message)


def test_what_is_within_is_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in TESTED:
            check(module(name, f"{dotted(TESTED[name].last)}.7+cpu"))


def test_it_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often fastgraph is enabled; here torch counts as untested."""
    monkeypatch.setitem(tested.TESTED, "torch", VersionRange("torch", (0, 1), (0, 2)))
    monkeypatch.setattr(tested, "_awaited", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tested.warn_where_untested()
        tested.warn_where_untested()
    found = [w for w in caught if w.category is UntestedVersionWarning]
    assert ["torch 0.1 to 0.2" in str(w.message) for w in found] == [True]
