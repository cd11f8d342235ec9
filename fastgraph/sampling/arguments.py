"""Checks of what samplers are given besides tensors."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from itertools import chain
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

_MOST_NODES = 2**63


def check_flags(**flags: object) -> None:
    """Refuse options that are neither true nor false, as texts, which Python takes for true.

    Raises:
        TypeError: One is no bool.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be a bool, got {value!r}")


def check_mappings(**mappings: object) -> None:
    """Refuse what is not by type.

    Raises:
        TypeError: One is neither a mapping nor ``None``.
    """
    for name, value in mappings.items():
        if value is not None and not isinstance(value, Mapping):
            raise TypeError(f"{name} must be a mapping by type, got {type(value).__name__}")


def check_relation(relation: object) -> None:
    """Refuse what is no type of edges.

    Raises:
        TypeError: It is no triple of texts.
    """
    is_triple = isinstance(relation, tuple) and len(relation) == 3
    if not is_triple or not all(isinstance(name, str) for name in relation):  # type: ignore[attr-defined]
        raise TypeError(
            f"colptr must have triples of a source, a relation and a destination, got {relation!r}"
        )


def check_keys(
    known: Container[Any], what: str, **mappings: Mapping[Any, Any] | Sequence[int] | None
) -> None:
    """Refuse types that a graph has not, which would have no effect.

    Args:
        known: Those that it has.
        what: What they are, for the error.
        mappings: By type; others are left alone.

    Raises:
        ValueError: A key is not among them.
    """
    for name, mapping in mappings.items():
        extra = [key for key in mapping if key not in known] if isinstance(mapping, Mapping) else []
        if extra:
            raise ValueError(f"{name} must have {what} of the graph alone, got {extra}")


def checked_count(name: str, count: Any) -> int:
    """A number of nodes.

    Raises:
        TypeError: It is no integer.
        ValueError: It is negative, or no int64.
    """
    if isinstance(count, bool) or not isinstance(count, Integral):
        raise TypeError(f"{name} must be an int, got {count!r}")
    if not 0 <= int(count) < _MOST_NODES:
        raise ValueError(f"{name} must be in [0, 2^63), got {count}")
    return int(count)


def check_weights(weights: Sequence[Tensor | None], names: Sequence[str]) -> None:
    """Refuse weights of edges of dtypes in which nothing is drawn.

    Raises:
        TypeError: Some are neither float32 nor float64.
    """
    for weight, name in zip(weights, names, strict=True):
        if weight is not None and weight.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"{name} must be float32 or float64, got {_name(weight.dtype)}")


def check_integers(name: str, values: object) -> None:
    """Refuse what is no sequence of integers, of which torch would cut decimals off.

    Raises:
        TypeError: It is none, or holds something else.
        ValueError: An integer is no int64.
    """
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise TypeError(f"{name} must be a sequence of ints, got {values!r}")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{name} must hold ints, got {value!r}")
        if not -(2**63) <= int(value) < 2**63:
            raise ValueError(f"{name} must be in [-1, 2^31), got {value}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def fanouts(of_relations: Sequence[Any]) -> Tensor:
    """Fanouts, int64 ``[hops, relations]``.

    Raises:
        TypeError: They are no integers, or not in sequences.
        ValueError: They are out of range, or not as many for each type of edges.
    """
    for of_one in of_relations:
        if not isinstance(of_one, Sequence | Tensor) and not hasattr(of_one, "__array__"):
            raise TypeError(f"num_neighbors must hold a number for each hop, got {of_one!r}")
    hops = {len(of_one) for of_one in of_relations}
    if len(hops) > 1:
        raise ValueError(f"num_neighbors must have as many hops everywhere, got {sorted(hops)}")
    for fanout in chain.from_iterable(of_relations):
        if isinstance(fanout, bool) or not isinstance(fanout, Integral):  # NumPy's, too
            raise TypeError(f"num_neighbors must hold ints, got {fanout!r}")
        if not -1 <= int(fanout) < 2**31:
            raise ValueError(f"num_neighbors must be in [-1, 2^31), got {fanout}")
    if not of_relations:
        return torch.empty(0, 0, dtype=torch.int64)
    return torch.tensor(of_relations, dtype=torch.int64).t().contiguous()
