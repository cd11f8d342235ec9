"""NaN and infinity are where upstream's are: in outputs and in all gradients, whatever is special.

What differs is said in the docstrings of the operators, and pinned at the end.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import (
    GATConv,
    GATv2Conv,
    GCNConv,
    GraphConv,
    SAGEConv,
    SimpleConv,
    TransformerConv,
)

import fastgraph
from fastgraph.layers.edge_projection import is_folded_by_operator
from tests.emulated import repeats_but
from tests.graphs import random_edges

NAN, INF = float("nan"), float("inf")
SPECIAL = (NAN, INF, -INF)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
NUM_NODES, CHANNELS = 40, 5

# Nodes with their part in the graph.
SOURCE, ISOLATED, ALONE, FORTY, HUB = 4, 39, 38, 37, 36


def special_graph(size_of_hub: int) -> Tensor:
    """Rows of no, one, few, 40 and more neighbours; self-loops; nodes that are sources only; one
    without edges."""
    few = random_edges(12, 30, 60)
    loops = torch.arange(5, 9).repeat(2, 1)
    alone = torch.tensor([[SOURCE], [ALONE]])
    forty = torch.stack([torch.arange(40) % 34, torch.full((40,), FORTY)])
    hub = torch.stack([random_edges(34, 1, size_of_hub)[0], torch.full((size_of_hub,), HUB)])
    return torch.cat([few, loops, alone, forty, hub], dim=1)


EDGES = special_graph(70)
CUT_EDGES = special_graph(4200)  # a row of more entries than one task takes


class Layer(NamedTuple):
    """A layer, and what goes with its edges: an argument's name and the number of channels."""

    make: Callable[[], torch.nn.Module]
    edges: str | None = None
    edge_dim: int = 0
    learned: bool = True


def attention_layers() -> Iterator[tuple[str, Layer]]:
    for name, cls in (("GATv2", GATv2Conv), ("GAT", GATConv)):
        make = functools.partial(cls, 4, CHANNELS, heads=2)
        plain = functools.partial(make, add_self_loops=False)
        yield name, Layer(plain)
        yield f"{name} loops", Layer(make)
        yield f"{name} slope 0", Layer(functools.partial(plain, negative_slope=0.0))
        yield f"{name} slope 1", Layer(functools.partial(plain, negative_slope=1.0, concat=False))
        yield f"{name} edges", Layer(functools.partial(plain, edge_dim=3), "edge_attr", 3)
    make = functools.partial(TransformerConv, 4, CHANNELS, heads=2)
    yield "Transformer", Layer(make)
    with_edges = functools.partial(make, edge_dim=3, root_weight=False)
    yield "Transformer edges", Layer(with_edges, "edge_attr", 3)


def other_layers() -> Iterator[tuple[str, Layer]]:
    for aggr in ("mean", "max", "min"):
        yield f"SAGE {aggr}", Layer(functools.partial(SAGEConv, 4, CHANNELS, aggr=aggr))
    for aggr in ("add", "mean", "max", "min"):
        learned = aggr in ("add", "mean")
        make = functools.partial(GraphConv, 4, CHANNELS, aggr=aggr)
        yield f"Graph {aggr}", Layer(make, "edge_weight", learned=learned)
        yield f"Simple {aggr}", Layer(functools.partial(SimpleConv, aggr=aggr))
    make = functools.partial(GCNConv, 4, CHANNELS)
    yield "GCN", Layer(make)
    yield "GCN weighted", Layer(make, "edge_weight")
    yield "GCN fixed weights", Layer(make, "edge_weight", learned=False)


LAYERS = {**dict(attention_layers()), **dict(other_layers())}


class Call(NamedTuple):
    """A module and everything that a number may be put into."""

    module: torch.nn.Module
    x: Tensor
    on_edges: Tensor | None
    grad: Tensor


