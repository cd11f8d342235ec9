"""PyG's classes in their usual configurations, those of the page on layers: what upstream computes.

Equal to rounding where calls are routed, bit for bit where they are left to upstream.
"""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

import fastgraph
from tests.ab import Arguments, arguments
from tests.cuda.benchmarks import measure
from tests.graphs import quantised, random_edges
from tests.outcomes import Outcome, difference, outcome

given, graphs = measure("given"), measure("graphs")
usual, others = measure("pyg_usual"), measure("pyg_usual_others")

CHANNELS, NODES, TARGETS = 8, 30, 20

CONVS: dict[str, Any] = usual.CONVS
ALL: dict[str, Any] = {**CONVS, **others.AGGREGATIONS, **others.POOLING, **others.MODELS}

# Upstream multiplies by tensors that are float32, whatever is given.
SINGLE = ("ASAPooling", "ClusterPooling", "SGFormer")

# The features of self-loops are means that upstream's code computes, whose gradients it gets wrong
# for numbers of 32 bits.
MEANS_BY_UPSTREAM = ("GATConv, edges", "GATv2Conv, edges")

# Duplicates and self-loops among 25 nodes, five that have no edge.
EDGES = random_edges(25, 25, 120)
BIPARTITE = torch.stack([EDGES[0], EDGES[1] % 15])


class Calling(nn.Module):
    """A layer that is called with features by their names."""

    def __init__(self, layer: nn.Module, call: Any, made: Any) -> None:
        super().__init__()
        self.layer, self._call, self._made = layer, call, made

    def forward(self, index: torch.dtype, **leaves: Tensor) -> Any:
        # Some draw edges that are not there, or visit nodes in an order of their own.
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        return self._call(self.layer, self._made(lambda shape, name: leaves[name], index))


def calling(name: str, edges: Tensor, num_targets: int | None = None) -> tuple[Calling, Arguments]:
    """A configuration as a module in float64, and its arguments: features with ties."""
    config = ALL[name]
    dtype = torch.float32 if name in SINGLE else torch.float64

    def made(values: Any, index: torch.dtype = torch.int64) -> Any:
        data = graphs.GraphData("test", edges, NODES)
        return given.Given(data, CHANNELS, num_targets=num_targets, values=values, index=index)

    first = made(lambda shape, name: quantised(*shape, seed=len(name), dtype=dtype))
    try:
        config.call(config.build(first).to(dtype), first)  # makes the features that it takes
    except ImportError as error:
        pytest.skip(str(error))
    torch.manual_seed(0)
    layer = config.build(first).to(dtype)
    return Calling(layer, config.call, made), arguments(torch.int64, **first.leaves)


def both(module: nn.Module, call: Arguments) -> tuple[Outcome, Outcome, bool]:
    """How a call ends upstream and under fastgraph, and true if anything of it was routed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        upstream = outcome(module, call)
        with fastgraph.enabled(min_edges=0):
            ours = outcome(module, call)
    return upstream, ours, any(row.routed for row in fastgraph.status().rows)


def identical(upstream: Outcome, ours: Outcome) -> bool:
    pairs = list(zip(upstream.results, ours.results, strict=True))
    return upstream[:2] == ours[:2] and all(
        a is b or (a is not None and b is not None and torch.equal(a.nan_to_num(), b.nan_to_num()))
        for a, b in pairs
    )


def agree(module: nn.Module, call: Arguments) -> None:
    """Equal to rounding where anything was routed, else bit for bit."""
    upstream, ours, routed = both(module, call)
    assert upstream.step == "end", upstream
    assert difference(upstream, ours) is None
    assert routed or identical(upstream, ours)


@pytest.mark.parametrize("name", ALL)
def test_outputs_and_gradients_are_upstreams(name: str) -> None:
    agree(*calling(name, EDGES))


@pytest.mark.parametrize(
    "name", [name for name, one in CONVS.items() if one.takes_flow and "," not in name]
)
def test_edges_that_are_followed_backwards(name: str) -> None:
    module, call = calling(name, EDGES)
    for layer in module.modules():
        if isinstance(layer, MessagePassing):
            layer.flow = "target_to_source"
    upstream, ours, routed = both(module, call)
    assert difference(upstream, ours) is None
    assert routed or identical(upstream, ours)


@pytest.mark.parametrize("name", [name for name, one in CONVS.items() if one.takes_pair])
def test_two_kinds_of_nodes(name: str) -> None:
    agree(*calling(name, BIPARTITE, TARGETS))


@pytest.mark.repeats  # kernels are given the same graph, sorted
@pytest.mark.parametrize("name", CONVS)
def test_numbers_of_32_bits(name: str) -> None:
    """The results are those of 64 bits, where upstream's gradients are wrong, or upstream's."""
    module, (_, leaves) = calling(name, EDGES)
    call = arguments(torch.int32, **leaves)
    upstream, ours, routed = both(module, call)
    if routed:
        right = outcome(module, arguments(torch.int64, **leaves))
        if name in MEANS_BY_UPSTREAM:
            position = len(right.results) - len(list(module.parameters())) - 1
            right.results[position].copy_(upstream.results[position])
        assert difference(right, ours) is None
    else:
        assert identical(upstream, ours)


def test_every_class_is_listed() -> None:
    for listed, elsewhere, module in (
        (usual.CONVS, usual.ELSEWHERE, pyg.conv),
        (others.AGGREGATIONS, others.AGGREGATIONS_ELSEWHERE, pyg.aggr),
    ):
        names = {name.partition(",")[0] for name in listed}
        assert names | set(elsewhere) == set(module.__all__)
