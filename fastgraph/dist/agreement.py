"""Errors of one rank that all ranks must raise, lest the others wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fastgraph.dist import transport
from fastgraph.dist.world import WORLD

Value = TypeVar("Value")
Errors = tuple[type[Exception], ...]


def on_first_rank(action: Callable[[], Value], errors: Errors = (OSError, ValueError)) -> Value:
    """What an action gives on rank 0, on all ranks; or its error, if it is one of these."""
    outcome: Any = _outcome(action, errors) if WORLD.rank == 0 else None
    (value,) = _given([transport.broadcast(outcome)])
    return value  # type: ignore[no-any-return]


def on_all_ranks(
    action: Callable[[], Value], errors: Errors = (OSError, ValueError)
) -> list[Value]:
    """What an action gives on each rank, on all ranks; or the first error, if it is one of these.

    The action must not wait for other ranks.
    """
    return _given(transport.gather_objects(_outcome(action, errors)))


def _outcome(action: Callable[[], Value], errors: Errors) -> Value | Exception:
    try:
        return action()
    except errors as error:
        return error


def _given(outcomes: list[Any]) -> list[Any]:
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes
