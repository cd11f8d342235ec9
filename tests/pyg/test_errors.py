"""Wrong calls end as they do without fastgraph: in the same error, or in the same result."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import EdgeIndex
from torch_geometric.nn import (
    APPNP,
    MLP,
    ARMAConv,
    ChebConv,
    ClusterGCNConv,
    GATConv,
    GatedGraphConv,
    GATv2Conv,
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
    TransformerConv,
    WLConvContinuous,
)

import fastgraph
from fastgraph.graphs.memo import Memo
from fastgraph.plugins.refusal import Refusal
from fastgraph.pyg.propagate import plan_propagate
from tests.ab import Arguments, arguments
from tests.graphs import random_edges
from tests.outcomes import differences
from tests.wrong_calls.values import changed, graphs, of_nodes, sizes

NODES, CHANNELS, EDGES = 12, 4, 40

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "GCN": lambda: GCNConv(CHANNELS, 5),
    "GCN-cached": lambda: GCNConv(CHANNELS, 5, cached=True),
    "GCN-improved": lambda: GCNConv(CHANNELS, 5, improved=True),
    "GCN-plain": lambda: GCNConv(CHANNELS, 5, normalize=False),
    "GCN-no-loops": lambda: GCNConv(CHANNELS, 5, add_self_loops=False),
    "GCN-mean": lambda: GCNConv(CHANNELS, 5, aggr="mean"),
    "GCN-reverse": lambda: GCNConv(CHANNELS, 5, flow="target_to_source"),
    "SAGE-mean": lambda: SAGEConv(CHANNELS, 5),
    "SAGE-max": lambda: SAGEConv(CHANNELS, 5, aggr="max"),
    "SAGE-project": lambda: SAGEConv(CHANNELS, 5, aggr="max", project=True),
    "SAGE-no-root": lambda: SAGEConv(CHANNELS, 5, root_weight=False),
    "SAGE-reverse": lambda: SAGEConv(CHANNELS, 5, flow="target_to_source"),
    "GraphConv-add": lambda: GraphConv(CHANNELS, 5),
    "GraphConv-max": lambda: GraphConv(CHANNELS, 5, aggr="max"),
    "GIN": lambda: GINConv(MLP([CHANNELS, 5], norm=None)),
    "SG": lambda: SGConv(CHANNELS, 5, K=2),
    "SSG": lambda: SSGConv(CHANNELS, 5, alpha=0.1, K=2),
    "TAG": lambda: TAGConv(CHANNELS, 5),
    "APPNP": lambda: APPNP(K=3, alpha=0.1),
    "ARMA": lambda: ARMAConv(CHANNELS, 5, num_stacks=1, num_layers=2),
    "Cheb": lambda: ChebConv(CHANNELS, 5, K=3),
    "ClusterGCN": lambda: ClusterGCNConv(CHANNELS, 5),
    "GatedGraph": lambda: GatedGraphConv(CHANNELS, 2),
    "LG": lambda: LGConv(),
    "LG-plain": lambda: LGConv(normalize=False),
    "MF": lambda: MFConv(CHANNELS, 5),
    "MixHop": lambda: MixHopConv(CHANNELS, 5),
    "Simple": lambda: SimpleConv(),
    "Simple-max": lambda: SimpleConv("max", combine_root="cat"),
    "WLContinuous": lambda: WLConvContinuous(),
    "GAT": lambda: GATConv(CHANNELS, 3, heads=2),
    "GAT-no-loops": lambda: GATConv(CHANNELS, 3, heads=2, add_self_loops=False),
    "GAT-edge": lambda: GATConv(CHANNELS, 3, heads=2, edge_dim=2),
    "GAT-edge-no-loops": lambda: GATConv(CHANNELS, 3, edge_dim=2, add_self_loops=False),
    "GAT-pair": lambda: GATConv((CHANNELS, CHANNELS), 3, add_self_loops=False),
    "GAT-mean": lambda: GATConv(CHANNELS, 3, heads=2, concat=False, residual=True),
    "GATv2": lambda: GATv2Conv(CHANNELS, 3, heads=2),
    "GATv2-no-loops": lambda: GATv2Conv(CHANNELS, 3, heads=2, add_self_loops=False),
    "GATv2-edge": lambda: GATv2Conv(CHANNELS, 3, heads=2, edge_dim=2),
    "GATv2-edge-no-loops": lambda: GATv2Conv(CHANNELS, 3, edge_dim=2, add_self_loops=False),
    "GATv2-shared": lambda: GATv2Conv(CHANNELS, 3, share_weights=True, residual=True),
    "Transformer": lambda: TransformerConv(CHANNELS, 3, heads=2),
    "Transformer-edge": lambda: TransformerConv(CHANNELS, 3, heads=2, edge_dim=2),
    "Transformer-beta": lambda: TransformerConv(CHANNELS, 3, heads=2, beta=True),
    "Transformer-mean": lambda: TransformerConv(CHANNELS, 3, concat=False, root_weight=False),
}


def features(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def edges() -> Tensor:
    return random_edges(NODES, NODES, EDGES)


def wrong_graphs() -> dict[str, Any]:
    """Wrong calls by what is wrong with a graph."""
    wrong = graphs(edges(), NODES)
    return wrong | {"EdgeIndex too large": EdgeIndex(wrong["destination too large"])}


def edge_values() -> dict[str, Any]:
    """Wrong calls by what is wrong with weights or features of edges."""
    one = features(EDGES).abs() + 0.1
    two = features(EDGES, 2)
    return {
        "one each": one,
        "a column": one.view(-1, 1),
        "a row": one.view(1, -1),
        "two each": two,
        "three each": features(EDGES, 3),
        "two heads of two": features(EDGES, 2, 2),
        "one head": features(EDGES, 1, 3),
        "one head of one": features(EDGES, 1, 1),
        "too short": one[:-1],
        "too long": features(EDGES + 1),
        "one": one[:1],
        "none": one[:0],
        "two each, too short": two[:-1],
        "two each, too long": features(EDGES + 1, 2),
        "two each, one": two[:1],
        "scalar": torch.tensor(2.0),
        "number": 2.0,
        "a list": one.tolist(),
        "numpy": one.numpy(),
        "int64": torch.ones(EDGES, dtype=torch.long),
        "bool": one > 0,
        "float64": one.double(),
        "float16": one.half(),
        "two each, float64": two.double(),
        "two each, int64": two.long(),
        "complex": one.to(torch.complex64),
        "on meta": one.to("meta"),
        "sparse": one.to_sparse(),
    }


_EDGE_ARGUMENTS = ("edge_weight", "edge_attr")


def calls(module: nn.Module) -> dict[str, Arguments]:
    """Wrong calls, and right ones that look as if they were wrong."""
    names = inspect.signature(module.forward).parameters
    x, graph = features(NODES, CHANNELS), edges()
    found = {"right": arguments(x, graph)}
    found |= {f"graph: {name}": arguments(x, wrong) for name, wrong in wrong_graphs().items()}
    found |= {f"x: {name}": arguments(wrong, graph) for name, wrong in of_nodes(x).items()}
    no_edges = torch.empty(2, 0, dtype=torch.long)
    found |= {
        f"x, no edges: {name}": arguments(wrong, no_edges) for name, wrong in of_nodes(x).items()
    }
    for argument in _EDGE_ARGUMENTS:
        if argument not in names:
            continue
        for name, wrong in edge_values().items():
            found[f"{argument}: {name}"] = arguments(x, graph, **{argument: wrong})
        weight = features(EDGES).abs()
        two = features(EDGES, 2)
        for values in (weight, two):
            for name, wrong in wrong_graphs().items():
                found[f"graph with {list(values.shape)}: {name}"] = arguments(
                    x, wrong, **{argument: values}
                )
            for name, wrong in of_nodes(x).items():
                found[f"x with {list(values.shape)}: {name}"] = arguments(
                    wrong, graph, **{argument: values}
                )
    if "size" in names:
        found |= {
            f"size: {name}": arguments(x, graph, size=size) for name, size in sizes(NODES).items()
        }
        found |= {
            f"size of sources: {name}": arguments((x, None), edges(), size=size)
            for name, size in sizes(NODES).items()
        }
        found |= {
            f"size of a pair: {name}": arguments((x, x[:9]), random_edges(NODES, 9, 20), size=size)
            for name, size in sizes(NODES).items()
        }
    if "return_attention_weights" in names:
        for argument in (True, False):
            found[f"weights {argument}"] = arguments(x, graph, return_attention_weights=argument)
            for name in ("source too large", "negative destination", "loop too large", "empty"):
                found[f"weights {argument}, graph: {name}"] = arguments(
                    x, wrong_graphs()[name], return_attention_weights=argument
                )
    return found


# Each layer's forward that is replaced, and one layer of each kind of the others.
_CORE = ("GCN", "SAGE-mean", "GraphConv-add", "LG-plain", "Simple-max", "GAT", "GAT-edge", "GATv2")
_CORE += ("GATv2-edge-no-loops", "Transformer", "Transformer-edge")


@pytest.mark.repeats
@pytest.mark.parametrize(
    "name",
    [
        name if name in _CORE else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in LAYERS
    ],
)
def test_wrong_calls_end_as_upstreams(name: str) -> None:
    torch.manual_seed(0)
    module = LAYERS[name]()
    found = differences(module, calls(module))
    assert not found, "\n".join(f"{call}\n    {differs}" for call, differs in found.items())


def test_products_of_a_sorted_edge_index_end_as_upstreams() -> None:
    """Upstream multiplies by it, in sizes, dtypes and errors of its own."""
    good = edges()[:, edges()[1].argsort(stable=True)]
    x, weight = features(NODES, CHANNELS), features(EDGES).abs()
    module = Sorted()
    found: dict[str, Arguments] = {}
    for size in ((NODES, NODES), (NODES + 3, NODES + 3), (NODES, NODES + 1), (NODES, None), None):
        for name, given in {**of_nodes(x), "right": x}.items():
            for weights in (None, weight, weight[:-1], weight.double(), torch.tensor(2.0)):
                call = arguments(given, good, size, weights)
                found[f"{size}, {name}, {None if weights is None else weights.shape}"] = call
    # With sizes, upstream would read other memory.
    for wrong in (changed(good, (0, 7), NODES + 2), changed(good, (1, EDGES - 1), NODES + 2)):
        found[f"{wrong[:, 7]}"] = arguments(x, wrong, None, None)
    differ = differences(module, found)
    assert not differ, "\n".join(f"{call}\n    {text}" for call, text in differ.items())


class Sorted(nn.Module):
    """``GraphConv`` on edges that are sorted by destination."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = GraphConv(CHANNELS, 5)

    def forward(self, x: Any, graph: Tensor, size: Any, weight: Any) -> Tensor:
        edge_index = EdgeIndex(graph, sparse_size=size, sort_order="col")
        out: Tensor = self.layer(x, edge_index, weight)
        return out