def call_of(layer: Layer, dtype: torch.dtype, graph: Tensor = EDGES) -> Call:
    torch.manual_seed(1)
    module = layer.make().to(dtype)
    x = torch.randn(NUM_NODES, 4).to(dtype)
    on_edges = None
    if layer.edges is not None:
        dims = [layer.edge_dim] if layer.edge_dim else []
        on_edges = torch.rand(graph.shape[1], *dims).to(dtype)
    with torch.no_grad():
        out = module(x, graph) if on_edges is None else module(x, graph, on_edges)
    return Call(module, x, on_edges, torch.randn(out.shape).to(dtype))


def places(call: Call) -> dict[str, Callable[[Call], Tensor]]:
    """By name, the numbers of a call that are to be replaced, as views of its tensors."""
    found: dict[str, Callable[[Call], Tensor]] = {
        "a source": lambda c: c.x[SOURCE, 1],
        "a destination": lambda c: c.x[FORTY],
        "a hub": lambda c: c.x[HUB, 0],
        "an isolated node": lambda c: c.x[ISOLATED],
        "all nodes": lambda c: c.x,
        "gradient of forty": lambda c: c.grad[FORTY, 0],
        "gradient of the hub": lambda c: c.grad[HUB, -1],
        "gradient of one": lambda c: c.grad[ALONE],
        "gradient of an isolated node": lambda c: c.grad[ISOLATED],
    }
    if call.on_edges is not None:
        for edge, name in ((0, "an edge"), (-1, "an edge of the hub")):
            found[name] = lambda c, e=edge: c.on_edges[e]  # type: ignore[misc]
    for name, parameter in call.module.named_parameters():
        if parameter.numel() > 0:  # of the first head alone, where there are several
            found[name] = lambda c, n=name: c.module.get_parameter(n).data.view(-1)[1]  # type: ignore[misc]
    return found


def run(layer: Layer, call: Call, graph: Tensor = EDGES) -> dict[str, Tensor]:
    """The output and all gradients, by name."""
    leaves = {"x": call.x.clone().requires_grad_()}
    arguments = {}
    if layer.edges is not None:
        assert call.on_edges is not None
        arguments[layer.edges] = call.on_edges.clone()
        if layer.learned:
            leaves[layer.edges] = arguments[layer.edges].requires_grad_()
    leaves |= dict(call.module.named_parameters())
    out = call.module(leaves["x"], graph, **arguments)
    found = torch.autograd.grad(out, list(leaves.values()), call.grad, allow_unused=True)
    return {"out": out.detach()} | {
        f"gradient of {name}": torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), found, strict=True)
    }


def run_routed(layer: Layer, call: Call, graph: Tensor = EDGES) -> dict[str, Tensor]:
    fastgraph.status().reset()
    with fastgraph.enabled(min_edges=0):
        results = run(layer, call, graph)
    rows = fastgraph.status().rows
    assert rows and all(row.routed > 0 and row.fell_back == 0 for row in rows)
    return results


def pattern(values: Tensor) -> Tensor:
    """0 for numbers, and one other number for each of NaN, infinity and -infinity."""
    return values.isnan() + 2 * (values == INF) + 3 * (values == -INF)


def differs(name: str, place: str, value: float, result: str, dtype: torch.dtype) -> bool:
    """True if a result is one that differs from upstream's; see the end of this file."""
    if place in ("an edge", "an edge of the hub") and value in (INF, -INF):
        if name == "GCN fixed weights":
            return dtype == torch.float16 and value == -INF
        if name == "GAT edges":
            return True
        return name == "Transformer edges" and result.startswith("gradient of lin_value")
    if name != "Transformer edges":
        return False
    if place == "lin_edge.weight":
        return result in ("out", "gradient of x")
    return "isolated node" in place and result == "gradient of lin_edge.weight"


