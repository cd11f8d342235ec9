"""Upstream's ``propagate`` without its checks for hooks, scripts, compilers and forms of graphs.

On a small graph these checks take longer than the operations of torch that follow. Where a layer
has none of what they look for, the same functions of upstream are called in the same order: to
gather, to make messages and to aggregate. Results and errors are the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook
from torch_geometric.nn.aggr import base
from torch_geometric.nn.conv import MessagePassing

from fastgraph.plugins.refusal import Refusal
from fastgraph.pyg.aggregations import REDUCTIONS, reduction_of
from fastgraph.pyg.messages import known_message
from fastgraph.pyg.state import has_hook
from fastgraph.routing.wrappers import bound

_INHERITED = ("_check_input", "_set_size")

_METHODS = attrgetter("message", "collect", "aggregate", "update", *_INHERITED)

_DEFAULTS = attrgetter(*_INHERITED)(MessagePassing)

_REPLACEABLE = frozenset(
    ("message", "collect", "aggregate", "update", "_index_select", *_INHERITED)
)
"""Methods which an instance may have of its own."""

_Propagate = Callable[..., Tensor]

_SOURCE = """
def bind(_upstream, _is_other, _collect, _message, _aggregate, _update):
    def propagate(_module, edge_index, {parameters}):
        if _is_other(_module, edge_index):
            return _upstream(_module, edge_index, {parameters})
        _size = [None, None] if size is None else list(size)
        _found = _collect(_module, edge_index, {collected}_size)
        _out = _message(_module, {message})
        _out = _aggregate(_module, _out, {aggregate})
        return {update}
    return propagate
"""

_KEYWORDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def direct(cls: type[MessagePassing], upstream: _Propagate, names: Sequence[str]) -> _Propagate:
    """A function that computes what ``upstream`` does, or calls it where its checks are needed.

    Args:
        cls: a class of layers.
        upstream: the ``propagate`` that PyG generated for it.
        names: of its parameters after ``edge_index``.

    Returns:
        ``upstream`` itself for classes that have other methods of their own than those which their
        messages go through.
    """
    if not hasattr(cls, "collect"):  # nothing is generated for a base
        return upstream
    methods = _METHODS(cls)
    if methods[4:] != _DEFAULTS:
        return upstream
    if methods[1].__module__ != upstream.__module__:
        return upstream  # `collect` is none that PyG generated

    def is_other(module: MessagePassing, edge_index: Any) -> bool:
        """True if PyG's checks are needed."""
        state = vars(module)
        return (
            type(module) is not cls
            or _METHODS(cls) != methods
            or has_hook(state)
            or not _REPLACEABLE.isdisjoint(state)
            or type(edge_index) is not Tensor  # nor an `EdgeIndex`, which may be multiplied
            or edge_index.dtype is not torch.int64
            or edge_index.layout is not torch.strided
            or edge_index.is_nested
            or len(shape := edge_index.shape) != 2
            or shape[0] != 2
        )

    made = _of_features(cls, upstream, names, is_other)
    return made or _of_any(cls, upstream, names, is_other) or upstream


def _of_features(
    cls: type[MessagePassing],
    upstream: _Propagate,
    names: Sequence[str],
    is_other: Callable[[MessagePassing, Any], bool],
) -> _Propagate | None:
    """The function for a message that is known to take features and a weight, if it is."""
    message = known_message(cls)
    if (
        message is None
        or cls.aggregate is not MessagePassing.aggregate
        or cls.update is not MessagePassing.update
    ):
        return None
    make: _Propagate = cls.message
    weights = () if message.weight is None else (message.weight,)
    taken = tuple(inspect.signature(make).parameters)
    if taken != ("self", "x_j", *weights) or set(names) != {"x", "size", *weights}:
        return None
    at_x, at_size = names.index("x"), names.index("size")
    at_weight = names.index(message.weight) if message.weight is not None else None

    def propagate(module: MessagePassing, edge_index: Any, *values: Any) -> Tensor:
        x = values[at_x]
        x, other = x if type(x) is tuple and len(x) == 2 else (x, None)
        if (
            type(x) is not Tensor
            or values[at_size] is not None
            or (other is not None and type(other) is not Tensor)
            or is_other(module, edge_index)
        ):
            return upstream(module, edge_index, *values)
        to = 1 if module.flow == "source_to_target" else 0
        size = (x if other is None or to == 0 else other).size(module.node_dim)
        x = module._index_select(x, edge_index[1 - to])
        x = make(module, x) if at_weight is None else make(module, x, values[at_weight])
        return _aggregate(module, x, edge_index[to], size)

    return propagate


def _of_any(
    cls: type[MessagePassing],
    upstream: _Propagate,
    names: Sequence[str],
    is_other: Callable[[MessagePassing, Any], bool],
) -> _Propagate | None:
    """The function for a message that takes what PyG collects for it."""
    passed = list(inspect.signature(upstream).parameters.values())[2:]
    if names[-1:] != ["size"] or any(
        p.kind is not p.POSITIONAL_OR_KEYWORD or p.name.startswith("_") for p in passed
    ):
        return None
    collect: Any = _METHODS(cls)[1]
    known = collect.__globals__["CollectArgs"]._fields
    taken: dict[str, str] = {}
    for name, skipped in (("message", 1), ("aggregate", 2), ("update", 2)):
        if not isinstance(inspect.getattr_static(cls, name), FunctionType):
            return None
        parameters = list(inspect.signature(getattr(cls, name)).parameters.values())[skipped:]
        own = [p.name for p in parameters if (name, p.name) != ("aggregate", "aggr")]
        if not {*own} <= {*known} or any(p.kind not in _KEYWORDS for p in parameters):
            return None
        taken[name] = ", ".join(f"{argument}=_found.{argument}" for argument in own)
    is_default = cls.aggregate is MessagePassing.aggregate
    is_updated = cls.update is not MessagePassing.update
    source = _SOURCE.format(
        parameters=", ".join(names),
        collected="".join(f"{name}, " for name in names[:-1]),
        message=taken["message"],
        aggregate="_found.index, _found.dim_size" if is_default else taken["aggregate"],
        update=f"_update(_module, _out, {taken['update']})" if is_updated else "_out",
    )
    aggregate: Any = _aggregate if is_default else cls.aggregate
    found: _Propagate = bound(
        source,
        f"<messages of {cls.__qualname__}>",
        __name__,
        upstream,
        is_other,
        collect,
        cls.message,
        aggregate,
        cls.update,
    )
    return found


def _aggregate(module: MessagePassing, messages: Any, index: Tensor, size: Any) -> Tensor:
    """``MessagePassing.aggregate`` of edges that no ``ptr`` delimits.

    A reduction that nobody watches is the function of PyG that it ends in.
    """
    aggregation, dim = module._modules.get("aggr_module"), module.node_dim
    if (
        type(aggregation) in REDUCTIONS
        and type(messages) is Tensor
        and type(size) is int
        and type(dim) is int
        and -(count := messages.dim()) <= dim < count
        and not _has_any_global_hook()
    ):
        reduction = reduction_of(aggregation)
        if not isinstance(reduction, Refusal):
            try:
                out: Tensor = base.scatter(messages, index, dim, size, reduction)
                return out
            except (IndexError, RuntimeError):
                pass  # PyG's aggregation raises again below, and names what does not fit
    out = module.aggr_module(messages, index, ptr=None, dim_size=size, dim=dim)
    return out
