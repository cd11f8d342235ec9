"""Every layer with a route, in every form of input that upstream takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn import (
    APPNP,
    MLP,
    ARMAConv,
    ChebConv,
    ClusterGCNConv,
    GatedGraphConv,
    GCN2Conv,
    GCNConv,
    GINConv,
    GraphConv,
    LGConv,
    MFConv,
    MixHopConv,
    SAGEConv,
    SGConv,
    SimpleConv,
    SSGConv,
    TAGConv,
    WLConvContinuous,
)
from torch_geometric.nn.models import GCN, GIN, GraphSAGE, LabelPropagation, LightGCN
from torch_geometric.utils import (
    to_torch_coo_tensor,
    to_torch_csc_tensor,
    to_torch_csr_tensor,
)

import fastgraph
from tests.ab import Arguments, arguments, assert_same, double
from tests.graphs import quantised, random_edges, square_cases

NODES, CHANNELS = 24, 8


def simple_edges() -> Tensor:
    """Distinct unsorted edges, since sparse matrices hold each edge once."""
    edges = random_edges(NODES, NODES, 150).unique(dim=1)
    torch.manual_seed(3)
    return edges[:, torch.randperm(edges.shape[1])]


LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "GCN": lambda: GCNConv(CHANNELS, 5),
    "GCN-cached": lambda: GCNConv(CHANNELS, 5, cached=True),
    "GCN-improved": lambda: GCNConv(CHANNELS, 5, improved=True),
    "GCN-plain": lambda: GCNConv(CHANNELS, 5, normalize=False),
    "GCN-no-loops": lambda: GCNConv(CHANNELS, 5, add_self_loops=False),
    "GCN-no-bias": lambda: GCNConv(CHANNELS, 5, bias=False),
    "GCN-mean": lambda: GCNConv(CHANNELS, 5, aggr="mean"),
    "GCN-max": lambda: GCNConv(CHANNELS, 5, aggr="max"),
    "SAGE-mean": lambda: SAGEConv(CHANNELS, 5),
    "SAGE-sum": lambda: SAGEConv(CHANNELS, 5, aggr="sum"),
    "SAGE-add": lambda: SAGEConv(CHANNELS, 5, aggr="add"),
    "SAGE-max": lambda: SAGEConv(CHANNELS, 5, aggr="max"),
    "SAGE-min": lambda: SAGEConv(CHANNELS, 5, aggr="min"),
    "SAGE-project": lambda: SAGEConv(CHANNELS, 5, aggr="max", project=True),
    "SAGE-normalize": lambda: SAGEConv(CHANNELS, 5, normalize=True, root_weight=False),
    "GraphConv-add": lambda: GraphConv(CHANNELS, 5),
    "GraphConv-mean": lambda: GraphConv(CHANNELS, 5, aggr="mean"),
    "GIN": lambda: GINConv(MLP([CHANNELS, 5], norm=None)),
    "SG": lambda: SGConv(CHANNELS, 5, K=2),
    "SSG": lambda: SSGConv(CHANNELS, 5, alpha=0.1, K=2),
    "TAG": lambda: TAGConv(CHANNELS, 5),
    "APPNP": lambda: APPNP(K=3, alpha=0.1),
    "ARMA": lambda: ARMAConv(CHANNELS, 5, num_stacks=1, num_layers=2),
    "ClusterGCN": lambda: ClusterGCNConv(CHANNELS, 5),
    "GatedGraph": lambda: GatedGraphConv(CHANNELS, 2),
    "LG": lambda: LGConv(),
    "MF": lambda: MFConv(CHANNELS, 5),
    "MixHop": lambda: MixHopConv(CHANNELS, 5),
    "Simple": lambda: SimpleConv(),
    "WLContinuous": lambda: WLConvContinuous(),
}


def adjacency(kind: str, edge_index: Tensor, size: tuple[int, int]) -> Any:
    """The transposed adjacency matrix, destinations as rows, in one of PyG's forms."""
    if kind == "edge_index":
        return edge_index
    if kind == "int32":
        return edge_index.int()
    if kind == "EdgeIndex":
        return EdgeIndex(edge_index, sparse_size=size)
    if kind == "EdgeIndex-sorted":
        return EdgeIndex(edge_index, sparse_size=size).sort_by("col").values
    convert = {"csr": to_torch_csr_tensor, "csc": to_torch_csc_tensor, "coo": to_torch_coo_tensor}
    return convert[kind](edge_index.flip(0), size=size[::-1])


