"""Sums over types of edges in ``HeteroConv``: what a node adds itself is one product for all types.

``SAGEConv`` and ``GraphConv`` add ``W_r x`` of the node to what it aggregates, for each type of
edges that leads to it, and ``HeteroConv`` adds these up: ``(W_1 + W_2 + ...) x``. So in a sum or a
mean the layers leave their term out, and it is added where their results are.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook
from torch_geometric.nn.conv import GraphConv, HeteroConv, SAGEConv

from fastgraph.layers.linear import add_linear, linear
from fastgraph.layers.modules import affine_map_of
from fastgraph.plugins.patching import Patches
from fastgraph.pyg.modules import LINEAR
from fastgraph.routing.switch import SWITCH

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (Tensor, torch.nn.Parameter)
_PYG = "torch_geometric.nn.conv."


class _Root(NamedTuple):
    """A product that a layer left out of its result."""

    out: Tensor
    x: Tensor
    weight: Tensor


class _Roots:
    """The products that layers leave out during a call of ``HeteroConv``.

    Args:
        layers: those whose results nobody sees but ``HeteroConv``.
    """

    def __init__(self, layers: Iterable[object]) -> None:
        self.layers = frozenset(id(layer) for layer in layers)
        self.left: list[_Root] = []


class _Thread(threading.local):
    roots: _Roots | None = None


_THREAD = _Thread()


def install(patches: Patches) -> None:
    """Wrap ``HeteroConv.forward``, and the function by which it adds up."""
    module = import_module(HeteroConv.__module__)
    patches.replace(HeteroConv, "forward", _summing(HeteroConv.forward))
    patches.replace(module, "group", _grouping(module.group))


def leaves_out(layer: object, out: Tensor, lin_root: Any, x: Tensor) -> bool:
    """True if a layer is to return ``out`` without ``lin_root(x)``, which is added later.

    Args:
        layer: the layer.
        out: ``[nodes, out_channels]``, what it is going to return.
        lin_root: the module that projects its nodes.
        x: their features, ``[nodes, in_channels]``.
    """
    roots = _THREAD.roots
    if roots is None or id(layer) not in roots.layers or not LINEAR.knows(lin_root):
        return False
    weight, bias = affine_map_of(lin_root)
    if bias is not None or type(x) not in _PLAIN or type(out) is not Tensor or x.dim() != 2:
        return False
    if x.is_meta or not x.device == weight.device == out.device:
        return False
    if out.shape != (len(x), len(weight)) or x.shape[1] != weight.shape[1]:
        return False
    if not x.dtype == weight.dtype == out.dtype or torch.is_autocast_enabled(x.device.type):
        return False
    roots.left.append(_Root(out, x, weight))
    return True


def _summing(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_sum = self.aggr in ("sum", "mean") and SWITCH.active
        if not is_sum or torch.compiler.is_compiling() or _has_any_global_hook():
            return upstream(self, *args, **kwargs)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return upstream(self, *args, **kwargs)  # a sum in place may be of other dimensions
        before, _THREAD.roots = _THREAD.roots, _Roots(_unseen(list(self.convs.values())))
        try:
            return upstream(self, *args, **kwargs)
        finally:
            _THREAD.roots = before

    return forward


def _unseen(layers: list[Any]) -> list[Any]:
    """The layers whose results nobody sees but ``HeteroConv``, and that end with a sum.

    None beside a layer of a user, which may call them, or edit features that are multiplied later.
    """
    if not all(type(layer).__module__.startswith(_PYG) for layer in layers):
        return []
    others = [layer for layer in layers if not _is_usual(layer)]
    inner = {id(module) for layer in others for module in layer.modules()}
    return [layer for layer in layers if id(layer) not in inner]


def _is_usual(layer: Any) -> bool:
    """True if nobody but its caller sees the result of a layer, and it ends with a sum."""
    cls = type(layer)
    attributes = vars(layer)
    return (
        (cls is GraphConv or (cls is SAGEConv and layer.normalize is False))
        and "forward" not in attributes
        and not any(attributes[hooks] for hooks in _HOOKS)
    )


def _grouping(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def group(xs: list[Tensor], aggr: str | None) -> Tensor | None:
        roots = _THREAD.roots
        left = [] if roots is None else [r for r in roots.left if any(r.out is x for x in xs)]
        if not left:
            found: Tensor | None = upstream(xs, aggr)
            return found
        if any(x.shape != xs[0].shape or x.dtype != xs[0].dtype for x in xs):
            return upstream([_whole(x, left) for x in xs], aggr)  # type: ignore[no-any-return]
        return _sum(xs, left) / len(xs) if aggr == "mean" and len(xs) > 1 else _sum(xs, left)

    return group


def _whole(x: Tensor, left: list[_Root]) -> Tensor:
    """The result of a layer as it would have been."""
    for root in left:
        if root.out is x:
            return x + linear(root.x, root.weight, None)
    return x


def _sum(xs: list[Tensor], left: list[_Root]) -> Tensor:
    """The sum of results, with what was left out of them: one product for features that agree."""
    total = xs[0] if len(xs) == 1 else xs[0] + xs[1]
    for x in xs[2:]:
        total += x
    weights: dict[int, Tensor] = {}
    for root in left:
        known = weights.get(id(root.x))
        weights[id(root.x)] = root.weight if known is None else known + root.weight
    features = {id(root.x): root.x for root in left}
    for key, weight in weights.items():
        if total is xs[0]:
            total = total + linear(features[key], weight, None)
        else:
            total = add_linear(total, features[key], weight)
    return total