def test_a_note_says_which_index() -> None:
    graph = wrong_graphs()["destination too large"]
    with fastgraph.enabled(min_edges=0):
        for conv in (GCNConv(CHANNELS, 5), SAGEConv(CHANNELS, 5), GATConv(CHANNELS, 5)):
            with pytest.raises((RuntimeError, ValueError, IndexError)) as found:
                conv(features(NODES, CHANNELS), graph)
            (note,) = found.value.__notes__
            assert note == "fastgraph: edge_index holds index 12 in row 1, expected 0 <= index < 12"
    reasons = {reason for row in fastgraph.status().rows for reason in row.reasons}
    assert reasons == {"edge_index points outside the nodes"}


def test_graphs_are_looked_up_once_for_each_pass() -> None:
    """That what is looked up before a call computes is not looked up again."""
    calls: list[object] = []
    get, channels = Memo.get, 16  # sums of a few need no graph
    with fastgraph.enabled(min_edges=0), pytest.MonkeyPatch.context() as patch:
        for conv in (SAGEConv(channels, 5), GCNConv(channels, 5), GATv2Conv(channels, 5)):
            graph = edges()
            conv(features(NODES, channels), graph)
            patch.setattr(Memo, "get", lambda *a: (calls.append(a), get(*a))[1])
            calls.clear()
            conv(features(NODES, channels), graph)
            assert len(calls) == 1, type(conv).__name__
            patch.undo()


def test_graphs_that_are_too_large_run_upstream() -> None:
    graph = torch.zeros(2, 1, dtype=torch.long).expand(2, 2**31)
    with fastgraph.enabled(min_edges=0):
        conv = SAGEConv(CHANNELS, 5)
        planned = plan_propagate(conv, graph, None, {"x": features(NODES, CHANNELS)})
        assert not isinstance(planned, Refusal)
        assert planned.look_up() == Refusal("more than 2147483647 nodes or edges")
