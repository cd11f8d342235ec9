"""DGL's pooling modules: sums and maxima of segments have a route, others are counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import fastgraph
from tests.dgl.graphs import ORDINARY, dgl, of_case

import dgl.nn as dglnn  # isort: skip

CHANNELS, WIDE = 4, 1 << 15  # sums and maxima of a few numbers are left to DGL

UNROUTED: dict[str, Callable[[], nn.Module]] = {
    "SortPooling": lambda: dglnn.SortPooling(2),
    "SetTransformerEncoder": lambda: dglnn.SetTransformerEncoder(CHANNELS, 2, 2, 4),
    "SetTransformerDecoder": lambda: dglnn.SetTransformerDecoder(CHANNELS, 2, 2, 4, 1, 2),
}


@pytest.mark.parametrize("name", UNROUTED)
@pytest.mark.filterwarnings("ignore::fastgraph.FallbackWarning")
def test_pooling_without_a_route(name: str) -> None:
    module = UNROUTED[name]()
    g, x = dgl.batch([of_case(ORDINARY)] * 2), torch.randn(60, CHANNELS)
    expected = module(g, x)
    with fastgraph.enabled(strict=True, min_edges=0):
        assert torch.equal(module(g, x), expected)
        accelerated, reasons = fastgraph.is_accelerated(module, g, x)
    row = fastgraph.status().row(f"dgl.{name}")
    assert (row.routed, row.fell_back) == (0, 1)
    assert not accelerated and reasons == [f"dgl.{name}: pooling has no route"]


@pytest.mark.parametrize("kind", ["SumPooling", "AvgPooling", "MaxPooling"])
def test_pooling_by_segments(kind: str) -> None:
    g, x = dgl.batch([of_case(ORDINARY)] * 2), torch.randn(60, WIDE)
    with fastgraph.enabled(strict=True, min_edges=0):
        getattr(dglnn, kind)()(g, x)
    (row,) = fastgraph.status().rows
    assert (row.layer, row.fell_back) == ("dgl.segment_reduce", 0) and row.routed > 0
