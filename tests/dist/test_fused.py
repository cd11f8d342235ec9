"""Layers that compute by fused operators on sharded tensors, beside upstream's on one process."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch_geometric.data import HeteroData

import fastgraph
import fastgraph.dist as fgd
from fastgraph import ops
from fastgraph.dist.operators.halo import exchange as overlap
from fastgraph.dist.operators.halo import graph as halves
from fastgraph.dist.ranks.world import WORLD
from tests.dist.comparing import deviation
from tests.dist.graphs import NUM_EDGES, NUM_FEATURES, NUM_NODES, PARTITIONS, graph

# Of the largest value of a result or gradient: sums are taken in another order.
TOLERANCE = 1e-12

D, H, C = NUM_FEATURES, 2, 3
NUM_OTHERS = 23


class Case(NamedTuple):
    """A layer and a call of it.

    Attributes:
        make: the layer.
        call: what is compared; takes the layer and a graph.
        routed: how many calls of the layer take their route; 0 where ``reason`` says why not.
        reason: a part of it.
        label: under which calls are counted; default: the class of the layer.
    """

    make: Callable[[], nn.Module]
    call: Callable[[Any, Any], Tensor]
    routed: int = 1
    reason: str = ""
    label: str = ""


def plain(layer: Any, d: Any) -> Tensor:
    return layer(d.x, d.edge_index)


def weighted(layer: Any, d: Any) -> Tensor:
    return layer(d.x, d.edge_index, d.edge_weight)


def featured(layer: Any, d: Any) -> Tensor:
    return layer(d.x, d.edge_index, d.edge_attr)


def with_learned_weight(layer: Any, d: Any) -> Tensor:
    return layer(d.x, d.edge_index, (d.edge_attr * layer.factors).sum(-1))


def tied(layer: Any, d: Any) -> Tensor:
    """Many features are equal, and many maxima are 0."""
    return layer((d.x * 1.5).round().relu() * d.x.detach().abs().ceil().clamp(max=1), d.edge_index)


def pair(layer: Any, d: Any, *of_edges: str) -> Tensor:
    edges = d["author", "paper"]
    inputs = d["author"].x, d["paper"].x
    return layer(inputs, edges.edge_index, *(edges[name] for name in of_edges))


def attention_weights(layer: Any, d: Any) -> Tensor:
    out, (_, alpha) = layer(d.x, d.edge_index, return_attention_weights=True)
    return torch.cat([out.flatten(), alpha.flatten()])


def of_some_edges(layer: Any, d: Any) -> Tensor:
    return layer(d.x, d.edge_index[:, d.edge_weight > 0.4])


def of_replicated_edges(layer: Any, d: Any) -> Tensor:
    return layer(d.x, fgd.whole(d.edge_index))


def of_replicated_features(layer: Any, d: Any) -> Tensor:
    return layer(layer.table, d.edge_index)


def of_matrix(layer: Any, d: Any) -> Tensor:
    edges, shape = fgd.whole(d.edge_index).flip(0), (NUM_NODES, NUM_NODES)
    matrix = torch.sparse_coo_tensor(edges, torch.ones(NUM_EDGES), shape)
    return layer(d.x, matrix.to_sparse_csr())


def with_table(layer: nn.Module) -> nn.Module:
    layer.table = nn.Parameter(torch.randn(NUM_NODES, D))
    return layer


def with_factors(layer: nn.Module) -> nn.Module:
    layer.factors = nn.Parameter(torch.rand(3))
    return layer


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(D, C), nn.ReLU(), nn.Linear(C, C))


def gat(**options: Any) -> Callable[[], nn.Module]:
    return lambda: gnn.GATConv(D, C, heads=H, **options)


def gatv2(**options: Any) -> Callable[[], nn.Module]:
    return lambda: gnn.GATv2Conv(D, C, heads=H, **options)


def transformer(**options: Any) -> Callable[[], nn.Module]:
    return lambda: gnn.TransformerConv(D, C, heads=H, **options)


REVERSED = "target_to_source"

CASES = {
    "GCN": Case(lambda: gnn.GCNConv(D, C), plain),
    "GCN, weights": Case(lambda: gnn.GCNConv(D, C), weighted),
    "GCN, improved": Case(lambda: gnn.GCNConv(D, C, improved=True), weighted),
    "GCN, no loops": Case(lambda: gnn.GCNConv(D, C, add_self_loops=False), weighted),
    "GCN, not normalised": Case(
        lambda: gnn.GCNConv(D, C, normalize=False, add_self_loops=False), weighted
    ),
    "GCN, cached": Case(lambda: gnn.GCNConv(D, C, cached=True), plain),
    "GCN, learned weights": Case(lambda: with_factors(gnn.GCNConv(D, C)), with_learned_weight),
    "GCN, reversed": Case(lambda: gnn.GCNConv(D, C, flow=REVERSED), weighted),
    "GCN, some edges": Case(lambda: gnn.GCNConv(D, C), of_some_edges),
    "GCN, replicated edges": Case(lambda: gnn.GCNConv(D, C), of_replicated_edges),
    "GCN, replicated features": Case(lambda: with_table(gnn.GCNConv(D, C)), of_replicated_features),
    "SAGE": Case(lambda: gnn.SAGEConv(D, C), plain),
    "SAGE, sum": Case(lambda: gnn.SAGEConv(D, C, "sum", normalize=True), plain),
    "SAGE, max": Case(lambda: gnn.SAGEConv(D, C, "max", project=True), plain),
    "SAGE, max with ties": Case(lambda: gnn.SAGEConv(D, C, "max"), tied),
    "SAGE, min with ties": Case(lambda: gnn.SAGEConv(D, C, "min"), tied),
    "SAGE, pair": Case(lambda: gnn.SAGEConv((5, 4), C), pair),
    "SAGE, pair, max": Case(lambda: gnn.SAGEConv((5, 4), C, "max"), pair),
    "SAGE, reversed": Case(lambda: gnn.SAGEConv(D, C, flow=REVERSED), plain),
    "SAGE, max, reversed": Case(lambda: gnn.SAGEConv(D, C, "max", flow=REVERSED), tied),
    "SAGE, replicated features": Case(
        lambda: with_table(gnn.SAGEConv(D, C)), of_replicated_features
    ),
    "GraphConv": Case(lambda: gnn.GraphConv(D, C), weighted),
    "GraphConv, mean": Case(lambda: gnn.GraphConv(D, C, "mean"), weighted),
    "GraphConv, learned weights": Case(
        lambda: with_factors(gnn.GraphConv(D, C)), with_learned_weight
    ),
    "GraphConv, pair": Case(
        lambda: gnn.GraphConv((5, 4), C), lambda m, d: pair(m, d, "edge_weight")
    ),
    "GIN": Case(lambda: gnn.GINConv(mlp(), train_eps=True), plain),
    "TAG": Case(lambda: gnn.TAGConv(D, C), weighted, 3),
    "SG": Case(lambda: gnn.SGConv(D, C, K=2), weighted, 2),
    "SSG": Case(lambda: gnn.SSGConv(D, C, alpha=0.1, K=2), weighted, 2),
    "APPNP": Case(lambda: gnn.APPNP(3, 0.1), weighted, 3),
    "ARMA": Case(lambda: gnn.ARMAConv(D, C), weighted),
    "Cheb": Case(lambda: gnn.ChebConv(D, C, 3), weighted, 2),
    "LG": Case(gnn.LGConv, weighted),
    "GCN2": Case(lambda: gnn.GCN2Conv(D, 0.1), lambda m, d: m(d.x, d.x, d.edge_index)),
    "Cluster": Case(lambda: gnn.ClusterGCNConv(D, C), plain),
    "MixHop": Case(lambda: gnn.MixHopConv(D, C), weighted, 2),
    "GAT": Case(gat(), plain),
    "GAT, mean of heads": Case(gat(concat=False, residual=True), plain),
    "GAT, no loops": Case(gat(add_self_loops=False, bias=False), plain),
    "GAT, features": Case(gat(edge_dim=3), featured),
    "GAT, weights": Case(gat(), attention_weights),
    "GAT, some edges": Case(gat(), of_some_edges),
    "GAT, replicated edges": Case(gat(), of_replicated_edges),
    "GAT, pair": Case(lambda: gnn.GATConv((5, 4), C, H), pair),
    "GAT, pair, features": Case(
        lambda: gnn.GATConv((5, 4), C, H, edge_dim=3, add_self_loops=False),
        lambda m, d: pair(m, d, "edge_attr"),
    ),
    "GAT, dropout": Case(gat(dropout=0.3), plain),
    "GAT, dropout, no loops": Case(gat(dropout=0.3, add_self_loops=False), plain),
    "GAT, dropout, features": Case(gat(dropout=0.6, edge_dim=3, residual=True), featured),
    "GAT, dropout, weights": Case(gat(dropout=0.3), attention_weights),
    "GAT, dropout, pair": Case(lambda: gnn.GATConv((5, 4), C, H, dropout=0.3), pair),
    "GAT, all dropped": Case(gat(dropout=1.0), plain),
    "GAT, dropout in evaluation": Case(lambda: gat(dropout=0.3)().eval(), plain),
    "GAT, reversed": Case(gat(flow=REVERSED), plain, 0, "flow target_to_source"),
    "GATv2": Case(gatv2(), plain),
    "GATv2, shared": Case(gatv2(share_weights=True, concat=False), plain),
    "GATv2, features": Case(gatv2(edge_dim=3, residual=True), featured),
    "GATv2, weights": Case(gatv2(), attention_weights),
    "GATv2, dropout": Case(gatv2(dropout=0.3, edge_dim=3), featured),
    "GATv2, pair": Case(lambda: gnn.GATv2Conv((5, 4), C, H), pair),
    "GATv2, replicated features": Case(lambda: with_table(gatv2()()), of_replicated_features),
    "Transformer": Case(transformer(), plain),
    "Transformer, gate": Case(transformer(beta=True, concat=False), plain),
    "Transformer, features": Case(transformer(edge_dim=3), featured),
    "Transformer, weights": Case(transformer(root_weight=False), attention_weights),
    "Transformer, dropout": Case(transformer(dropout=0.3), plain),
    "Transformer, dropout, features": Case(
        transformer(dropout=0.3, edge_dim=3), featured, 0, "attention dropout and features"
    ),
    "Transformer, pair": Case(lambda: gnn.TransformerConv((5, 4), C, H), pair),
    "SAGE, matrix": Case(lambda: gnn.SAGEConv(D, C), of_matrix, 0, "x is a ShardedTensor"),
    "GAT, matrix": Case(gat(add_self_loops=False), of_matrix, 0, "beside a sparse"),
    "Super GAT": Case(lambda: gnn.SuperGATConv(D, C).eval(), plain),
    "FeaSt": Case(lambda: gnn.FeaStConv(D, C), plain),
}

# What meets every layout: each operator and kind of edges once. With --exhaustive all do.
IN_ALL_LAYOUTS = {
    *("GCN", "GCN, weights", "GCN, cached", "GCN, learned weights", "GCN, reversed"),
    *("GCN, some edges", "GCN, replicated edges", "GCN, replicated features"),
    *("SAGE", "SAGE, max with ties", "SAGE, pair", "SAGE, pair, max", "SAGE, max, reversed"),
    *("GraphConv, mean", "GIN", "Cluster"),
    *("GAT", "GAT, features", "GAT, weights", "GAT, some edges", "GAT, pair, features"),
    *("GAT, dropout", "GAT, dropout, features", "GAT, pair", "GAT, reversed"),
    *("GATv2", "GATv2, features", "GATv2, dropout", "GATv2, replicated features"),
    *("Transformer", "Transformer, features", "Transformer, weights", "Transformer, dropout"),
    *("SAGE, matrix", "Super GAT", "FeaSt"),
}

# Cases that make new tensors of edges for each call, which have to be planned each time.
PLANNED_EACH_TIME = {
    "GCN, cached",  # by each layer, and each call has a layer of its own
    "GCN, learned weights",
    "GCN, some edges",
    "GCN, replicated edges",
    "GAT, some edges",
    "GAT, replicated edges",
    "FeaSt",
    "Super GAT",
    "Cheb",
    "Cluster",
}

PROGRAM = """
y = row 8
x = gathered 8
w = edge 3
scale = parameter 8
one = parameter 1
t0 = mul x scale
t1 = sigmoid y
t2 = mul t0 t1
t3 = fold w 1
t4 = mul t2 t3
t5 = add t4 one
sum t5
mean t2
max t4
min t4
edge t4
total t5
"""


def programmed(d: Any, transpose: bool = False) -> Tensor:
    """Rows of all reductions, with the means of what has no rows of nodes added."""
    operands = {"y": d.x + 1, "x": d.x, "w": d.edge_attr, "scale": d.x.mean(0), "one": d.x.mean()}
    *rows, edges, total = ops.edge_program(PROGRAM, operands, d.edge_index, transpose=transpose)
    return (
        torch.cat(rows, 1)
        + edges.square().mean()
        + (edges * d.edge_attr[:, :1]).sum(0).mean()
        + total.sin().sum()
    )


OPERATORS: dict[str, Callable[[Any], Tensor]] = {
    "edge_softmax": lambda d: ops.edge_softmax(d.edge_attr, d.edge_index, num_out=NUM_NODES),
    "edge_softmax, transposed": lambda d: ops.edge_softmax(
        d.edge_attr, d.edge_index, num_out=NUM_NODES, transpose=True
    ),
    "edge_program": programmed,
    "edge_program, transposed": lambda d: programmed(d, transpose=True),
    "edge_program, of gathered rows": lambda d: ops.edge_program(
        "x = gathered 8\nmax x", {"x": d.x}, d.edge_index
    )[0],
    "edge_program, of edges": lambda d: ops.edge_program(
        "w = edge 3\nt0 = exp w\nsum t0", {"w": d.edge_attr}, d.edge_index, num_out=NUM_NODES
    )[0],
    "edge_program, replicated rows": lambda d: ops.edge_program(
        "x = gathered 8\nc = row 2\nt0 = fold x 2\nt1 = mul t0 c\nmean t1",
        {"x": d.x, "c": torch.arange(2.0 * NUM_NODES).sin().view(-1, 2)},
        d.edge_index,
    )[0],
    "sddmm": lambda d: ops.sddmm(d.x.view(-1, 2, 4), d.x.view(-1, 2, 4) + 1, d.edge_index),
    "head_scores": lambda d: ops.head_scores(d.x.view(-1, 2, 4), torch.ones(3, 2, 4)),
    "edge_attention": lambda d: ops.edge_attention(
        *(d.x.view(-1, 2, 4) + i for i in range(3)),
        d.edge_index,
        edge=d.edge_attr,
        weight_edge=torch.arange(24.0).view(2, 3, 4).sin(),
    )[0],
    "block_attention": lambda d: ops.block_attention(
        *(d.x.view(-1, 2, 4) + i for i in range(3)),
        d.edge_index,
        bias=d.x.sum(0).view(4, 2),  # so that the gradient of the table is looked at
        bias_index=(4 * d.edge_attr[:, 0].detach()).to(torch.uint8),
    )[0],
    "dense_attention": lambda d: ops.dense_attention(
        *(d.x.view(-1, 2, 4) + i for i in range(3)), torch.tensor([0, 9, 9, NUM_NODES])
    )[0],
    "dense_attention, a table": lambda d: ops.dense_attention(
        *(d.x.view(-1, 2, 4) + i for i in range(3)),
        torch.tensor([0, 9, NUM_NODES]),
        bias=d.x.sum(0).view(4, 2),  # so that the gradient of the table is looked at
        pair_type=(torch.arange(81 + (NUM_NODES - 9) ** 2) % 4).to(torch.uint8),
    )[0],
    "spmm, heads": lambda d: ops.spmm(d.x.view(-1, 2, 4), d.edge_index, d.edge_attr[:, :2]),
    "spmm, an edge outside": lambda d: ops.spmm(d.x, d.edge_index + NUM_NODES - 10),
}


def bipartite() -> HeteroData:
    """Authors without papers, papers without authors, and edges that occur twice."""
    g = torch.Generator().manual_seed(3)
    data = HeteroData()
    data["author"].x = torch.randn(NUM_OTHERS, 5, generator=g)
    data["paper"].x = torch.randn(NUM_NODES, 4, generator=g)
    sources = torch.randint(0, NUM_OTHERS - 3, (NUM_EDGES,), generator=g)
    index = torch.stack([sources, torch.randint(0, NUM_NODES - 5, (NUM_EDGES,), generator=g)])
    index[:, :6] = index[:, 6:12]
    index[1, 12:15] = index[0, 12:15]
    edges = data["author", "writes", "paper"]
    edges.edge_index = index
    edges.edge_attr = torch.rand(NUM_EDGES, 3, generator=g)
    edges.edge_weight = torch.rand(NUM_EDGES, generator=g)
    return data


class Found(NamedTuple):
    """The outcome of a case on this rank.

    Attributes:
        error: how far it is off, or what was raised.
        gathers: what was gathered.
        routed: calls that took their route.
        reasons: why others did not.
        planned_again: exchanges that a second call has planned.
        halo: what was computed while rows of others were travelling.
    """

    error: str
    gathers: dict[str, int]
    routed: int
    reasons: str
    planned_again: int
    halo: dict[str, int]


def outcome(case: Case, data: Any) -> list[Tensor | None]:
    """The result, then the gradients of parameters, and of features of nodes and edges."""
    torch.manual_seed(0)
    layer = case.make()
    out = case.call(layer, data)
    g = torch.Generator().manual_seed(7)
    (out * torch.randn(out.shape, generator=g)).sum().backward()
    return [out.detach(), *(p.grad for p in layer.parameters()), *(x.grad for x in leaves(data))]


def leaves(data: Any) -> list[Tensor]:
    found = [
        store[key] for store in data.stores for key in ("x", "edge_attr", "edge_weight")
        if key in store
    ]  # fmt: skip
    return [x for x in found if x.requires_grad]


def prepared(data: Any, call: Any) -> Any:
    for store in data.node_stores:
        store.x.requires_grad_()
    for store in data.edge_stores:
        store.edge_attr.requires_grad_()
    return data


def difference(expected: list[Tensor | None], found: list[Tensor | None]) -> str:
    for i, (a, b) in enumerate(zip(expected, found, strict=True)):
        wrong = deviation(a, b, TOLERANCE)
        if wrong:
            return f"result {i} {wrong}"
    return ""


@functools.cache
def upstreams(case: Case, make: Callable[[], Any]) -> tuple[list[Tensor | None], str]:
    """Upstream's results on one process, the same for every layout, and the class of the layer."""
    return outcome(case, prepared(make(), case.call)), type(case.make()).__name__


