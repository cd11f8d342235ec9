"""Layers that TorchScript compiles: upstream's own code, calls of which nobody can count."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.jit._recursive
from torch import nn
from torch_geometric.nn import conv
from torch_geometric.nn.conv import MessagePassing

from fastgraph import settings
from fastgraph.plugins.patching import Patches
from fastgraph.pyg.messages import known_message
from fastgraph.routing.status import RouteRefusedError, count_refused
from fastgraph.upstream import LAYERS

_WHOLE = [vars(conv)[layer.name] for layer in LAYERS[conv.__name__]]
"""The layers whose forward pass is replaced."""

_REASON = "scripted by torch.jit, calls of which are not counted"


def install(patches: Patches) -> None:
    """Count each layer once when it is scripted, alone or within another module."""
    upstream: Callable[..., Any] = torch.jit._recursive.create_script_module

    @functools.wraps(upstream)
    def create_script_module(
        nn_module: nn.Module, stubs_fn: Any, share_types: bool = True, is_tracing: bool = False
    ) -> Any:
        # Tracing calls the layers, which count that themselves.
        names = [] if is_tracing else _layers(nn_module)
        scripted = upstream(nn_module, stubs_fn, share_types, is_tracing)
        for name in names:
            count_refused(name, _REASON)
        return scripted

    patches.replace(torch.jit._recursive, "create_script_module", create_script_module)


def _layers(module: nn.Module) -> list[str]:
    """Classes of the message-passing layers in a module."""
    layers = [layer for layer in module.modules() if isinstance(layer, MessagePassing)]
    for layer in layers:
        if settings.current().strict and _has_route(type(layer)):
            raise RouteRefusedError(f"{type(layer).__name__} cannot be routed: {_REASON}")
    return [type(layer).__name__ for layer in layers]


def _has_route(cls: type[MessagePassing]) -> bool:
    return known_message(cls) is not None or any(
        cls.forward is layer.forward for layer in _WHOLE if not known_message(layer)
    )
