"""Operators of compiled code, whose backward pass takes the graph that the forward pass found.

Eager code keeps a graph between its passes by tensors of the graph's own. Compiled code has the
caller's tensors only, and may put one where another was, so that every operator compares their
content with what is remembered. That a backward pass means the edges of its forward pass is known
without: the forward operator also returns the number of what it found, which compilers carry to the
backward operator as they carry any tensor. Where that is not remembered any more, under the same
key, the backward operator looks the edges up as others do.

Two forms of an operator do so, which have no gradient: while compilers differentiate, they record
these in its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgraph.graphs.memo import finding, given

Declare = Callable[[str, Callable[..., Any], Callable[..., Any]], Any]


class Numbered(NamedTuple):
    """The forms of an operator that looks up a graph.

    Attributes:
        finding: returns the number of the graph besides the results; ``None`` for an operator that
            returns a list.
        given: takes a number before all other arguments.
    """

    finding: Any
    given: Any


def numbered(
    declare: Declare, schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]
) -> Numbered | None:
    """The forms of an operator, or ``None`` for one that takes no edges.

    Args:
        declare: makes an operator of a schema, an implementation and a shape rule.
        schema: of the operator.
        implementation: likewise.
        fake: likewise.
    """
    name, _, rest = schema.partition("(")
    arguments, _, results = rest.rpartition(") -> ")
    if "Tensor index" not in arguments:
        return None

    def given_fake(number: Tensor, *others: Any) -> Any:
        return fake(*others)

    takes = declare(
        f"{name}_of_given(Tensor number, {arguments}) -> {results}",
        given(implementation),
        given_fake,
    )
    if "[]" in results:
        return Numbered(None, takes)

    def finding_fake(*others: Any) -> tuple[Tensor, ...]:
        return *_several(fake(*others)), torch.empty((), dtype=torch.int64, device="cpu")

    def found(*others: Any) -> tuple[Tensor, ...]:
        result, number = finding(implementation, *others)
        return *_several(result), torch.tensor(number, device="cpu")

    gives = declare(
        f"{name}_finding({arguments}) -> ({results.strip('()')}, Tensor)", found, finding_fake
    )
    return Numbered(gives, takes)


def _several(results: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return [results] if isinstance(results, Tensor) else results


class _Thread(threading.local):
    number: Tensor | None = None


_THREAD = _Thread()


def number_of_forward_pass() -> Tensor | None:
    """What a forward operator returned, while its gradient is recorded."""
    return _THREAD.number


def with_number(number: Tensor | None, compute: Callable[..., Any], *arguments: Any) -> Any:
    """``compute(*arguments)``, the gradient of an operator, in which this is the number."""
    before, _THREAD.number = _THREAD.number, number
    try:
        return compute(*arguments)
    finally:
        _THREAD.number = before
