"""Tensors with rows on several ranks, as ``fastgraph.dist`` has them, for rooms below it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, overload

from torch import Tensor

Value = TypeVar("Value")


class OfRanks(NamedTuple):
    """The functions for a subclass of tensors, which all ranks call together.

    Attributes:
        whole: gives an ordinary tensor with all rows.
        decided: gives what a function returns on the first rank, or raises its error.
    """

    whole: Callable[[Tensor], Tensor]
    decided: Callable[[Callable[[], Any]], Any]


BY_TYPE: dict[type, OfRanks] = {}
"""By the subclass of tensors."""


def are_on_ranks(*given: Tensor | None) -> bool:
    """True if rows of a tensor are on several ranks."""
    return any(type(x) in BY_TYPE for x in given)


@overload
def whole(x: Tensor) -> Tensor: ...
@overload
def whole(x: Tensor | None) -> Tensor | None: ...
def whole(x: Tensor | None) -> Tensor | None:
    """An ordinary tensor with all rows."""
    of_ranks = BY_TYPE.get(type(x))
    return x if of_ranks is None or x is None else of_ranks.whole(x)


def decided(make: Callable[[], Value]) -> Value:
    """The result of ``make`` on the first rank, where other machines may have another.

    For what was made of tensors that are on ranks; without these it is what it returns here.
    """
    for of_ranks in BY_TYPE.values():
        value: Value = of_ranks.decided(make)
        return value
    return make()