def with_int64(x: Tensor, graph: Any) -> Arguments:
    """The call for upstream: torch's gradients of scatter_add are wrong for int32 indices."""
    return arguments(x, graph.long() if graph.dtype == torch.int32 else graph)


def features(*shape: int) -> Tensor:
    torch.manual_seed(4)
    return torch.randn(*shape)


# On the emulator, tests/cuda/test_layers.py has all layers; whatever the form, kernels get the
# same sorted rows.
@pytest.mark.repeats
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.filterwarnings("ignore:Converting sparse tensor")
@pytest.mark.parametrize(
    "kind", ["edge_index", "int32", "EdgeIndex", "EdgeIndex-sorted", "csr", "coo", "csc"]
)
@pytest.mark.parametrize("name", LAYERS)
def test_forms_of_the_graph(name: str, kind: str) -> None:
    torch.manual_seed(0)
    module = LAYERS[name]()
    graph = adjacency(kind, simple_edges(), (NODES, NODES))
    call = arguments(features(NODES, CHANNELS), graph)
    try:
        module(*call[0])
        LAYERS[name]().double()(*double(call)[0])
    except (NotImplementedError, ValueError, RuntimeError, AttributeError) as refusal:
        pytest.skip(f"upstream does not take it: {refusal}")
    assert_same(LAYERS[name](), call, upstream_call=with_int64(*call[0]))


@pytest.mark.parametrize("case", square_cases(), ids=str)
@pytest.mark.parametrize(
    "name", ["GCN", "GCN-max", "SAGE-mean", "SAGE-sum", "SAGE-max", "SAGE-min", "TAG"]
)
def test_awkward_graphs(name: str, case: Any) -> None:
    x = features(case.num_src, CHANNELS)
    call = arguments(x, case.edge_index)
    assert_same(LAYERS[name](), call, upstream_call=with_int64(x, case.edge_index))


@pytest.mark.parametrize("name", ["SAGE-max", "SAGE-min", "GCN-max"])
def test_ties_and_zeros(name: str) -> None:
    x = quantised(NODES, CHANNELS, dtype=torch.float32)
    assert_same(LAYERS[name](), arguments(x, random_edges(NODES, NODES, 90)))


WEIGHTED = [
    "GCN",
    "GCN-plain",
    "GCN-improved",
    "GCN-no-loops",
    "GCN-mean",
    "GraphConv-add",
    "SG",
    "SSG",
    "TAG",
    "APPNP",
    "ARMA",
    "GatedGraph",
    "LG",
    "MixHop",
    "Simple",
]


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("name", WEIGHTED)
def test_edge_weights_and_flow(name: str, flow: str) -> None:
    torch.manual_seed(0)
    module = LAYERS[name]()
    module.flow = flow
    edges = random_edges(NODES, NODES, 90)
    call = arguments(features(NODES, CHANNELS), edges, torch.rand(90))
    assert_same(module, call)


def test_gcn2_and_cheb() -> None:
    torch.manual_seed(0)
    edges, x = random_edges(NODES, NODES, 90), features(NODES, CHANNELS)
    assert_same(GCN2Conv(CHANNELS, alpha=0.2), arguments(x, features(NODES, CHANNELS), edges))
    assert_same(ChebConv(CHANNELS, 5, K=3), arguments(x, edges, torch.rand(90)))


@pytest.mark.parametrize("target", ["both", "none"])
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("aggr", ["mean", "max", "sum"])
def test_bipartite(aggr: str, flow: str, target: str) -> None:
    torch.manual_seed(0)
    edges = random_edges(9, 5, 40)
    x_src, x_dst = features(9, CHANNELS), features(5, CHANNELS)
    if flow == "target_to_source":
        pair, size = (x_src, x_dst), None
    else:
        pair, size = (x_src, x_dst if target == "both" else None), (9, 5)
    module = SAGEConv((CHANNELS, CHANNELS), 4, aggr=aggr, flow=flow)
    if flow == "target_to_source":
        with pytest.raises(RuntimeError):  # upstream adds rows of the other side
            module(pair, edges)
        return
    assert_same(module, arguments(pair, edges, size=size))
    assert_same(GraphConv((CHANNELS, CHANNELS), 4, aggr="mean"), arguments(pair, edges, size=size))


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_the_first_of_a_pair_is_gathered_whatever_the_flow(flow: str) -> None:
    torch.manual_seed(0)
    edges, x = random_edges(NODES, NODES, 90), features(NODES, CHANNELS)
    assert_same(SAGEConv(CHANNELS, 4, project=True, flow=flow), arguments(x, edges))
    pair = (x, features(NODES, CHANNELS))
    for module in (
        SAGEConv(CHANNELS, 4, aggr="max", flow=flow),
        GraphConv(CHANNELS, 4, flow=flow),
        GINConv(torch.nn.Linear(CHANNELS, 4), flow=flow),
    ):
        assert_same(module, arguments(pair, edges))
        assert_same(module, arguments((x, None), edges, size=(NODES, NODES)))


