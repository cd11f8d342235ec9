"""Checks of what layers, models and functions are given besides the values of tensors."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def check_integers(
    least: int = 1, most: int | None = None, /, *, or_none: bool = False, **given: Any
) -> None:
    """Raise ``ValueError`` unless all are integers within bounds; bools are none.

    Integers are what Python takes for an index: those of NumPy and tensors of one integer, too.
    """
    for name, value in given.items():
        if or_none and value is None:
            continue
        number = _integer_of(value)
        if number is None or number < least or (most is not None and number > most):
            bounds = f"at least {least}" if most is None else f"{least} to {most}"
            rest = " or None" if or_none else ""
            raise ValueError(f"{name}: expected an integer of {bounds}{rest}, got {value!r}")


def _integer_of(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_numbers(expected: str, fits: Callable[[float], bool], /, **given: Any) -> None:
    """Raise ``ValueError`` unless all are numbers of which ``fits`` is true; bools are none."""
    for name, value in given.items():
        is_number = not isinstance(value, bool) and isinstance(value, Real)
        if not is_number or not fits(float(value)):
            raise ValueError(f"{name}: expected {expected}, got {value!r}")


def check_rates(**given: Any) -> None:
    """Raise ``ValueError`` unless all are from 0 to below 1."""
    check_numbers("a rate from 0 to below 1", lambda rate: 0 <= rate < 1, **given)


def check_probabilities(**given: Any) -> None:
    """Raise ``ValueError`` unless all are from 0 to 1."""
    check_numbers("a probability from 0 to 1", lambda chance: 0 <= chance <= 1, **given)


def check_choices(**given: tuple[object, Sequence[str]]) -> None:
    """Raise ``ValueError`` unless each is one of the texts behind it."""
    for name, (value, allowed) in given.items():
        if value not in allowed:
            raise ValueError(
                f"{name}: expected one of {', '.join(map(repr, allowed))}, got {value!r}"
            )


def check_flags(**given: object) -> None:
    """Raise ``TypeError`` unless all are bools: Python takes texts and tensors for true."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: expected a bool, got {value!r}")


def check_kinds(kind: type, /, *, or_none: bool = False, **given: object) -> None:
    """Raise ``TypeError`` unless all are of a class, such as ``Tensor``."""
    for name, value in given.items():
        if not isinstance(value, kind) and not (or_none and value is None):
            rest = " or None" if or_none else ""
            raise TypeError(f"{name}: expected a {kind.__name__}{rest}, got {value!r}")


def check_functions(*, or_none: bool = False, **given: object) -> None:
    """Raise ``TypeError`` unless all can be called."""
    for name, value in given.items():
        if not callable(value) and not (or_none and value is None):
            rest = " or None" if or_none else ""
            raise TypeError(f"{name}: expected a function{rest}, got {value!r}")


def checked_path(**given: object) -> Path:
    """The path of the single argument; raises ``TypeError`` unless it is a text or path-like."""
    ((name, value),) = given.items()
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str):
        raise TypeError(f"{name}: expected a path, got {value!r}")
    return Path(path)


def check_edges(num_nodes: int, /, **given: Any) -> None:
    """Raise an error unless each is an index of edges between so many nodes.

    Raises:
        TypeError: it is no tensor.
        ValueError: it is not int64 or int32 ``[2, E]``, or ``num_nodes`` is no number of nodes.
        IndexError: it points outside the nodes.
    """
    check_integers(0, num_nodes=num_nodes)
    for name, index in given.items():
        check_kinds(Tensor, **{name: index})
        is_index = index.dtype in (torch.int64, torch.int32) and index.dim() == 2
        if not is_index or len(index) != 2:
            raise ValueError(
                f"{name}: expected int64 or int32 [2, E], got {index.dtype} {list(index.shape)}"
            )
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < num_nodes:
            bad = int(index[(index < 0) | (index >= num_nodes)][0])
            raise IndexError(f"{name}: expected nodes of 0 to {num_nodes - 1}, got {bad}")


def check_heads(channels: Any, heads: Any) -> None:
    """Raise ``ValueError`` unless these are integers, and heads have as many channels each."""
    check_integers(channels=channels, heads=heads)
    if channels % heads:
        raise ValueError(f"channels: expected a multiple of heads, {heads}, got {channels}")
