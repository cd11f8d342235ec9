"""Docstrings say what a thing is, and so do not begin with "What" or "Whether"."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOTS = ("fastgraph", "tests", "benchmarks", "examples")
_QUESTION = re.compile(r"(What|Whether)\b")


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Lines and texts of docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            yield node.lineno, node.value.value.lstrip()


def questions(source: str) -> list[int]:
    """Lines of the docstrings that begin like a question."""
    return [line for line, text in docstrings(source) if _QUESTION.match(text)]


def test_questions_are_found() -> None:
    source = '"""What."""\nx = 1\n"""Whether."""\ndef f():\n    """\n    What f does."""\n'
    assert questions(source) == [1, 3, 5]
    assert not questions('"""Whatever."""\nx = "What"\n')


@pytest.mark.parametrize("root", ROOTS)
def test_no_docstring_begins_like_a_question(root: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / root).rglob("*.py"))
        if "build" not in path.parts  # copies of what was once installed
        for line in questions(path.read_text())
    ]
    assert not found
