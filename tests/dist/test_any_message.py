"""Layers whose messages are traced, on sharded tensors, beside upstream's on one process."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch_geometric.utils import softmax

import fastgraph.dist as fgd
from fastgraph.dist.ranks.world import WORLD
from tests.dist.graphs import (
    NUM_EDGES,
    NUM_FEATURES,
    NUM_NODES,
    PARTITIONS,
    graph,
    one_has_a_single_node,
)
from tests.dist.test_fused import (
    REVERSED,
    Case,
    Found,
    assert_as_expected,
    bipartite,
    compared,
    featured,
    in_layouts,
    mlp,
    of_replicated_edges,
    of_replicated_features,
    of_some_edges,
    pair,
    plain,
    shards,
    tied,
    weighted,
    with_table,
)

D, C = NUM_FEATURES, 3


class Own(gnn.MessagePassing):
    """A user's layer of features of nodes."""

    def __init__(self, aggr: str = "sum", **options: Any) -> None:
        super().__init__(aggr=aggr, **options)
        self.lin = nn.Linear(2 * D, D)
        self.factor = nn.Parameter(torch.randn(D))
        self.slope = 0.2

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)


class OfEdges(Own):
    """A layer of features of edges, too, and of a parameter that it hands over."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, edge_attr=edge_attr, scale=self.factor)


class OfEdgesAlone(Own):
    """A layer that adds up features of edges."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        size = x.shape[0], x.shape[0]
        return self.propagate(edge_index, edge_attr=edge_attr, size=size)


class Updating(Own):
    """A layer that adds its own features after the aggregation."""

    def update(self, inputs: Tensor, own: Tensor) -> Tensor:
        return inputs.tanh() + own

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, own=x)


def own(message: Callable[..., Tensor], *args: Any, base: Any = Own, **options: Any) -> Any:
    """Makes layers of one class, whose name PyG knows its template by."""
    kind = type(f"Of{next(_NUMBERS)}", (base,), {"message": message, "__module__": __name__})
    message.__name__ = "message"
    return lambda: kind(*args, **options)


_NUMBERS = itertools.count()


