"""Each tensor that ``fastgraph.dist`` makes is made on a device that it names.

Tests on the stand-in device refuse other factory calls in the lines that they run. This one reads
all lines.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

import fastgraph.dist

FOLDER = Path(fastgraph.dist.__file__).parent

NAMES = {found.__name__ for found in _device_constructors()}


def without_device(text: str) -> Iterator[str]:
    """The calls of torch's factories in a text that leave the device to torch's default."""
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in NAMES
            and ast.unparse(node.func.value) == "torch"
            and not any(keyword.arg in ("device", None) for keyword in node.keywords)
        ):
            yield ast.unparse(node)


@pytest.mark.parametrize(
    "path", sorted(FOLDER.rglob("*.py")), ids=lambda path: str(path.relative_to(FOLDER))
)
def test_each_factory_is_told_a_device(path: Path) -> None:
    assert not list(without_device(path.read_text()))


def test_a_call_without_a_device_is_found() -> None:
    assert {"arange", "empty", "tensor", "zeros"} <= NAMES
    found = without_device("torch.zeros(3); torch.zeros(3, device=x.device); x.new_zeros(3)")
    assert list(found) == ["torch.zeros(3)"]