def check(name: str, dtype: torch.dtype, graph: Tensor, chosen: tuple[str, ...] | None) -> None:
    """Put each special value into each of the chosen places, and compare all results."""
    layer = LAYERS[name]
    untouched = call_of(layer, dtype, graph)
    for place, numbers in places(untouched).items():
        if chosen is not None and place not in chosen:
            continue
        for value in SPECIAL:
            call = copy.deepcopy(untouched)
            numbers(call).fill_(value)
            upstream, ours = run(layer, call, graph), run_routed(layer, call, graph)
            assert ours.keys() == upstream.keys()
            for result, expected in upstream.items():
                if not differs(name, place, value, result, dtype):
                    same = torch.equal(pattern(ours[result]), pattern(expected))
                    assert same, f"{result} where {place} is {value}"


# On the emulator, tests/simt puts special values into every input of operators, rows that are cut
# included; a layer of each operator in one dtype shows that routes give and take them as they are.
ON_THE_EMULATOR = ("GATv2 edges", "GAT", "Transformer", "SAGE max", "GCN weighted")


@pytest.mark.parametrize("name", repeats_but(ON_THE_EMULATOR, LAYERS))
def test_special_values_are_where_upstreams_are(name: str) -> None:
    check(name, torch.float32, EDGES, None)


@pytest.mark.repeats
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [name for name in LAYERS if "slope" not in name])
def test_special_values_of_other_dtypes(name: str, dtype: torch.dtype) -> None:
    check(name, dtype, EDGES, ("a source", "an edge", "gradient of forty", "att", "att_src"))


