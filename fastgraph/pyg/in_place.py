"""Adding to a layer's result in its own memory.

Where nodes have few neighbours a fresh tensor can cost as much as the aggregation, because the
system zeroes its pages. Upstream writes ``out = out + term``; if nothing else can see ``out``, the
sum may take its place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.conv import MessagePassing

from fastgraph.pyg.linear import project, unwatched
from fastgraph.routing.patching import Patches
from fastgraph.routing.state import SWITCH


def replace_forward(
    patches: Patches, cls: type[MessagePassing], forward: Callable[..., Tensor | None]
) -> None:
    """Replace ``cls.forward`` by ``forward``, which does the same around ``propagate``.

    ``forward`` answers with ``None``, before it computes anything, where it has nothing to gain.
    """
    upstream: Callable[..., Tensor] = cls.forward
    forward.__qualname__ = upstream.__qualname__  # which wrong calls are reported with

    @functools.wraps(upstream)
    def replacement(self: MessagePassing, *args: Any, **kwargs: Any) -> Tensor:
        # An instance may keep this function beyond `disable()`.
        out = forward(self, *args, **kwargs) if SWITCH.active else None
        return upstream(self, *args, **kwargs) if out is None else out

    patches.replace(cls, "forward", replacement)


def add_to(out: Tensor, term: Tensor) -> Tensor:
    """``out + term``, in the memory of ``out`` where the sum has its shape and dtype."""
    fits = out.shape[out.dim() - term.dim() :] == term.shape
    in_place = fits and torch.promote_types(out.dtype, term.dtype) == out.dtype
    return out.add_(term) if in_place else out + term


def add_projections(
    lin_neighbours: Any, neighbours: Tensor, owned: bool, lin_root: Any, root: Tensor
) -> Tensor:
    """``lin_neighbours(neighbours) + lin_root(root)``.

    ``owned`` says that ``neighbours`` may be changed.
    """
    out = project(lin_neighbours, neighbours)
    if out is not neighbours:
        # torch's product of more dimensions is a view, and so would be what is added to it.
        owned = out.dim() == 2 and unwatched(lin_neighbours)
    term = project(lin_root, root)
    return add_to(out, term) if owned else out + term
