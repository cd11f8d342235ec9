"""Calls of native samplers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from fastgraph.machine import native


def call_native(function: str, *arguments: Any) -> list[Tensor]:
    """The tensors that a native function makes."""
    made = getattr(native.library(), function)(*arguments)
    return [] if made is None else list(made)


@contextlib.contextmanager
def in_named_items(names: Mapping[str, str]) -> Iterator[None]:
    """Errors name items of lists, ``row[0]``, by the names that the caller knows."""
    try:
        yield
    except (TypeError, ValueError, IndexError) as error:
        text = str(error)
        item = text.partition(" ")[0]
        if item not in names:
            raise
        raise type(error)(text.replace(item, names[item], 1)) from None


def check_tensors(**named: object) -> None:
    """Refuse what is no tensor.

    Raises:
        TypeError: An argument is neither a tensor nor ``None``.
    """
    for name, value in named.items():
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")


def check_all_tensors(name: str, values: Iterable[tuple[object, object]]) -> None:
    """Refuse items of a dictionary or a list that are no tensors, by their keys."""
    for key, value in values:
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"{name}[{key!r}] must be a tensor, got {type(value).__name__}")