def gated(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    gate = torch.sigmoid(self.lin(torch.cat([x_i, x_j], dim=-1)))
    return gate * self.factor * nn.functional.leaky_relu(x_j, 0.2)


def in_heads(self: Any, x_i: Tensor, x_j: Tensor, edge_attr: Tensor, scale: Tensor) -> Tensor:
    """Two heads, each with a factor of its own: operands are reshaped, summed and expanded."""
    y_i, y_j = x_i.view(-1, 2, 4), x_j.view(-1, 2, 4)
    score = (y_i * y_j).sum(-1, keepdim=True).tanh()
    return (score * y_j * edge_attr[:, :2].unsqueeze(-1)).flatten(1) * scale


def of_channels(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    """Operations along channels, which are done for each node before the program."""
    y_i = torch.cat([x_i[:, 2:], x_i[:, 0:1], x_i.norm(dim=1, keepdim=True)], -1).softmax(-1)
    y_j = x_j.view(-1, 4, 2).select(1, 1).amax(-1, keepdim=True)
    return y_i * y_j + x_j.sum(-1, keepdim=True)


def masked(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    return torch.where(x_j > 0.1, x_i * x_j, (x_i - x_j).abs()).masked_fill(x_i < -0.5, 0.25)


def of_edges(self: Any, edge_attr: Tensor, x_i: Tensor, scale: Tensor) -> Tensor:
    return edge_attr.exp() * x_i[:, :1] * scale[:3]


def of_edges_alone(self: Any, edge_attr: Tensor) -> Tensor:
    return edge_attr.exp().sin()


def edges_of_pair(layer: Any, d: Any) -> Tensor:
    edges = d["author", "paper"]
    inputs = d["author"].x[:, :4], d["paper"].x
    return layer(inputs, edges.edge_index, edges.edge_attr)


def edited_between_passes(layer: Any, d: Any) -> Tensor:
    """Upstream gathers features first, so that their owner may edit them before a gradient."""
    x = d.x * 2
    out = layer(x, d.edge_index)
    x.mul_(0.5)
    return out + x


def with_edited_edges(layer: Any, d: Any) -> Tensor:
    """The edges are others at the second call."""
    edges = d.edge_index.clone()
    with torch.no_grad():
        before = layer(d.x, edges)
    edges[0] = edges[1].clone()
    return before + layer(d.x, edges).sin()


def by_slope(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    return nn.functional.leaky_relu(x_i + x_j, self.slope)


def dropped(self: Any, x_j: Tensor) -> Tensor:
    return nn.functional.dropout(x_j, 0.5, self.training)


def product(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    return x_i * x_j


def attending(self: Any, x_i: Tensor, x_j: Tensor, index: Tensor, size_i: Any) -> Tensor:
    """Two heads, whose results have a dimension of their own."""
    y_i, y_j = x_i.view(-1, 2, 4), x_j.view(-1, 2, 4)
    alpha = softmax(nn.functional.leaky_relu((y_i * y_j).sum(-1), 0.2), index, None, size_i)
    return y_j * alpha.unsqueeze(-1)


def edited_result(layer: Any, d: Any) -> Tensor:
    """Upstream needs no result of a sum for its gradient, so that its owner may edit it."""
    out = layer(d.x, d.edge_index)
    out += 1
    return out.sin()


def with_other_slope(layer: Any, d: Any) -> Tensor:
    """The message is another one once the layer is changed."""
    before = layer(d.x, d.edge_index)
    layer.slope = 0.5
    found = before * layer(d.x, d.edge_index)
    layer.slope = 0.2
    return found


def twice(layer: Any, d: Any) -> Tensor:
    """Gradients of a replicated parameter from two calls."""
    return layer(layer(d.x, d.edge_index).tanh(), d.edge_index)


def summed_together(layer: Any, d: Any) -> Tensor:
    """The gradients of the parts of a split linear map are summed with those of all parameters."""
    loss = plain(layer, d).square().sum()
    before = fgd.COUNTS.calls["all_reduce"]
    loss.backward()
    if WORLD.size > 1:
        assert fgd.COUNTS.calls["all_reduce"] - before == int(fgd.is_sharded(d.x))
    return plain(layer, d)


def two_maps() -> nn.Module:
    return nn.Sequential(nn.Linear(2 * D, C), nn.ReLU(), nn.Linear(C, C))


def one_linear_map() -> nn.Module:
    return nn.Sequential(nn.Linear(2 * D, C))


def profiled_on_one_rank(layer: Any, d: Any) -> Tensor:
    """The first rank has a profiler, and traces the message all the same."""
    if WORLD.rank == 0:
        sys.setprofile(lambda *_: None)
    try:
        return plain(layer, d)
    finally:
        sys.setprofile(None)


def edge_network(channels: int = D) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, channels * C))


def kinds_of(edges: Any, count: int = 2) -> Tensor:
    """Types of edges, the same tensor at each call."""
    if "kinds" not in edges:
        edges.kinds = (edges.edge_attr[:, 0].detach() * count).long()
    found: Tensor = edges.kinds
    return found


def with_kinds(layer: Any, d: Any) -> Tensor:
    return layer(d.x, d.edge_index, kinds_of(d))


def kinds_of_pair(layer: Any, d: Any) -> Tensor:
    edges = d["author", "paper"]
    return layer((d["author"].x, d["paper"].x), edges.edge_index, kinds_of(edges, 3))


def with_kinds_from_the_end(layer: Any, d: Any) -> Tensor:
    """Upstream takes negative types for those; one rank alone may have some."""
    return layer(d.x, d.edge_index, kinds_of(d) * (torch.arange(NUM_EDGES) < 5) * -1)


def with_replicated_kinds(layer: Any, d: Any) -> Tensor:
    return layer(d.x, d.edge_index, torch.arange(d.edge_index.shape[1]) % 2)


def with_edited_kinds(layer: Any, d: Any) -> Tensor:
    """The types are others at the second call."""
    kinds = kinds_of(d).clone()
    with torch.no_grad():
        before = layer(d.x, d.edge_index, kinds)
    kinds.mul_(-1).add_(1)
    return before + layer(d.x, d.edge_index, kinds).sin()


def with_table_of_kinds(layer: Any, d: Any) -> Tensor:
    return layer(layer.table, d.edge_index, kinds_of(d))


class OfTypes(Own):
    """A layer with a matrix for each type of edges."""

    def __init__(self, aggr: str = "sum", **options: Any) -> None:
        super().__init__(aggr=aggr, **options)
        self.matrices = nn.Parameter(torch.randn(2, D, D))
        self.table = nn.Parameter(torch.randn(NUM_NODES, D))

    def forward(self, x: Tensor, edge_index: Tensor, kinds: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, kinds=kinds)


class WithMaps(OfEdges):
    """A layer with maps of few features of edges to many channels."""

    def __init__(self, aggr: str = "sum") -> None:
        super().__init__(aggr)
        self.maps = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2 * D))
        self.other = nn.Linear(3, 2 * D, bias=False)


def mapped(self: Any, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
    """Maps that follow each other, whose matrices are multiplied, and one beside them."""
    factor = self.maps(edge_attr) + self.other(edge_attr).tanh()
    return factor * torch.cat([x_j, x_j], -1) * x_i[:, :1]


def rare_kinds(layer: Any, d: Any) -> Tensor:
    """One edge alone has a type that ranks but one lack, and no edge has some of the types."""
    if "rare" not in d:
        first = d.edge_attr[:, 0].detach()
        d.rare = (first == first.max()).long() * 3 + 2
    return layer(d.x, d.edge_index, d.rare)


class OfSevenTypes(OfTypes):
    """The same with more types than edges have."""

    def __init__(self, aggr: str = "sum") -> None:
        super().__init__(aggr)
        self.matrices = nn.Parameter(torch.randn(7, D, D))


def of_both_by_type(self: Any, x_i: Tensor, x_j: Tensor, kinds: Tensor) -> Tensor:
    matrix = self.matrices[kinds]
    of_row = torch.bmm(x_i.unsqueeze(1), matrix).squeeze(1)
    return torch.bmm(x_j.unsqueeze(1), matrix).squeeze(1) * of_row


def of_types(self: Any, x_i: Tensor, x_j: Tensor, kinds: Tensor) -> Tensor:
    return torch.bmm(x_j.unsqueeze(1), self.matrices[kinds]).squeeze(1) * x_i.sigmoid()


def rows_of_types(self: Any, x_i: Tensor, x_j: Tensor, kinds: Tensor) -> Tensor:
    return torch.bmm(x_i.unsqueeze(1), self.matrices[kinds]).squeeze(1) * x_j


def leaving(self: Any, x_i: Tensor, x_j: Tensor, index: Tensor) -> Tensor:
    weights = softmax((x_i * x_j).view(-1, 2, 4).sum(-1), index)
    self.weights = weights
    return (weights.unsqueeze(-1) * x_j.view(-1, 2, 4)).view(-1, 8)


def leaving_weights(layer: Any, d: Any) -> Tensor:
    """Values that the message leaves are of all edges, as on one process."""
    layer.weights = None
    out = layer(d.x, d.edge_index)
    return out + layer.weights.square().sum()


DEGREES = torch.ones(20, dtype=torch.long)

CASES = {
    "ResGated": Case(lambda: gnn.ResGatedGraphConv(D, C), plain),
    "ResGated, features": Case(lambda: gnn.ResGatedGraphConv(D, C, edge_dim=3), featured),
    "ResGated, pair": Case(lambda: gnn.ResGatedGraphConv((5, 4), C), pair),
    "ResGated, replicated edges": Case(lambda: gnn.ResGatedGraphConv(D, C), of_replicated_edges),
    "ResGated, replicated features": Case(
        lambda: with_table(gnn.ResGatedGraphConv(D, C)), of_replicated_features
    ),
    "ResGated, some edges": Case(lambda: gnn.ResGatedGraphConv(D, C), of_some_edges),
    "ResGated, edited edges": Case(lambda: gnn.ResGatedGraphConv(D, C), with_edited_edges, 2),
    "GINE": Case(lambda: gnn.GINEConv(mlp(), train_eps=True, edge_dim=3), featured),
    "GINE, pair": Case(lambda: gnn.GINEConv(nn.Linear(4, C), edge_dim=3), edges_of_pair),
    "CG": Case(lambda: gnn.CGConv(D, 3), featured),
    "CG, max": Case(lambda: gnn.CGConv(D, aggr="max"), plain),
    "GEN, max": Case(lambda: gnn.GENConv(D, C, aggr="max", edge_dim=3), featured),
    "GEN, softmax": Case(lambda: gnn.GENConv(D, C, learn_t=True, edge_dim=3), featured),
    "GEN, powermean": Case(lambda: gnn.GENConv(D, C, aggr="powermean", p=2.0), plain),
    "AGNN": Case(lambda: gnn.AGNNConv(add_self_loops=False), plain),
    "General, attention": Case(lambda: gnn.GeneralConv(D, C, attention=True, heads=2), plain),
    "own, attending": Case(own(attending, node_dim=0), edited_result),
    "NN": Case(lambda: gnn.NNConv(D, C, edge_network()), featured),
    "NN, pair": Case(lambda: gnn.NNConv((4, 4), C, edge_network(4), aggr="mean"), edges_of_pair),
    "EG": Case(lambda: gnn.EGConv(D, 4, ["symnorm", "max", "std"], num_heads=2), plain),
    "FastRGCN": Case(lambda: gnn.FastRGCNConv(D, C, 2), with_kinds),
    "FastRGCN, sum": Case(lambda: gnn.FastRGCNConv(D, C, 2, aggr="sum"), with_kinds),
    "FastRGCN, pair": Case(lambda: gnn.FastRGCNConv((5, 4), C, 3, num_bases=2), kinds_of_pair),
    "RGAT": Case(lambda: gnn.RGATConv(D, C, 2), with_kinds),
    "own, of types from the end": Case(
        own(of_types, base=OfTypes), with_kinds_from_the_end, 0, "outside the nodes"
    ),
    "own, of types": Case(own(of_types, "max", base=OfTypes), with_kinds),
    "own, of types, reversed": Case(own(of_types, base=OfTypes, flow=REVERSED), with_kinds),
    "own, of rows by type": Case(own(rows_of_types, base=OfTypes), with_kinds),
    "own, of types, replicated": Case(own(of_types, base=OfTypes), with_replicated_kinds),
    "own, of rare types": Case(own(of_both_by_type, "mean", base=OfSevenTypes), rare_kinds),
    "RGAT, rare types": Case(lambda: gnn.RGATConv(D, 4, 7, heads=2), rare_kinds),
    "own, maps of features": Case(own(mapped, "max", base=WithMaps), featured),
    "ResGated, maps of features": Case(lambda: gnn.ResGatedGraphConv(D, 16, edge_dim=3), featured),
    "own, of types, edited": Case(own(of_types, base=OfTypes), with_edited_kinds, 2),
    "own, of a table by type": Case(own(of_types, base=OfTypes), with_table_of_kinds),
    "own, leaving attention": Case(own(leaving), leaving_weights),
    "GMM": Case(lambda: gnn.GMMConv(D, C, dim=3, kernel_size=2), featured),
    "FiLM": Case(lambda: gnn.FiLMConv(D, C), plain),
    "LE": Case(lambda: gnn.LEConv(D, C), weighted),
    "General": Case(lambda: gnn.GeneralConv(D, C, in_edge_channels=3), featured),
    "EdgeConv, one linear map": Case(lambda: gnn.EdgeConv(one_linear_map()), plain),
    "own, gated": Case(own(gated), plain),
    "own, gated, twice": Case(own(gated), twice, 2),
    "own, gradients summed together": Case(own(gated), summed_together, 2),
    "own, gated, mean": Case(own(gated, "mean"), plain),
    "own, gated, max": Case(own(gated, "max"), plain),
    "own, gated, reversed": Case(own(gated, flow=REVERSED), plain),
    "own, edited between passes": Case(own(gated), edited_between_passes),
    "own, in heads": Case(own(in_heads, base=OfEdges), featured),
    "own, of channels": Case(own(of_channels), plain),
    "own, masked": Case(own(masked), plain),
    "own, min with ties": Case(own(masked, "min"), tied),
    "own, max with ties": Case(own(product, "max"), tied),
    "own, of edges": Case(own(of_edges, "max", base=OfEdges), featured),
    "own, of edges alone": Case(own(of_edges_alone, "mean", base=OfEdgesAlone), featured),
    "own, another slope": Case(own(by_slope), with_other_slope, 2),
    "own, profiled on one rank": Case(own(gated), profiled_on_one_rank),
    "own, with an update": Case(own(gated, base=Updating), plain),
    "own, several aggregations": Case(own(gated, ["mean", "std", "max", "sum"]), plain),
    "PNA": Case(lambda: gnn.PNAConv(D, D, ["mean", "max", "std"], ["identity"], DEGREES), plain),
    "PNA, towers": Case(
        lambda: gnn.PNAConv(D, D, ["mean", "var"], ["identity"], DEGREES, edge_dim=3, towers=2),
        featured,
    ),
    "EdgeConv, two layers": Case(lambda: gnn.EdgeConv(two_maps()), plain),
    "EdgeConv, two layers, mean": Case(lambda: gnn.EdgeConv(two_maps(), aggr="mean"), plain),
    "own, random": Case(own(dropped), plain, 0, "draws random numbers"),
}


# What meets every layout: each kind of operand and of reduction. With --exhaustive all do.
IN_ALL_LAYOUTS = {
    *("ResGated, features", "ResGated, pair", "ResGated, replicated features", "GINE, pair"),
    *("CG, max", "own, gated", "own, gated, reversed", "own, edited between passes"),
    *("own, in heads", "own, of channels", "own, min with ties", "own, of edges alone"),
    *("own, with an update", "EdgeConv, two layers", "GEN, softmax", "own, attending"),
    *("own, of rare types", "own, maps of features"),
    *("FastRGCN, pair", "own, of types", "own, of rows by type", "own, of types, replicated"),
}

LAYOUTS = {**PARTITIONS, "one has a single node": one_has_a_single_node}

# Cases that make new edges for each call, which have to be planned each time.
PLANNED_EACH_TIME = {
    "ResGated, replicated edges",
    "ResGated, some edges",
    "ResGated, edited edges",
    "own, of types, replicated",
    "own, of types, edited",
}


def cases_in(layout: str, exhaustive: bool) -> dict[str, Case]:
    everything = layout == "uneven" or exhaustive
    return {name: case for name, case in CASES.items() if everything or name in IN_ALL_LAYOUTS}


def compare_on_this_rank(exhaustive: bool) -> dict[str, Found]:
    torch.set_default_dtype(torch.float64)
    WORLD.random = "exact"
    found = {}
    for layout, parts in LAYOUTS.items():
        shard = shards(parts(WORLD.size), mode="halo")
        for name, case in cases_in(layout, exhaustive).items():
            make = bipartite if "pair" in name else graph
            found[f"{name}, {layout}"] = compared(case, make, shard)
    return found


@pytest.fixture(scope="module")
def found(
    world_size: int, once_on_ranks: Any, pytestconfig: pytest.Config
) -> list[dict[str, Found]]:
    exhaustive = pytestconfig.getoption("--exhaustive")
    found: list[dict[str, Found]] = once_on_ranks(compare_on_this_rank, world_size, exhaustive)
    return found


@in_layouts(LAYOUTS, CASES, cases_in)
def test_programs_of_layers(found: list[dict[str, Found]], name: str, layout: str) -> None:
    results = [of_rank[f"{name}, {layout}"] for of_rank in found]
    assert_as_expected(results, CASES[name], is_planned_again=name in PLANNED_EACH_TIME)
