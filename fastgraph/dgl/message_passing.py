"""The routes of DGL's message passing, ``dgl.backend.pytorch.sparse``.

``update_all`` and its kind, ``apply_edges``, ``dgl.ops`` and the layers of ``dgl.nn`` end in a few
functions there, which are looked up when they are called. Replaced for what operators compute are
``GSpMM`` (:mod:`fastgraph.dgl.gspmm`), ``GSDDMM`` (:mod:`fastgraph.dgl.gsddmm`), ``EdgeSoftmax``
(:mod:`fastgraph.dgl.edge_softmax`) and ``SegmentReduce`` (:mod:`fastgraph.dgl.segment_reduce`). The
other functions run as they are, and are counted.

Above them are ``message_passing`` and ``invoke_edge_udf`` of ``dgl.core``, for functions of users
(:mod:`fastgraph.dgl.traced`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import dgl.backend.pytorch.sparse as upstream
import torch
from dgl import core
from dgl.base import ALL, NID, is_all
from dgl.function.base import BuiltinFunction
from dgl.nn.pytorch.linear import TypedLinear

from fastgraph.dgl import edge_softmax, gsddmm, gspmm, segment_reduce, traced
from fastgraph.dgl.conditions import NoOperator, layer_left
from fastgraph.dgl.index_objects import FEWEST, is_below, is_tiny_graph
from fastgraph.dgl.sizes import PRODUCT, SOFTMAX, WEIGHTED_SUM, is_too_small
from fastgraph.dgl.structure import SEVERAL_RELATIONS
from fastgraph.plugins.patching import Patches
from fastgraph.plugins.refusal import Refusal
from fastgraph.routing.dispatch import Computation, refuse, take
from fastgraph.routing.sizes import TOO_SMALL, Least
from fastgraph.routing.status import THREAD, count_program, count_too_small, leave
from fastgraph.routing.switch import SWITCH


def _any(*_: Any) -> None:
    """DGL looks at its arguments itself."""


def _of_any(least: Least) -> Callable[..., int]:
    """The number of edges from which on a call may gain, whatever its arguments."""
    return lambda *_: least.bound()


def _of_none(*_: object) -> int:
    """The same of calls that have no graph."""
    return 0


_UPDATE, _APPLY = "dgl.update_all", "dgl.apply_edges"
"""The names under which calls with functions of users are counted."""

_OTHERS: dict[str, tuple[str, Callable[..., None]]] = {
    "GSpMM_hetero": ("dgl.gspmm", _any),
    "GSDDMM_hetero": ("dgl.gsddmm", _any),
    "EdgeSoftmax_hetero": ("dgl.edge_softmax", edge_softmax.check_several),
}
"""Functions without a route: the name under which they are counted, and what checks a call."""


class _Replacement:
    """In place of one of DGL's autograd functions, whose ``apply`` is all that DGL uses."""

    def __init__(self, function: Any, apply: Callable[..., Any]) -> None:
        self._function = function
        self.apply = apply

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


def install(patches: Patches) -> None:
    """Replace the functions in DGL's module."""
    for function, name, route, bound, check in (
        ("GSpMM", "dgl.gspmm", gspmm.plan, gspmm.bound, None),
        ("GSDDMM", "dgl.gsddmm", gsddmm.plan, _of_any(PRODUCT), gsddmm.check),
        (
            "EdgeSoftmax",
            "dgl.edge_softmax",
            edge_softmax.plan,
            _of_any(SOFTMAX),
            edge_softmax.check,
        ),
        ("SegmentReduce", "dgl.segment_reduce", segment_reduce.plan, _of_none, None),
    ):
        found = getattr(upstream, function)
        apply = _routed(found, name, route, bound, check)
        patches.replace(upstream, function, _Replacement(found, apply))
    for function, (name, check) in _OTHERS.items():
        found = getattr(upstream, function)
        patches.replace(upstream, function, _Replacement(found, _counting(found, name, check)))
    patches.replace(core, "message_passing", _of_users(core.message_passing))
    patches.replace(core, "invoke_edge_udf", _of_edges(core.invoke_edge_udf))


