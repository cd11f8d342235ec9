"""The order in which kernels visit the rows of a graph changes no bit of any result."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgraph import ops
from fastgraph.graphs.edges import graph_of
from fastgraph.graphs.graph import beside
from fastgraph.plugins.backend import FLOATING
from tests.graphs import mixed_communities

NUM_NODES, NUM_EDGES = 5000, 64_200
HEADS, CHANNELS, EDGE_DIM = 2, 257, 3
FLAT = (NUM_NODES, HEADS * CHANNELS)
NODES = (NUM_NODES, HEADS, CHANNELS)
SCORES = (NUM_NODES, HEADS)
OF_EDGES = (NUM_EDGES, EDGE_DIM)
WIDER = (NUM_NODES, HEADS, CHANNELS + EDGE_DIM)
DROPOUT = {"dropout": 0.3, "seed": torch.tensor(7), "need_weights": True}


def communities_and_a_hub() -> Tensor:
    """Duplicate edges, self-loops, nodes without edges, and a hub whose row is cut."""
    hub = torch.stack([torch.arange(4800), torch.full((4800,), 7)])
    return torch.cat([mixed_communities(NUM_NODES - 50, 12), hub], dim=1)


# Each with the shapes of the inputs that come before the edges.
OPERATORS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "sum": (ops.spmm, [FLAT]),
    "mean": (partial(ops.spmm, reduce="mean"), [FLAT]),
    "weighted": (lambda x, weight, index: ops.spmm(x, index, weight), [FLAT, (NUM_EDGES,)]),
    "max": (ops.segment_reduce, [FLAT]),
    "winner": (partial(ops.segment_reduce, reduce="min", ties="winner"), [FLAT]),
    "weighted max": (
        lambda x, index: ops.segment_reduce(x, index, torch.linspace(-1, 1, NUM_EDGES).to(x)),
        [FLAT],
    ),
    "gatv2": (ops.gatv2, [NODES, NODES, (1, HEADS, CHANNELS)]),
    "gatv2 with edges": (
        lambda src, dst, att, edge, weight, index: ops.gatv2(
            src, dst, att, index, edge=edge, weight_edge=weight, **DROPOUT
        ),
        [NODES, NODES, (1, HEADS, CHANNELS), OF_EDGES, (HEADS, EDGE_DIM, CHANNELS)],
    ),
    "gat": (ops.gat, [NODES, SCORES, SCORES]),
    "gat with edges": (
        lambda x, src, dst, edge, index: ops.gat(x, src, dst, index, score_edge=edge, **DROPOUT),
        [NODES, SCORES, SCORES, (NUM_EDGES, HEADS)],
    ),
    "attention": (ops.attention, [NODES, NODES, NODES]),
    "attention with edges": (
        lambda query, key, value, edge, index: ops.attention(
            query, key, value, index, edge=edge, **DROPOUT
        ),
        [WIDER, NODES, NODES, OF_EDGES],
    ),
}

# Their gradient goes along destinations, too, in ascending order.
MAXIMA = ("max", "winner", "weighted max")


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", OPERATORS)
def test_results_have_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    operator, shapes = OPERATORS[name]
    index = communities_and_a_hub()
    inputs = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    if name in MAXIMA:  # ties, also with the zero that maxima start from
        inputs[0] = (inputs[0].detach() * 2).round().relu().requires_grad_()

    def results() -> list[Tensor]:
        outputs = operator(*inputs, index)
        outputs = [o for o in outputs if o is not None] if isinstance(outputs, tuple) else [outputs]
        loss = sum((o * torch.linspace(-1, 1, o.numel()).view(o.shape)).sum() for o in outputs)
        return [*outputs, *torch.autograd.grad(loss, inputs)]

    first = results()
    monkeypatch.setattr("fastgraph.tune.row_order.USES_BEFORE_ORDERING", 1)
    last = results()
    graph = graph_of(index, None, NUM_NODES, NUM_NODES)
    if name in ("max", "winner"):  # no weights are numbered, so that their edges are anew
        graph = beside(graph, "renumbered", pytest.fail)
    ordered = beside(graph, "row_order", pytest.fail).ordered
    # By destination, and by source where the gradient is gathered; of sums and of attention each.
    assert {transpose for transpose, _ in ordered} == ({False} if name in MAXIMA else {False, True})
    assert len(ordered) == (2 if name in MAXIMA else 4)
    assert all(rows.order is not None for rows in ordered.values())
    for before, after in zip(first, last, strict=True):
        assert torch.equal(before, after)
