"""Conditions that all routes of DGL share, each answering with a refusal or ``None``."""

from __future__ import annotations

import functools

import torch
from dgl.global_config import is_libxsmm_enabled
from torch import Tensor, nn

from fastgraph.dgl.structure import Structure
from fastgraph.plugins.backend import device_type
from fastgraph.plugins.refusal import Refusal
from fastgraph.registry.registry import REGISTRY
from fastgraph.routing.conditions import execution_mode, too_few_edges
from fastgraph.routing.status import THREAD

_has_autocast = functools.cache(torch.amp.is_autocast_available)

LEAST_CHANNELS = 8
"""For fewer in each head, what kernels do for each edge outweighs the channels."""


class NoOperator(Refusal):
    """Why there is no route for a call, which ``strict`` does not take for an error."""


def features_refusal(structure: Structure, operator: str, x: Tensor, num_in: int) -> Refusal | None:
    """Why features of nodes, or of edges, cannot be handed to an operator.

    Args:
        structure: the edges.
        operator: the name of the operator.
        x: ``[num_in, *channels]`` or ``[num_in]``.
        num_in: how many rows there are to be.
    """
    if x.layout != torch.strided:
        return Refusal(f"features of layout {x.layout}")
    if x.dim() == 0 or x.shape[0] != num_in:
        return Refusal(f"features of shape {list(x.shape)} for {num_in} rows")
    refusal = call_refusal(structure.device, structure.num_edges, x)
    return refusal or REGISTRY.refusal(operator, device_type(x), x.dtype)


def call_refusal(
    device: torch.device, num_edges: int, features: Tensor, *, can_move: bool = False
) -> Refusal | None:
    """Why a call on edges and features must be left to upstream, whatever edges they are.

    Args:
        device: of the edges.
        num_edges: how many there are.
        features: of nodes.
        can_move: whether edges on the CPU may be copied to the device of the features.
    """
    refusal = mode_refusal(features)
    return refusal or place_refusal(device, num_edges, features, can_move=can_move)


def place_refusal(
    device: torch.device, num_edges: int, features: Tensor, *, can_move: bool = False
) -> Refusal | None:
    """The part of :func:`call_refusal` that depends on the edges."""
    if features.device != device and not (can_move and device.type == "cpu"):
        return Refusal("features and graph on different devices")
    return too_few_edges(num_edges)


def mode_refusal(features: Tensor) -> Refusal | None:
    """Why a call on features must be left to upstream, whatever graph it is."""
    if torch.compiler.is_compiling():
        return Refusal("within torch.compile, which does not look into DGL's graphs")
    refusal = execution_mode()
    if refusal is not None:
        return refusal
    kind = device_type(features)
    if _has_autocast(kind) and torch.is_autocast_enabled(kind):
        return Refusal("under autocast, in which DGL's own functions take one dtype only")
    return None


def layer_left() -> nn.Module | None:
    """The layer with a route of its own that was left to DGL as a whole, within a call of it."""
    innermost = THREAD.counted[-1] if THREAD.counted else None
    return innermost if isinstance(innermost, nn.Module) else None


def is_layer_too_small() -> bool:
    """True within a call of a layer that was left to DGL as a whole since it would gain nothing.

    DGL groups the edges then for what it does, and grouping them for one part of the layer besides
    takes longer than the part gains.
    """
    layer, refused = layer_left(), THREAD.refused
    return layer is not None and not (refused and refused[-1] is layer)


def last_wins(x: Tensor) -> bool:
    """True if the last of several extrema gets the gradient in DGL, where one is recorded."""
    is_recorded = x.requires_grad and torch.is_grad_enabled()
    return is_recorded and lets_last_win(x.dtype, x.device)


def lets_last_win(dtype: torch.dtype, device: torch.device) -> bool:
    """True if LIBXSMM computes extrema, of which it gives the last."""
    return dtype != torch.float64 and device.type == "cpu" and bool(is_libxsmm_enabled())
