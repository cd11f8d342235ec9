"""Facts and errors of one rank that all ranks must know, lest the others wait for it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from importlib import metadata
from typing import TypeVar

from fastgraph import settings
from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.world import WORLD, RanksDivergedError, alone, share_random_states
from fastgraph.machine import native
from fastgraph.registry.registry import REGISTRY
from fastgraph.routing.switch import SWITCH
from fastgraph.upstream import PACKAGES

_SETTINGS = ("backend", "min_edges", "strict", "compare", "check_cache")

Value = TypeVar("Value")
Errors = tuple[type[Exception], ...]


def on_first_rank(action: Callable[[], Value], errors: Errors = (OSError, ValueError)) -> Value:
    """The value of an action on rank 0, on all ranks; or its error, if it is one of these."""
    outcomes = [_outcome(action, errors)] if WORLD.rank == 0 else []
    (value,) = _given(transport.broadcast(outcomes))
    return value


def on_all_ranks(
    action: Callable[[], Value], errors: Errors = (OSError, ValueError)
) -> list[Value]:
    """The values of an action on each rank, on all ranks; or the first error among these.

    The action must not wait for other ranks.
    """
    return _given(transport.gather_objects(_outcome(action, errors)))


def first_rank_first(action: Callable[[], object]) -> None:
    """Do something on rank 0, and then on the others, which find the files that it has left.

    Graphs that are made within stay whole, and the action must not ask for collectives. What it
    raises on rank 0 is raised on all ranks. All go on with its random numbers, of which the others,
    which load what it has made, may have drawn fewer.
    """
    outcome = _outcome(lambda: _alone(action), (Exception,)) if WORLD.rank == 0 else None
    error = transport.broadcast(_sendable(outcome))
    if error is not None:
        raise outcome or error
    if WORLD.rank != 0:
        _alone(action)
    if WORLD.size > 1:
        share_random_states()


def check_alike() -> None:
    """All ranks route the same layers, or none does.

    A layer that is routed on one rank and runs upstream's code on another asks for other
    collectives there. Instruction sets of processors may differ.

    Raises:
        RanksDivergedError: on all ranks, a rank has other kernels, settings or versions.
    """
    first, *others = transport.gather_objects(_facts())
    for rank, facts in enumerate(others, 1):
        for name, expected in first.items():
            if facts[name] != expected:
                raise RanksDivergedError(
                    f"rank {rank} differs from rank 0 in {name}: "
                    f"{_missing(expected, facts[name])}. Layers would be routed on some ranks "
                    "only: make them alike, or set FASTGRAPH=0 on all"
                )


def _facts() -> dict[str, list[str]]:
    """The facts of this rank that decide which layers are routed."""
    chosen = settings.current()
    routed = REGISTRY.routed("cpu") if SWITCH.active else []
    return {
        "kernels": routed or [native.why_unavailable() or "fastgraph is not enabled"],
        "settings": [f"{name}={getattr(chosen, name)}" for name in _SETTINGS],
        "versions": [f"{name} {_version(name)}" for name in ("fastgraph", "torch", *PACKAGES)],
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "is not installed"


def _missing(expected: list[str], found: list[str]) -> str:
    lacks = [item for item in expected if item not in found]
    has = [item for item in found if item not in expected]
    return f"it has {has[:3] or 'nothing else'} in place of {lacks[:3] or 'nothing'}"


def _alone(action: Callable[[], object]) -> None:
    with alone():
        action()


def _sendable(error: Exception | None) -> Exception | None:
    """An error, or one with its text where it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except (pickle.PicklingError, TypeError, AttributeError):
        return RuntimeError(f"rank 0 raised {type(error).__name__}: {error}")
    return error


def _outcome(action: Callable[[], Value], errors: Errors) -> Value | Exception:
    try:
        return action()
    except errors as error:
        return error


def _given(outcomes: list[Value | Exception]) -> list[Value]:
    values = []
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
        values.append(outcome)
    return values
