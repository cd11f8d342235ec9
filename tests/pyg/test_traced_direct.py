"""Calls of edge programs past torch's dispatcher: only where it would do nothing else."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

import fastgraph
from fastgraph import ops
from fastgraph.edge_programs.traced import Reduction
from fastgraph.graphs.edges import KnownGraph, graph_of
from fastgraph.pyg.aggregations import squares
from tests.pyg.traced_layers import EDGES, NODES, x64

pytestmark = pytest.mark.usefixtures("nothing_known")


def test_a_profiler_lists_the_operator_in_each_pass() -> None:
    layer = pyg.ResGatedGraphConv(3, 3).double()
    x = x64(NODES, 3).requires_grad_()
    with fastgraph.enabled(min_edges=0):
        layer(x, EDGES).sum().backward()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            layer(x, EDGES).sum().backward()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["fastgraph::edge_program"] == 3  # of which two are of the gradient


def test_features_and_gradients_that_torch_negates_later() -> None:
    layer = pyg.GINEConv(nn.Identity()).double()
    of_edges = x64(EDGES.shape[1], 3)
    x = torch._neg_view(x64(NODES, 3)).requires_grad_()
    assert x.is_neg()
    grad = torch._neg_view(x64(NODES, 3))

    def run() -> list[Tensor]:
        out = layer(x, EDGES, of_edges)
        return [out, *torch.autograd.grad(out, [x], grad)]

    expected = run()
    with fastgraph.enabled(min_edges=0, strict=True):
        for _ in range(2):
            for found, plain in zip(run(), expected, strict=True):
                torch.testing.assert_close(found, plain)


def test_operands_of_a_known_graph_are_looked_at_by_the_kernel() -> None:
    known = KnownGraph(graph_of(EDGES, None, NODES, NODES), EDGES)
    program = "x = gathered 3\nsum x"
    sizes = {"num_in": NODES, "num_out": NODES}
    x = torch.randn(NODES, 4)[:, :3]

    def run(x: Tensor, index: Tensor = EDGES) -> Tensor:
        return ops.edge_program(program, {"x": x}, index, **sizes)[0]

    assert torch.equal(known.while_computing(run, x), run(x, EDGES.clone()))
    with pytest.raises(ValueError, match="operands"):
        known.while_computing(run, x[1:])


@pytest.mark.parametrize("again", [copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))])
def test_reductions_are_equal_by_their_parts(again: object) -> None:
    reduction = Reduction("mean", squares)
    hash(reduction)
    made = again(reduction)  # type: ignore[operator]
    assert made == reduction and hash(made) == hash(reduction)
    assert reduction != Reduction("mean")