def compared(case: Case, make: Callable[[], Any], shard: Callable[[Any], Any]) -> Found:
    fastgraph.disable()
    expected, name = upstreams(case, make)
    data = prepared(shard(make()), case.call)
    fastgraph.enable()
    fastgraph.status().reset()
    fgd.COUNTS.reset()
    error, gathers, planned_again = "", {}, 0
    halo: dict[str, int] = {}
    try:
        results = outcome(case, data)
        gathers, halo = dict(fgd.COUNTS.gathers), dict(fgd.COUNTS.halo)
        error = difference(expected, [fgd.whole(x) for x in results])
        planned = fgd.COUNTS.plans
        outcome(case, data)
        planned_again = fgd.COUNTS.plans - planned
    except Exception:
        error = traceback.format_exc()
    rows = fastgraph.status().rows
    fastgraph.disable()
    label = case.label or name
    row = next((row for row in rows if row.layer == label), None)
    routed, reasons = (row.routed, ", ".join(row.reasons)) if row else (0, "not called")
    return Found(error, gathers, routed // 2, reasons, planned_again, halo)


def shards(parts: Tensor, **options: Any) -> Callable[[Any], Any]:
    def shard(data: Any) -> Any:
        nodes = parts
        if isinstance(data, HeteroData):
            nodes = torch.cat([parts.flip(0)[:NUM_OTHERS], parts])
        return fgd.shard(data, parts=nodes, **options)

    return shard


# The shares of edges below which operators are computed by halves, by edges and at all.
HALVES = {
    "uneven": None,
    "one is empty": (0.0, 0.0),
    "one without training": (1.1, 0.0),
}


def by_halves(shares: tuple[float, float] | None) -> None:
    """Have the halo travel meanwhile, also where there is little to gain."""
    if shares is not None:
        overlap.LEAST_BYTES = 0
        halves.ROWS_SUFFICE, halves.LEAST_SHARE = shares


def cases_in(layout: str, exhaustive: bool) -> dict[str, Case]:
    everything = layout == "uneven" or exhaustive
    return {name: case for name, case in CASES.items() if everything or name in IN_ALL_LAYOUTS}


def compare_on_this_rank(exhaustive: bool) -> dict[str, Found]:
    torch.set_default_dtype(torch.float64)
    WORLD.random = "exact"
    found = {}
    for layout, parts in PARTITIONS.items():
        by_halves(HALVES[layout])
        shard = shards(parts(WORLD.size), mode="halo")
        for name, case in cases_in(layout, exhaustive).items():
            make = bipartite if "pair" in name else graph
            found[f"{name}, {layout}"] = compared(case, make, shard)
        for name, operator in OPERATORS.items():
            found[f"{name}, {layout}"] = of_operator(operator, shard)
    return found


def of_operator(operator: Callable[[Any], Tensor], shard: Callable[[Any], Any]) -> Found:
    case = Case(nn.Module, lambda _, d: operator(d))
    data = prepared(graph(), case.call)
    try:
        expected = outcome(case, data)
    except IndexError:
        with pytest.raises(IndexError):
            outcome(case, prepared(shard(graph()), case.call))
        return Found("", {}, 0, "", 0, {})
    data = prepared(shard(graph()), case.call)
    fgd.COUNTS.reset()
    results = outcome(case, data)
    gathers = dict(fgd.COUNTS.gathers)
    error = difference(expected, [fgd.whole(x) for x in results])
    return Found(error, gathers, 0, "", 0, dict(fgd.COUNTS.halo))


@pytest.fixture(scope="module")
def found(
    world_size: int, once_on_ranks: Any, pytestconfig: pytest.Config
) -> list[dict[str, Found]]:
    exhaustive = pytestconfig.getoption("--exhaustive")
    found: list[dict[str, Found]] = once_on_ranks(compare_on_this_rank, world_size, exhaustive)
    return found


def in_layouts(
    layouts: Iterable[str], cases: Iterable[str], cases_in: Callable[..., dict[str, Case]]
) -> pytest.MarkDecorator:
    """All cases in all layouts, of which a usual run takes some."""
    return pytest.mark.parametrize(
        ("name", "layout"),
        [
            pytest.param(
                *(name, layout),
                marks=() if name in cases_in(layout, exhaustive=False) else pytest.mark.exhaustive,
            )
            for layout in layouts
            for name in cases
        ],
    )


def assert_as_expected(results: Iterable[Found], case: Case, *, is_planned_again: bool) -> None:
    """All ranks have what one process has, by the route that a case says."""
    for rank, result in enumerate(results):
        assert not result.error, f"rank {rank}: {result.error}"
        assert result.routed == case.routed, f"rank {rank}: {result.reasons}"
        assert case.reason in result.reasons
        if case.routed:
            assert not result.gathers
            assert bool(result.planned_again) == is_planned_again


@in_layouts(PARTITIONS, CASES, cases_in)
def test_layers_are_fused(found: list[dict[str, Found]], name: str, layout: str) -> None:
    results = [of_rank[f"{name}, {layout}"] for of_rank in found]
    assert_as_expected(results, CASES[name], is_planned_again=name in PLANNED_EACH_TIME)


@pytest.mark.parametrize(
    ("name", "layout", "expected"),
    [
        ("GCN", "uneven", "nothing: few bytes"),
        ("GCN", "one is empty", "rows without the halo"),
        ("GCN", "one without training", "edges without the halo"),
        ("GAT, dropout", "one is empty", "rows without the halo"),
        ("GAT, pair", "one without training", "rows without the halo"),
        ("GATv2, features", "one is empty", "nothing: features of edges"),
    ],
)
def test_what_is_computed_meanwhile(
    found: list[dict[str, Found]], name: str, layout: str, expected: str
) -> None:
    if layout == "one is empty" and len(found) == 2:
        pytest.skip("the other rank has all rows, and no halo")
    for of_rank in found:
        assert list(of_rank[f"{name}, {layout}"].halo) == [expected]


@pytest.mark.parametrize("layout", PARTITIONS)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators(found: list[dict[str, Found]], name: str, layout: str) -> None:
    for rank, of_rank in enumerate(found):
        result = of_rank[f"{name}, {layout}"]
        assert not result.error, f"rank {rank}: {result.error}"
        assert not result.gathers
