"""Operators of compiled code, whose backward pass takes the graph that the forward pass found.

Two forms of an operator do so, which have no gradient, and which compilers record in its place
while they differentiate: that of the forward pass returns a token
(:mod:`fastgraph.graphs.passes`), that of the backward pass takes it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgraph.graphs.passes import TOKEN_SHAPE, finding, given

Declare = Callable[[str, Callable[..., Any], Callable[..., Any]], Any]


class Forms(NamedTuple):
    """The forms of an operator that looks up a graph.

    Attributes:
        finding: returns the token besides the results; ``None`` for an operator that has no
            gradient, or returns a list.
        given: takes a token before all other arguments.
    """

    finding: Any
    given: Any


def forms_of(
    declare: Declare,
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    has_gradient: bool,
) -> Forms | None:
    """The forms of an operator, or ``None`` for one that takes no edges.

    Args:
        declare: makes an operator of a schema, an implementation and a shape rule.
        schema: of the operator.
        implementation: likewise.
        fake: likewise.
        has_gradient: whether it is for forward passes, too.
    """
    name, _, rest = schema.partition("(")
    arguments, _, results = rest.rpartition(") -> ")
    names = [argument.rpartition(" ")[2] for argument in arguments.split(", ")]
    if "index" not in names:
        return None
    position = names.index("index")

    def given_fake(token: Tensor, *others: Any) -> Any:
        return fake(*others)

    takes = declare(
        f"{name}_of_given(Tensor token, {arguments}) -> {results}",
        lambda token, *others: given(name, implementation, token, others[position], others),
        given_fake,
    )
    if not has_gradient or "[]" in results:
        return Forms(None, takes)

    def finding_fake(*others: Any) -> tuple[Tensor, ...]:
        return *_several(fake(*others)), torch.empty(TOKEN_SHAPE, dtype=torch.int64, device="cpu")

    def found(*others: Any) -> tuple[Tensor, ...]:
        result, token = finding(implementation, others[position], others)
        return *_several(result), token

    gives = declare(
        f"{name}_finding({arguments}) -> ({results.strip('()')}, Tensor)", found, finding_fake
    )
    return Forms(gives, takes)


def _several(results: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return [results] if isinstance(results, Tensor) else results


class _Thread(threading.local):
    token: Tensor | None = None


_THREAD = _Thread()


def token_of_forward_pass() -> Tensor | None:
    """The token that a forward operator returned, while its gradient is recorded."""
    return _THREAD.token


def with_token(token: Tensor | None, compute: Callable[..., Any], *arguments: Any) -> Any:
    """``compute(*arguments)``, the gradient of an operator, in which this is the token."""
    before, _THREAD.token = _THREAD.token, token
    try:
        return compute(*arguments)
    finally:
        _THREAD.token = before
