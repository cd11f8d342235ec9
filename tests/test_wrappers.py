"""Functions that are made of sources, and where they are put."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from fastgraph.plugins.patching import modules_with
from fastgraph.routing.wrappers import bound

SOURCE = """
def bind(value):
    def function():
        return value
    return function
"""


def test_functions_of_one_source_have_a_code_each() -> None:
    """Torch's compiler keeps its results by the code, and only so many for each."""
    first, second = (bound(SOURCE, "<a test>", __name__, value) for value in (1, 2))
    assert (first(), second()) == (1, 2)
    assert first.__code__ is not second.__code__
    assert first.__code__.co_filename == "<a test>"
    assert first.__module__ == __name__


def test_modules_are_found_by_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    having, other = ModuleType("having"), ModuleType("other")
    having.a_name_of_tests = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "having", having)
    monkeypatch.setitem(sys.modules, "other", other)
    monkeypatch.setitem(sys.modules, "nothing", None)  # type: ignore[arg-type]
    assert modules_with("a_name_of_tests", "another_name") == [having]
