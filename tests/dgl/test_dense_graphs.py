"""``GraphConv`` on dense graphs, where rows of nodes are normalised instead of messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgraph
from tests.dgl.graphs import dgl
from tests.graphs import random_edges

import dgl.nn as dglnn  # isort: skip
from fastgraph.dgl import graph_conv  # isort: skip

NODES = 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm", ["both", "left", "right", "none"])
@pytest.mark.parametrize("channels", [(5, 7), (7, 5), (5, 5)])
@pytest.mark.parametrize("is_bipartite", [False, True])
def test_it_is_dgls(
    dtype: torch.dtype,
    norm: str,
    channels: tuple[int, int],
    is_bipartite: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    # Nodes without edges out or in, among 32 edges for each node and more.
    src, dst = random_edges(NODES - 3, NODES - 2, 40 * NODES)
    if is_bipartite:
        g = dgl.heterograph({("a", "to", "b"): (src, dst)}, {"a": NODES, "b": NODES - 1})
    else:
        g = dgl.graph((src, dst), num_nodes=NODES)
    conv = dglnn.GraphConv(*channels, norm=norm, allow_zero_in_degree=True).to(dtype)
    x = torch.randn(NODES, channels[0], dtype=dtype)
    scaled: list[Any] = []
    find = graph_conv.node_scales
    monkeypatch.setattr(graph_conv, "node_scales", lambda *a: scaled.append(a) or find(*a))

    def call(g: object, x: Tensor) -> Tensor:
        return conv(g, (x, x[: NODES - 1]) if is_bipartite else x)

    expected = steps_of(call, conv, g, x)
    with fastgraph.enabled(strict=True):
        found = steps_of(call, conv, g, x)
    assert bool(scaled) is (norm in ("both", "left"))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.detach().abs().max())
        )


def steps_of(call: Callable[..., Tensor], conv: Any, g: Any, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = call(g, x)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *conv.parameters()])]