@pytest.mark.repeats
@pytest.mark.parametrize("name", ["GATv2", "GATv2 edges", "GAT", "Transformer", "SAGE max", "GCN"])
def test_special_values_of_a_row_that_is_cut(name: str) -> None:
    check(name, torch.float32, CUT_EDGES, ("a source", "a hub", "gradient of the hub", "att"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", dict(attention_layers()))
def test_saturated_softmax(name: str, dtype: torch.dtype) -> None:
    """Scores far beyond what an exponential can hold leave nothing but numbers."""
    layer = LAYERS[name]
    call = call_of(layer, dtype)
    call.x.mul_(1e4)
    upstream, ours = run(layer, call), run_routed(layer, call)
    for result, expected in upstream.items():
        assert expected.isfinite().all() and ours[result].isfinite().all(), result
    tolerance = 1e-4 if dtype == torch.float32 else 1e-9  # of a score's rounding, not of exp's
    error = (ours["out"] - upstream["out"]).abs().max()
    assert error <= tolerance * upstream["out"].abs().max()


@pytest.mark.parametrize("name", dict(attention_layers()))
def test_products_that_overflow(name: str) -> None:
    """Their gradients are roundings times immense numbers, in which signs are chance."""
    layer = LAYERS[name]
    for place in ("a source", "a destination", "a hub", "all nodes"):
        for value in (1e30, -1e30):
            call = call_of(layer, torch.float32)
            places(call)[place](call).mul_(value)
            upstream, ours = run(layer, call)["out"], run_routed(layer, call)["out"]
            assert torch.equal(pattern(ours), pattern(upstream)), f"{place} times {value}"


# What differs.


PAIR = torch.tensor([[0, 1], [0, 0]])


def two_edges(make: Callable[[], torch.nn.Module]) -> tuple[Layer, Call]:
    """A layer with features of edges, and its call on two nodes with PAIR, of which the first edge
    has -infinity."""
    layer = Layer(make, "edge_attr", 1)
    torch.manual_seed(1)
    x = torch.randn(2, 4)
    call = Call(layer.make(), x, torch.tensor([[-INF], [1.0]]), torch.ones(2, 2))
    with torch.no_grad():
        call.module.get_parameter("lin_edge.weight").copy_(torch.tensor([[2.0], [-1.0]]))
    return layer, call


def test_gat_folds_the_projection_of_infinite_features() -> None:
    """(W^T a) e is -infinity, and its weight 0, where <a, W e> = -infinity + infinity."""
    layer, call = two_edges(lambda: GATConv(4, 2, edge_dim=1, add_self_loops=False))
    with torch.no_grad():
        call.module.get_parameter("att_edge").fill_(1.0)
    upstream, ours = run(layer, call, PAIR), run_routed(layer, call, PAIR)
    assert upstream["out"][0].isnan().all() and ours["out"].isfinite().all()
    value = call.module.lin(call.x)[1]  # type: ignore[operator]
    torch.testing.assert_close(ours["out"][0], value + call.module.bias)


def test_transformer_folds_the_projection_of_infinite_features() -> None:
    layer, call = two_edges(lambda: TransformerConv(4, 2, edge_dim=1))
    with torch.no_grad():
        call.module.get_parameter("lin_query.weight").zero_()
        call.module.get_parameter("lin_query.bias").copy_(torch.ones(2))
    upstream, ours = run(layer, call, PAIR), run_routed(layer, call, PAIR)
    assert upstream["out"][0].isnan().all() and ours["out"][0].isnan().all()
    name = "gradient of lin_value.weight"
    assert upstream[name].isnan().all() and ours[name].isfinite().all()


def test_transformer_projects_nothing_at_nodes_without_neighbours() -> None:
    """It is the second node that has none."""
    layer, call = two_edges(lambda: TransformerConv(4, 2, edge_dim=1, root_weight=False))
    assert call.on_edges is not None
    call.on_edges.fill_(1.0)
    call.grad[1] = NAN
    upstream, ours = run(layer, call, PAIR), run_routed(layer, call, PAIR)
    # Backends without the operator, as the emulated one, have all nodes projected around another.
    with fastgraph.enabled():
        is_finite = is_folded_by_operator(call.grad)
    name = "gradient of lin_edge.weight"
    assert upstream[name].isfinite().all() and bool(ours[name].isfinite().all()) == is_finite
    with torch.no_grad():
        call.module.get_parameter("lin_edge.weight").fill_(NAN)
    upstream, ours = run(layer, call, PAIR), run_routed(layer, call, PAIR)
    assert upstream["out"][1].isfinite().all()
    assert bool(ours["out"][1].isfinite().all()) == is_finite


def test_a_sparse_matrix_does_not_change_what_infinite_scores_give() -> None:
    """Upstream's weights are NaN for edges that are given as edge_index, and 0 for a matrix."""
    layer = Layer(lambda: GATConv(4, 2, add_self_loops=False, bias=False))
    call = Call(layer.make(), torch.ones(2, 4), None, torch.ones(2, 2))
    with torch.no_grad():
        call.module.get_parameter("lin.weight").fill_(1.0)
        call.module.get_parameter("att_dst").fill_(-INF)
    matrix = torch.sparse_csr_tensor([0, 2, 2], [0, 1], torch.ones(2), (2, 2))
    assert run(layer, call, PAIR)["out"][0].isnan().all()
    assert torch.equal(run(layer, call, matrix)["out"], torch.zeros(2, 2))
    for graph in (PAIR, matrix):
        ours = run_routed(layer, call, graph)["out"]
        assert ours[0].isnan().all() and torch.equal(ours[1], torch.zeros(2))


def test_a_degree_of_minus_infinity_in_float16() -> None:
    """Its power is NaN, but in torch's float16 0."""
    make = functools.partial(GCNConv, 1, 1, bias=False, add_self_loops=False)
    layer = Layer(lambda: make().half(), "edge_weight", learned=False)
    x = torch.ones(2, 1, dtype=torch.float16)
    weight = torch.tensor([-INF, 1.0], dtype=torch.float16)
    call = Call(layer.make(), x, weight, torch.ones_like(x))
    graph = torch.tensor([[1, 0], [0, 1]])
    assert run(layer, call, graph)["out"][1] == 0
    assert run_routed(layer, call, graph)["out"][1].isnan()


def test_a_mean_of_float16_does_not_overflow_on_the_way() -> None:
    layer = Layer(lambda: SimpleConv(aggr="mean"))
    x = torch.full((2, 1), 6e4, dtype=torch.float16)
    call = Call(layer.make(), x, None, torch.ones_like(x))
    assert run(layer, call, PAIR)["out"][0].isinf()
    assert torch.equal(run_routed(layer, call, PAIR)["out"][0], x[0])
