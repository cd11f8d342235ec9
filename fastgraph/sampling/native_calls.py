"""Calls of native samplers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
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
    """Refuse what is no tensor in memory.

    Raises:
        TypeError: An argument is neither such a tensor nor ``None``.
    """
    for name, value in named.items():
        _check_tensor(name, value)


def check_all_tensors(name: str, values: Iterable[tuple[object, object]]) -> None:
    """Refuse items of a dictionary or a list that are no tensors in memory, by their keys."""
    for key, value in values:
        _check_tensor(f"{name}[{key!r}]", value)


def _check_tensor(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    # Subclasses that wrap a tensor have no memory of their own, and DLPack says nothing of that.
    if value.numel() > 0 and (value.layout != torch.strided or value.data_ptr() == 0):
        raise TypeError(f"{name} must be a dense tensor in memory, got {type(value).__name__}")
    if value.is_neg():
        raise TypeError(f"{name} must be a dense tensor in memory, got a view with other signs")
