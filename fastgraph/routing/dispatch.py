"""The one place where a call takes its route, or upstream's own code.

An adapter plans a call before anything is computed: it answers with a function that computes, or
with a :class:`Refusal`, which leaves the call to upstream.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from fastgraph import settings
from fastgraph.graphs.edges import OutOfRange
from fastgraph.plugins.patching import Patches
from fastgraph.plugins.refusal import Refusal
from fastgraph.routing.status import (
    THREAD,
    RouteRefusedError,
    count_refused,
    count_routed,
    is_counted,
    leave,
)
from fastgraph.routing.switch import SWITCH
from fastgraph.routing.wrappers import wrapped
from fastgraph.upstream import label_of

Computation = Callable[[], Any]
"""A call that has been decided on."""


def take(module: object, *, name: str | None = None) -> None:
    """Count a call that takes its route.

    Args:
        module: the layer that is called; ``None`` for a function.
        name: under which the call is counted; default: what its class is called.
    """
    if not torch.compiler.is_compiling():  # a counter would make Dynamo recompile
        count_routed(label_of(type(module)) if name is None else name)


def refuse(
    module: object, refusal: Refusal, *, has_route: bool = True, name: str | None = None
) -> None:
    """Count a call that is left to upstream, unless it is one that was counted as a whole.

    Args:
        module: the layer that is called; ``None`` for a function.
        refusal: why it is.
        has_route: whether the layer has one, so that ``strict`` makes a refusal an error.
        name: as for :func:`take`.

    Raises:
        RouteRefusedError: under ``strict``.
    """
    name = label_of(type(module)) if name is None else name
    if not torch.compiler.is_compiling() and not is_counted(module):
        count_refused(name, refusal.reason)
    if has_route and settings.current().strict:
        raise RouteRefusedError(f"{name} cannot be routed: {refusal}")


def run_upstream(
    refusal: Refusal | None, upstream: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """``upstream(*args, **kwargs)``; where the reason may be that of an error, it becomes a note.

    Args:
        refusal: why a call is left to upstream; ``None`` where there is nothing to gain.
        upstream: upstream's own code.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    if type(refusal) is not OutOfRange:
        return upstream(*args, **kwargs)
    try:
        return upstream(*args, **kwargs)
    except Exception as error:
        error.add_note(f"fastgraph: {refusal.detail}")
        raise


def replace_method(
    patches: Patches,
    cls: type,
    name: str,
    plan: Callable[..., Computation | Refusal | None],
    *,
    decided: bool = True,
    is_small: Callable[[Any, Any, Any], bool] | None = None,
    has_edge_index: bool = False,
) -> None:
    """Replace ``cls.name``: run what ``plan(module, *args)`` returns, or upstream's own code.

    Args:
        patches: by which it is replaced.
        cls: a class of layers.
        name: of the method.
        plan: what computes a call, why it is left to upstream, or ``None`` where there is nothing
            to gain.
        decided: whether that decides on the call; ``False`` where the computation, or what upstream
            calls, counts a part itself, by :func:`take` or :func:`refuse`.
        is_small: of the layer and its positional and keyword arguments, true if the graph is too
            small to gain (:mod:`fastgraph.routing.sizes`); default: no graph is.
        has_edge_index: whether a parameter is called ``edge_index``, and ``is_small`` is asked
            without a detour.
    """
    upstream: Callable[..., Any] = getattr(cls, name)
    plan.__qualname__ = upstream.__qualname__  # which wrong calls are reported with
    label = label_of(cls)
    is_compiling, is_seen_by_dynamo = (
        torch.compiler.is_compiling,
        torch.compiler.is_dynamo_compiling,
    )

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not SWITCH.active:  # an instance kept this function beyond `disable()`
            return upstream(self, *args, **kwargs)
        counted = left_if_small(self, *args, **kwargs) if is_asked_here else None
        if counted is not None:
            try:
                return upstream(self, *args, **kwargs)
            finally:
                counted.pop()
        planned = plan(self, *args, **kwargs)
        if isinstance(planned, Refusal):
            if not decided:
                return run_upstream(planned, upstream, self, *args, **kwargs)
            # Subclasses are counted by their own names.
            refuse(self, planned, name=label if type(self) is cls else None)
            if is_compiling():
                return upstream(self, *args, **kwargs)
            return _run_counted(self, planned, upstream, args, kwargs)
        if planned is None:
            return upstream(self, *args, **kwargs)
        if decided:
            take(self, name=label if type(self) is cls else None)
        return planned()

    def left_if_small(module: Any, *args: Any, **kwargs: Any) -> list[object] | None:
        if is_seen_by_dynamo() or not is_small(module, args, kwargs) or not SWITCH.active:  # type: ignore[misc]
            return None
        counted = THREAD.counted
        if not counted or counted[-1] is not module:
            return leave(label if type(module) is cls else label_of(type(module)), module)
        counted.append(module)  # which has been counted
        return counted

    wrapper = None
    if has_edge_index and is_small is not None and _have_same_parameters(plan, upstream):
        asked = tuple(inspect.signature(upstream).parameters)
        wrapper = wrapped(upstream, left_if_small, asked, method)
    is_asked_here = is_small is not None and wrapper is None
    patches.replace(cls, name, wrapper or functools.wraps(upstream)(method))


def _have_same_parameters(plan: Callable[..., Any], upstream: Callable[..., Any]) -> bool:
    """True if a plan takes the arguments of a method by the same positions."""
    taken, known = (list(inspect.signature(f).parameters)[1:] for f in (plan, upstream))
    return taken == known


def _run_counted(
    module: Any, refusal: Refusal, upstream: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Upstream's own code for a call that has been counted as a whole, and refused."""
    if type(refusal) is OutOfRange:
        upstream = functools.partial(run_upstream, refusal, upstream)
    counted, refused = THREAD.counted, THREAD.refused
    counted.append(module)
    refused.append(module)
    try:
        return upstream(module, *args, **kwargs)
    finally:
        refused.pop()
        counted.pop()