def _of_users(message_passing: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(message_passing)
    def routed(g: Any, mfunc: Any, rfunc: Any, afunc: Any) -> Any:
        if isinstance(mfunc, BuiltinFunction) and isinstance(rfunc, BuiltinFunction):
            return message_passing(g, mfunc, rfunc, afunc)
        if THREAD.counted and (is_tiny_graph(g) or _is_typed()):
            return message_passing(g, mfunc, rfunc, afunc)
        are_functions = _is_function(mfunc) and _is_function(rfunc)
        if not are_functions or not SWITCH.active:
            return message_passing(g, mfunc, rfunc, afunc)
        if traced.is_tiny(g):
            if THREAD.counted:
                return message_passing(g, mfunc, rfunc, afunc)
            under_way = leave(_UPDATE, _TINY)
            try:
                return message_passing(g, mfunc, rfunc, afunc)
            finally:
                under_way.pop()
        found = _found(traced.plan(g, mfunc, rfunc), _UPDATE)
        if found is None:
            return message_passing(g, mfunc, rfunc, afunc)
        return found if afunc is None else _applied(g, afunc, found)

    return routed


def _is_typed() -> bool:
    """True in a layer that was left to DGL and whose messages are no programs.

    They are products by the matrices of types, which have a gradient of their own. DGL's layers
    have these as modules of their own, not within others.
    """
    layer = layer_left()
    return layer is not None and any(isinstance(m, TypedLinear) for m in layer._modules.values())


def _is_function(given: Any) -> bool:
    return isinstance(given, BuiltinFunction) or callable(given)


def _of_edges(invoke: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(invoke)
    def routed(graph: Any, eid: Any, etype: Any, func: Any, **others: Any) -> Any:
        if THREAD.counted and (is_tiny_graph(graph) or _is_typed()):
            return invoke(graph, eid, etype, func, **others)
        # Message passing names the numbers of edges; `apply_edges` does not.
        is_whole = not others and is_all(eid) and len(graph.canonical_etypes) == 1
        if not (SWITCH.active and is_whole):
            return invoke(graph, eid, etype, func, **others)
        if traced.is_tiny(graph):
            if THREAD.counted:
                return invoke(graph, eid, etype, func)
            under_way = leave(_APPLY, _TINY)
            try:
                return invoke(graph, eid, etype, func)
            finally:
                under_way.pop()
        found = _found(traced.plan_edges(graph, func), _APPLY)
        return invoke(graph, eid, etype, func) if found is None else found

    return routed


_TINY = object()
"""Stands for a call that is too small for anything, and left to upstream with all that it calls."""


def _found(planned: traced.Computation | Refusal, name: str) -> dict[str, Any] | None:
    """The results of a call that is routed; ``None`` for one that is left to upstream."""
    if not isinstance(planned, Refusal):
        count_program(name)
        return planned()
    if planned is TOO_SMALL:
        count_too_small(name)
    else:
        refuse(None, planned, has_route=False, name=name)
    return None


def _applied(g: Any, function: Any, found: dict[str, Any]) -> Any:
    """The values of a function of nodes that have new features, as upstream calls it."""
    for name, features in g.dstdata.items():
        found.setdefault(name, features)
    numbers = g.dstdata.get(NID, None)
    return core.invoke_node_udf(g, ALL, g.dsttypes[0], function, ndata=found, orig_nid=numbers)


def _routed(
    function: Any,
    name: str,
    plan: Callable[..., Computation | Refusal],
    bound: Callable[..., int],
    check: Callable[..., None] | None,
) -> Callable[..., Any]:
    def apply(*arguments: Any) -> Any:
        under_way = THREAD.counted
        if under_way and under_way[-1] is _TINY:
            return function.apply(*arguments)
        if SWITCH.active:
            is_tiny = arguments and is_below(arguments[0], FEWEST)
            if is_tiny or (arguments and is_below(arguments[0], bound(*arguments))):
                if check is not None:
                    check(*arguments)
                if not under_way:
                    count_too_small(name)
                return function.apply(*arguments)
            planned = plan(*arguments)
            if planned is TOO_SMALL:  # first of all, as such calls would notice
                if not under_way:
                    count_too_small(name)
            elif not isinstance(planned, Refusal):
                take(None, name=name)
                return planned()
            elif not _is_part(planned, arguments):
                has_route = not isinstance(planned, NoOperator)
                refuse(None, planned, has_route=has_route, name=name)
        return function.apply(*arguments)

    return apply


def _is_part(refusal: Refusal, arguments: tuple[Any, ...]) -> bool:
    """True if the call that is refused is part of one that was left to upstream, and counted.

    Functions that are left to upstream call others in their backward passes.
    """
    if THREAD.counted:
        return True
    if not isinstance(refusal, NoOperator) or torch._C._current_graph_task_id() == -1:
        return False
    features = next((value for value in arguments if isinstance(value, torch.Tensor)), None)
    return is_too_small(WEIGHTED_SUM, arguments[0], features)


def _counting(function: Any, name: str, check: Callable[..., None]) -> Callable[..., Any]:
    def apply(*arguments: Any) -> Any:
        if SWITCH.active:
            check(*arguments)
            refuse(None, SEVERAL_RELATIONS, has_route=False, name=name)
        return function.apply(*arguments)

    return apply
