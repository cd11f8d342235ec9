"""Upstream's ``propagate`` without its checks for hooks, scripts, compilers and forms of graphs.

On a small graph these checks take longer than the operations of torch that follow. Where a layer
has none of what they look for, the same functions of upstream are called in the same order: to
gather, to make messages and to aggregate. Results and errors are the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.conv import MessagePassing

from fastgraph.pyg.messages import known_message
from fastgraph.pyg.state import HOOKS

_INHERITED = ("update", "aggregate", "_check_input", "_set_size")

_METHODS = attrgetter("message", "collect", *_INHERITED)

_DEFAULTS = attrgetter(*_INHERITED)(MessagePassing)

_REPLACEABLE = frozenset(("message", "collect", "_index_select", *_INHERITED))
"""Methods which an instance may have of its own."""

_hooks = itemgetter(*HOOKS)


def direct(
    cls: type[MessagePassing], upstream: Callable[..., Tensor], names: Sequence[str]
) -> Callable[..., Tensor]:
    """A function that computes what ``upstream`` does, or calls it where its checks are needed.

    Args:
        cls: a class of layers.
        upstream: the ``propagate`` that PyG generated for it.
        names: of its parameters after ``edge_index``.

    Returns:
        ``upstream`` itself for classes whose message is not known, or that have methods of their
        own besides.
    """
    message = known_message(cls)
    if message is None or not hasattr(cls, "collect"):  # nor is anything generated for a base
        return upstream
    methods = _METHODS(cls)
    if methods[2:] != _DEFAULTS:
        return upstream
    make: Callable[..., Tensor] = methods[0]
    weights = () if message.weight is None else (message.weight,)
    taken = tuple(inspect.signature(make).parameters)
    if taken != ("self", "x_j", *weights) or set(names) != {"x", "size", *weights}:
        return upstream
    if methods[1].__module__ != upstream.__module__:
        return upstream  # `collect` is none that PyG generated
    at_x, at_size = names.index("x"), names.index("size")
    at_weight = names.index(message.weight) if message.weight is not None else None

    def propagate(module: MessagePassing, edge_index: Any, *values: Any) -> Tensor:
        state, x = vars(module), values[at_x]
        x, other = x if type(x) is tuple and len(x) == 2 else (x, None)
        if (
            type(module) is not cls
            or type(x) is not Tensor
            or values[at_size] is not None
            or _METHODS(cls) != methods
            or any(_hooks(state))
            or not _REPLACEABLE.isdisjoint(state)
            or (other is not None and type(other) is not Tensor)
            or type(edge_index) is not Tensor  # nor an `EdgeIndex`, which may be multiplied
            or edge_index.dtype is not torch.int64
            or edge_index.layout is not torch.strided
            or edge_index.dim() != 2
            or len(edge_index) != 2
        ):
            return upstream(module, edge_index, *values)
        node_dim = module.node_dim
        to = 1 if module.flow == "source_to_target" else 0
        size = (x if other is None or to == 0 else other).size(node_dim)
        x = module._index_select(x, edge_index[1 - to])
        x = make(module, x) if at_weight is None else make(module, x, values[at_weight])
        out: Tensor = module.aggr_module(x, edge_index[to], ptr=None, dim_size=size, dim=node_dim)
        return out

    return propagate
