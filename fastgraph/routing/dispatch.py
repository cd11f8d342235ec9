"""The one place where a call takes its route, or upstream's own code.

An adapter plans a call before anything is computed: it answers with a function that computes, or
with the reason to leave the call to upstream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fastgraph import settings
from fastgraph.graphs.edges import OutOfRange
from fastgraph.plugins.patching import Patches
from fastgraph.routing.sizes import Least, is_too_small
from fastgraph.routing.status import (
    LEFT_WHOLE,
    RouteRefusedError,
    calls_counted,
    count_refused,
    count_routed,
    count_too_small,
    is_counted,
)
from fastgraph.routing.switch import SWITCH
from fastgraph.upstream import label_of

Computation = Callable[[], Any]
"""A call that has been decided on."""


def decide(
    module: object, planned: object, *, has_route: bool = True, name: str | None = None
) -> bool:
    """True if a call takes its route; either way it is counted.

    A call within one that was counted as a whole is not counted again where it is refused.

    Args:
        module: the layer that is called; ``None`` for a function.
        planned: a string that says why not, or anything else.
        has_route: whether the layer has one, so that ``strict`` makes a refusal an error.
        name: under which the call is counted; default: what its class is called.

    Raises:
        RouteRefusedError: under ``strict``.
    """
    name = label_of(type(module)) if name is None else name
    is_compiling = torch.compiler.is_compiling()  # a counter would make Dynamo recompile
    if not isinstance(planned, str):
        if not is_compiling:
            count_routed(name)
        return True
    if not is_compiling and not is_counted(module):
        count_refused(name, planned)
    if has_route and settings.current().strict:
        raise RouteRefusedError(f"{name} cannot be routed: {planned}")
    return False


def run_upstream(reason: object, upstream: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``upstream(*args, **kwargs)``; where the reason may be that of an error, it becomes a note.

    Args:
        reason: why a call is left to upstream.
        upstream: upstream's own code.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    if type(reason) is not OutOfRange:
        return upstream(*args, **kwargs)
    try:
        return upstream(*args, **kwargs)
    except Exception as error:
        error.add_note(f"fastgraph: {reason.detail}")
        raise


def _width_of_features(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    return args[0] if args else kwargs.get("x")


def replace_method(
    patches: Patches,
    cls: type,
    name: str,
    plan: Callable[..., Computation | str | None],
    *,
    decided: bool = True,
    least: Least | None = None,
    width: Callable[[Any, Any, Any], object] = _width_of_features,
    is_small: Callable[[Any, Any, Any], bool] | None = None,
) -> None:
    """Replace ``cls.name``: run what ``plan(module, *args)`` returns, or upstream's own code.

    Args:
        patches: by which it is replaced.
        cls: a class of layers.
        name: of the method.
        plan: what computes a call, why it is left to upstream, or ``None`` where there is nothing
            to gain.
        decided: whether that decides on the call; ``False`` where the computation, or what upstream
            calls, asks :func:`decide` itself, about a part.
        least: how many edges the argument ``edge_index``, the second one, must have; ``None``
            where graphs are of another kind.
        width: of the layer and its positional and keyword arguments gives what has as many
            channels as are aggregated, or their number; default: the argument ``x``.
        is_small: of the layer and its positional and keyword arguments says whether a graph of
            another kind has too few edges. It is not asked while code is compiled.
    """
    upstream: Callable[..., Any] = getattr(cls, name)
    plan.__qualname__ = upstream.__qualname__  # which wrong calls are reported with
    label = label_of(cls)
    has_bound = least is not None or is_small is not None

    @functools.wraps(upstream)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not SWITCH.active:  # an instance kept this function beyond `disable()`
            return upstream(self, *args, **kwargs)
        if has_bound and not torch.compiler.is_compiling():
            if least is None:
                is_left = is_small is not None and is_small(self, args, kwargs)
            else:
                edge_index = args[1] if len(args) > 1 else kwargs.get("edge_index")
                is_left = is_too_small(least, edge_index, width, self, args, kwargs)
            if is_left:
                if not is_counted(self):
                    count_too_small(label if type(self) is cls else label_of(type(self)))
                counted = calls_counted()
                counted.append(LEFT_WHOLE if least is None else self)
                try:
                    return upstream(self, *args, **kwargs)
                finally:
                    counted.pop()
        planned = plan(self, *args, **kwargs)
        if planned is None or (not decided and isinstance(planned, str)):
            return run_upstream(planned, upstream, self, *args, **kwargs)
        counted_as = label if type(self) is cls else None  # of subclasses by their own names
        decides = not decided or decide(self, planned, name=counted_as)
        if decides and not isinstance(planned, str):
            return planned()
        if torch.compiler.is_compiling():
            return upstream(self, *args, **kwargs)
        return _run_counted(self, planned, upstream, args, kwargs)

    patches.replace(cls, name, method)


def _run_counted(
    module: Any, planned: object, upstream: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Upstream's own code for a call that has been counted as a whole, for the reason planned."""
    counted = calls_counted()
    counted.append(module)
    try:
        return run_upstream(planned, upstream, module, *args, **kwargs)
    finally:
        counted.pop()
