"""Wrong calls of DGL's layers end as they do without fastgraph: in the same error or result."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastgraph
from tests.ab import Arguments, arguments
from tests.dgl.graphs import ORDINARY, block, dgl, graph
from tests.graphs import random_edges
from tests.outcomes import differences

import dgl.nn as dglnn  # isort: skip
from fastgraph.dgl import calls as calls_of_layers  # isort: skip

NODES, EDGES, CHANNELS = ORDINARY.num_src, ORDINARY.num_edges, 6

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "GraphConv both": lambda: dglnn.GraphConv(CHANNELS, 4),
    "GraphConv right": lambda: dglnn.GraphConv(CHANNELS, 9, norm="right"),
    "GraphConv left": lambda: dglnn.GraphConv(CHANNELS, 4, norm="left", allow_zero_in_degree=True),
    "GraphConv no weight": lambda: dglnn.GraphConv(CHANNELS, 4, norm="none", weight=False),
    "SAGEConv mean": lambda: dglnn.SAGEConv(CHANNELS, 4, "mean"),
    "SAGEConv mean, widening": lambda: dglnn.SAGEConv(CHANNELS, 9, "mean"),
    "SAGEConv gcn": lambda: dglnn.SAGEConv(CHANNELS, 4, "gcn"),
    "SAGEConv pool": lambda: dglnn.SAGEConv(CHANNELS, 4, "pool"),
    "SAGEConv pair": lambda: dglnn.SAGEConv((CHANNELS, 3), 4, "mean"),
    "GINConv": lambda: dglnn.GINConv(nn.Linear(CHANNELS, 4), "sum"),
    "GINConv max": lambda: dglnn.GINConv(None, "max"),
    "SGConv": lambda: dglnn.SGConv(CHANNELS, 4, k=2),
    "TAGConv": lambda: dglnn.TAGConv(CHANNELS, 4, k=2),
    "APPNPConv": lambda: dglnn.APPNPConv(2, 0.1),
    "GATConv": lambda: dglnn.GATConv(CHANNELS, 5, 2),
    "GATConv lonely": lambda: dglnn.GATConv(CHANNELS, 5, 2, allow_zero_in_degree=True),
    "GATConv residual": lambda: dglnn.GATConv(CHANNELS, 5, 2, residual=True),
    "GATConv pair": lambda: dglnn.GATConv((CHANNELS, CHANNELS), 5, 2),
    "GATv2Conv": lambda: dglnn.GATv2Conv(CHANNELS, 5, 2),
    "DotGatConv": lambda: dglnn.DotGatConv(CHANNELS, 5, 2),
    "AGNNConv": lambda: dglnn.AGNNConv(),
    "EdgeGATConv": lambda: dglnn.EdgeGATConv(CHANNELS, 2, 5, 2),
    "RelGraphConv": lambda: dglnn.RelGraphConv(CHANNELS, 4, 3, "basis", 2),
}


def features(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def connected() -> Any:
    """A graph without nodes that no edge leads to."""
    ring = torch.stack([torch.arange(NODES), (torch.arange(NODES) + 1) % NODES])
    return graph(torch.cat([ring, ORDINARY.edge_index[:, NODES:]], 1), NODES)


def graphs() -> dict[str, Any]:
    """Graphs by what may be wrong with them."""
    lonely = graph(torch.tensor([[0, 1], [1, 0]]), NODES)
    two_relations = dgl.heterograph(
        {("a", "r", "a"): ([0, 1], [1, 0]), ("a", "s", "a"): ([0, 1], [1, 1])}
    )
    return {
        "zero in-degree": lonely,
        "no edges": graph(torch.empty(2, 0, dtype=torch.long), NODES),
        "no nodes": dgl.graph(([], []), num_nodes=0),
        "two relations": two_relations,
        "bipartite": graph(random_edges(NODES, 9, EDGES), NODES, 9),
        "a block": block(ORDINARY),
        "without CSC": connected().formats(["coo"]),
        "an edge_index": ORDINARY.edge_index,
        "None": None,
        "a string": "edges",
        "a list": ORDINARY.edge_index.tolist(),
        "int32": connected().int(),
    }


def inputs() -> dict[str, Any]:
    """Features by what may be wrong with them."""
    x = features(NODES, CHANNELS)
    return {
        "one-dimensional": x[:, 0],
        "three-dimensional": x.unsqueeze(1),
        "a batch": x.unsqueeze(0),
        "a scalar": torch.tensor(1.0),
        "int64": x.long(),
        "bool": x > 0,
        "float64": x.double(),
        "bfloat16": x.bfloat16(),
        "complex": x.to(torch.complex64),
        "None": None,
        "a list": x.tolist(),
        "numpy": x.numpy(),
        "too few rows": x[:-3],
        "too many rows": features(NODES + 3, CHANNELS),
        "no rows": x[:0],
        "too few channels": x[:, :2],
        "too many channels": features(NODES, CHANNELS + 1),
        "no channels": x[:, :0],
        "a pair": (x, x),
        "a list of two": [x, x],
        "a pair with None": (x, None),
        "a pair with None first": (None, x),
        "a pair of other rows": (x, x[:9]),
        "a pair of other channels": (x, x[:, :3]),
        "a pair of mixed dtypes": (x, x.double()),
        "a triple": (x, x, x),
        "a single": (x,),
        "on meta": x.to("meta"),
        "sparse": x.to_sparse(),
    }


def edge_values(num_edges: int) -> dict[str, Any]:
    """Weights or features of edges by what may be wrong with them."""
    one = features(num_edges).abs() + 0.1
    return {
        "one each": one,
        "a column": one.view(-1, 1),
        "a row": one.view(1, -1),
        "two each": features(num_edges, 2),
        "three each": features(num_edges, 3),
        "one by one each": one.view(-1, 1, 1),
        "too short": one[:-1],
        "too long": features(num_edges + 1),
        "two each, too short": features(num_edges - 1, 2),
        "none": one[:0],
        "scalar": torch.tensor(2.0),
        "number": 2.0,
        "a list": one.tolist(),
        "numpy": one.numpy(),
        "int64": torch.ones(num_edges, dtype=torch.long),
        "bool": one > 0,
        "float64": one.double(),
        "negative": -one,
        "on meta": one.to("meta"),
        "sparse": one.to_sparse(),
        "None": None,
    }


_EDGE_ARGUMENTS = ("edge_weight", "edge_feat", "etypes")


def calls(module: nn.Module) -> dict[str, Arguments]:
    """Wrong calls, and right ones that look as if they were wrong."""
    names = inspect.signature(module.forward).parameters
    x, good = features(NODES, CHANNELS), connected()
    argument = next((name for name in _EDGE_ARGUMENTS if name in names), None)
    required: dict[str, Any] = {}
    if argument == "edge_feat":
        required = {argument: features(good.num_edges(), 2)}
    elif argument == "etypes":
        required = {argument: torch.arange(good.num_edges()) % 3}
    found = {"right": arguments(good, x, **required)}
    found |= {f"graph: {name}": arguments(g, x, **required) for name, g in graphs().items()}
    found |= {f"x: {name}": arguments(good, wrong, **required) for name, wrong in inputs().items()}
    for name in ("bipartite", "a block", "zero in-degree"):
        for kind in ("a pair", "a pair of other rows", "None", "too few rows", "a list of two"):
            call = arguments(graphs()[name], inputs()[kind], **required)
            found[f"x of {name}: {kind}"] = call
    if argument is not None:
        found[f"without {argument}"] = arguments(good, x)
        values = edge_values(good.num_edges())
        found |= {
            f"{argument}: {name}": arguments(good, x, **{argument: wrong})
            for name, wrong in values.items()
        }
    if "get_attention" in names:
        found["attention of zero in-degree"] = arguments(
            graphs()["zero in-degree"], x, get_attention=True, **required
        )
    return found


@pytest.mark.parametrize("name", LAYERS)
def test_wrong_calls_end_as_dgls(name: str) -> None:
    torch.manual_seed(0)
    module = LAYERS[name]()
    found = differences(module, calls(module))
    assert not found, "\n".join(f"{call}\n    {differs}" for call, differs in found.items())


@pytest.mark.parametrize("name", ["RelGraphConv", "HGTConv"])
def test_edits_of_types_between_the_passes(name: str) -> None:
    """DGL saves them for its backward pass, which raises then; without an edit it computes."""
    torch.manual_seed(0)
    g = connected()
    if name == "HGTConv":
        module, more = dglnn.HGTConv(CHANNELS, 3, 2, 2, 3, dropout=0.0), (torch.arange(NODES) % 2,)
    else:
        module, more = dglnn.RelGraphConv(CHANNELS, 4, 3), ()
    found: dict[bool, list[Any]] = {}
    for is_routed in (False, True):
        ways = fastgraph.enabled(min_edges=0, strict=True) if is_routed else nullcontext()
        with ways:
            for is_edited in (False, True):
                x = features(NODES, CHANNELS).requires_grad_()
                etypes = torch.arange(g.num_edges()) % 3
                out = module(g, x, *more, etypes)
                if is_edited:
                    etypes.copy_(etypes.flip(0))
                    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                        out.sum().backward()
                else:
                    found[is_routed] = [out, *torch.autograd.grad(out.square().sum(), x)]
    for ours, dgls in zip(found[True], found[False], strict=True):
        torch.testing.assert_close(ours, dgls, rtol=1e-4, atol=1e-4)


def test_a_graph_is_not_read_for_a_call_that_is_refused_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[object] = []
    upstream = calls_of_layers.structure_of
    monkeypatch.setattr(
        calls_of_layers, "structure_of", lambda index: (read.append(index), upstream(index))[1]
    )
    conv, x = dglnn.GATConv(CHANNELS, 5, 2), features(NODES, CHANNELS)
    with fastgraph.enabled(min_edges=0):
        with torch.autocast("cpu", torch.bfloat16), suppress(Exception):
            conv(connected(), x)
        with suppress(Exception):
            conv(connected(), x.to(torch.complex64))
        assert not read
        conv(connected(), x)
        assert len(read) == 1


class Relational(dglnn.RelGraphConv):
    """Of a user."""


@pytest.mark.filterwarnings("ignore::fastgraph.FallbackWarning")
def test_typed_messages_of_a_layer_that_is_left_to_dgl_are_not_traced() -> None:
    conv = Relational(CHANNELS, 4, 3)
    conv.linear_r.register_forward_hook(lambda module, given, out: out)
    g = connected()
    arguments = g, features(NODES, CHANNELS), torch.arange(g.num_edges()) % 3
    expected = conv(*arguments)
    with fastgraph.enabled(min_edges=0):
        found = conv(*arguments)
    torch.testing.assert_close(found, expected)
    status = {row.layer: (row.routed, row.fell_back) for row in fastgraph.status().rows}
    assert status["Relational"] == (0, 1) and "dgl.update_all" not in status
