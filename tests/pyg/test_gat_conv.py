"""Projections of ``GATConv`` between two sets of nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GATConv

import fastgraph
from fastgraph.pyg import gat_conv
from fastgraph.pyg.modules import project
from tests.ab import arguments, assert_same
from tests.graphs import random_edges


@pytest.mark.parametrize("in_channels", [6, (6, 6)])
@pytest.mark.parametrize("watched", [False, True])
def test_destinations_are_not_projected_where_nobody_looks(
    in_channels: int | tuple[int, int], watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their scores take <W^T a, x> in place of <a, W x>."""
    torch.manual_seed(4)
    module, pair = GATConv(in_channels, 5, heads=3), (torch.randn(9, 6), torch.randn(7, 6))
    call, seen = arguments(pair, random_edges(9, 7, 40)), []
    if watched:
        projection = module.lin_dst if module.lin is None else module.lin
        projection.register_forward_hook(lambda *_: None)
    assert_same(module, call)

    def noted(module: Any, x: Tensor) -> Tensor:
        seen.append(len(x))
        return project(module, x)

    monkeypatch.setattr(gat_conv, "project", noted)
    with fastgraph.enabled():
        module(*call[0])
    assert seen == ([9, 7] if watched else [9])