@pytest.mark.parametrize("name", ["GCN", "GCN-plain", "SAGE-mean", "SAGE-max", "TAG"])
def test_static_graphs(name: str) -> None:
    """Features of several graphs of one structure, ``[batch, nodes, channels]``."""
    torch.manual_seed(0)
    edges = random_edges(NODES, NODES, 90)
    assert_same(LAYERS[name](), arguments(features(3, NODES, CHANNELS), edges))
    module = LAYERS[name]()
    strides = module(features(3, NODES, CHANNELS), edges).stride()
    with fastgraph.enabled():
        assert module(features(3, NODES, CHANNELS), edges).stride() == strides


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["GCN", "SAGE-mean", "SAGE-max", "GraphConv-add", "LG"])
def test_what_upstream_lets_change_in_place(name: str, batch: int) -> None:
    """A view that was made without gradients refuses it."""
    module, x = LAYERS[name](), features(batch, NODES, CHANNELS)
    edges = random_edges(NODES, NODES, 90)
    with torch.no_grad():
        expected = module(x, edges)
        with fastgraph.enabled(strict=True):
            ours = module(x, edges)
    assert ours._is_view() == expected._is_view()


@pytest.mark.parametrize("name", ["GCN", "GCN-plain", "SAGE-sum", "SAGE-max", "TAG"])
def test_outputs_are_upstreams_bit_for_bit(name: str) -> None:
    """Sums run in edge order and round each product, so not even the last bit differs."""
    torch.manual_seed(0)
    module, call = LAYERS[name](), (features(NODES, CHANNELS), random_edges(NODES, NODES, 300))
    expected = module(*call)
    with fastgraph.enabled():
        assert torch.equal(module(*call), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["GCN", "SAGE-mean", "SAGE-max"])
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    call = arguments(features(NODES, CHANNELS).to(dtype), random_edges(NODES, NODES, 90))
    assert_same(LAYERS[name]().to(dtype), call)


@pytest.mark.parametrize("name", ["GCN", "GCN-plain", "SAGE-mean", "SAGE-max", "GraphConv-add"])
def test_autocast(name: str) -> None:
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # Under autocast the truth is rounded to bfloat16 too, so only its scale can be compared.
        call = arguments(features(NODES, CHANNELS), random_edges(NODES, NODES, 90))
        assert_same(LAYERS[name](), call, factor=4)


@pytest.mark.parametrize(
    "model",
    [
        lambda: GCN(CHANNELS, 16, 3, 4, dropout=0.3),
        lambda: GraphSAGE(CHANNELS, 16, 3, 4, jk="cat", norm="batch"),
        lambda: GIN(CHANNELS, 16, 2, 4),
    ],
)
def test_models(model: Callable[[], torch.nn.Module]) -> None:
    torch.manual_seed(0)
    module = model()
    layer = type(module.convs[0]).__name__
    call = arguments(features(NODES, CHANNELS), random_edges(NODES, NODES, 90))
    assert_same(module, call, layer=layer)


def test_label_propagation_and_lightgcn() -> None:
    torch.manual_seed(0)
    edges = random_edges(NODES, NODES, 90)
    labels = torch.randint(0, 3, (NODES,))
    propagation, light = LabelPropagation(num_layers=2, alpha=0.5), LightGCN(NODES, 8, 2)
    plain = propagation(labels, edges), light(edges)
    with fastgraph.enabled():
        routed = propagation(labels, edges), light(edges)
    for ours, theirs in zip(routed, plain, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert all(row.fell_back == 0 for row in fastgraph.status().rows)
    assert {"LabelPropagation", "LGConv"} <= {row.layer for row in fastgraph.status().rows}
