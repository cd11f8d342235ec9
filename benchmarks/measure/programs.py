"""Layers whose messages run as edge programs, as they are measured on GPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import (
    CGConv,
    EdgeConv,
    GENConv,
    GINEConv,
    PointNetConv,
    ResGatedGraphConv,
)

from measure.layers import LayerCase


class EdgeFeatures(GINEConv):
    """``GINEConv`` of a fixed random vector for each edge, which it makes at its first call."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__(nn.Identity())
        self._features: Tensor | None = None

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if self._features is None:
            generator = torch.Generator(x.device).manual_seed(0)
            shape = edge_index.shape[1], x.shape[1]
            # The same numbers in every dtype, rounded to it.
            made = torch.randn(shape, generator=generator, device=x.device)
            self._features = made.to(x.dtype)
        out: Tensor = super().forward(x, edge_index, self._features)
        return out


class Maxima(GENConv):
    """``GENConv`` with maxima, and without its dense layers."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__(channels, out_channels, aggr="max")
        self.mlp = nn.Identity()


class Gates(CGConv):
    """``CGConv``, whose products with the features of both ends are part of its message."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__(channels)


def _two_maps(channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(channels, out_channels), nn.ReLU(), nn.Linear(out_channels, out_channels)
    )


class EdgeMlp(EdgeConv):
    """``EdgeConv`` of two maps, which are computed for each edge."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__(_two_maps(2 * channels, out_channels))


class Points(PointNetConv):
    """``PointNetConv`` of two maps, of features and random positions, without self-loops."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__(_two_maps(channels + 3, out_channels), add_self_loops=False)
        self._positions: Tensor | None = None

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if self._positions is None:
            generator = torch.Generator(x.device).manual_seed(0)
            made = torch.randn(x.shape[0], 3, generator=generator, device=x.device)
            self._positions = made.to(x.dtype)
        out: Tensor = super().forward(x, self._positions, edge_index)
        return out


_BARE: dict[str, Any] = {"root_weight": False, "bias": False}

PROGRAMS: dict[str, LayerCase] = {
    "ResGated": LayerCase(ResGatedGraphConv, bare_options=_BARE),
    "GINE": LayerCase(EdgeFeatures),
    "CG": LayerCase(Gates, keeps_linear=True),
    "GEN-max": LayerCase(Maxima),
    "EdgeConv": LayerCase(EdgeMlp, keeps_linear=True),
    "PointNet": LayerCase(Points, keeps_linear=True),
}
