"""Edits of a caller's tensors between forward and backward pass end as they do in plain DGL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgraph
from tests.dgl.graphs import ORDINARY, dgl, of_case, routed_classes, without_self_loops

import dgl.function as fn  # isort: skip
import dgl.nn as dglnn  # isort: skip
import dgl.ops  # isort: skip

NODES, EDGES, CHANNELS = ORDINARY.num_src, ORDINARY.num_edges, 6


def _given_other_memory(tensor: Tensor) -> Tensor:
    """The tensor with other values in other memory: torch counts no edit."""
    tensor.data = tensor.detach().flip(0)
    return tensor


EDITS: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "a product": lambda x, out, values: x.mul_(2),
    "zeros": lambda x, out, values: x.zero_(),
    "a view": lambda x, out, values: x[2:5].add_(1),
    "another dtype's view": lambda x, out, values: x.view(-1).neg_(),
    "a detached view": lambda x, out, values: x.detach().add_(1),
    "a row that is assigned": lambda x, out, values: x.__setitem__(0, 1.0),
    "the output": lambda x, out, values: out.mul_(2),
    "a view of the output": lambda x, out, values: out[:3].zero_(),
    "relu_ of the output": lambda x, out, values: torch.relu_(out),
    "the values of edges": lambda x, out, values: values.mul_(2),
    "a view of these": lambda x, out, values: values[:7].zero_(),
    "a residual": lambda x, out, values: x.add_(out.reshape(out.shape[0], -1).sum(1, True)),
    "other memory": lambda x, out, values: _given_other_memory(x),
    "other memory of edges": lambda x, out, values: _given_other_memory(values),
}


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    """``APPNPConv`` makes weights of torch's default."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)


class _WithNorm(torch.nn.Module):
    """``RelGraphConv``, whose ``norm`` is a column."""

    def __init__(self, conv: torch.nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, graph: Any, x: Tensor, etypes: Tensor, norm: Tensor) -> Tensor:
        out: Tensor = self.conv(graph, x, etypes, norm.unsqueeze(1))
        return out


class _FirstOutput(torch.nn.Module):
    """A layer of several outputs, on a graph with a self-loop at every node."""

    def __init__(self, conv: torch.nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, graph: Any, x: Tensor, values: Tensor) -> Tensor:
        looped = dgl.add_self_loop(graph)
        out: Tensor = self.conv(looped, x, values[torch.arange(looped.num_edges()) % EDGES])[0]
        return out


class _Moving(torch.nn.Module):
    """``EGNNConv``, whose features and positions are columns of the same tensor."""

    def __init__(self, conv: torch.nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, graph: Any, x: Tensor, values: Tensor) -> Tensor:
        # DGL's gradients of self-loops are NaN.
        out = self.conv(without_self_loops(ORDINARY), x[:, :3], x[:, 3:], values)
        return torch.cat(out, 1)


SIZES = torch.tensor([3, 0, NODES - 4, 1])

Call = Callable[[Any, Tensor, Tensor], Tensor]


def _layer(
    make: Callable[[], torch.nn.Module], more: dict[str, Any] | None = None, **given: bool
) -> Callable[[], Call]:
    """Calls of a layer with features, and with the values of edges where it takes these.

    Args:
        make: the layer.
        more: further arguments of each call.
        given: the argument that takes the values of edges, true if all channels of them.
    """

    def made() -> Call:
        torch.manual_seed(1)
        module = make().double()
        name = next(iter(given), None)

        def call(graph: Any, x: Tensor, values: Tensor) -> Tensor:
            arguments = dict(more or {})
            if name is not None:
                arguments[name] = values if given[name] else values[:, 0]
            out: Tensor = module(graph, x, **arguments)
            return out

        call.module = module  # type: ignore[attr-defined]
        return call

    return made


def _function(call: Call) -> Callable[[], Call]:
    return lambda: call


def _message_passing(message: Any, reduce: Any) -> Callable[[], Call]:
    def call(graph: Any, x: Tensor, values: Tensor) -> Tensor:
        with graph.local_scope():
            graph.ndata["x"] = x
            graph.edata["v"] = values
            graph.update_all(message, reduce)
            out: Tensor = graph.ndata["out"]
            return out

    return lambda: call


_GSPMM = {
    f"{message}_{reduce}": _function(getattr(dgl.ops, f"{message}_{reduce}"))
    for message in ("u_mul_e", "u_add_e", "u_sub_e", "u_div_e")
    for reduce in ("sum", "mean", "max", "min")
}
_COPIES = {
    f"copy_u_{reduce}": (lambda operator: _function(lambda graph, x, values: operator(graph, x)))(
        getattr(dgl.ops, f"copy_u_{reduce}")
    )
    for reduce in ("sum", "mean", "max", "min")
}
_OF_EDGES = {
    f"copy_e_{reduce}": (
        lambda operator: _function(lambda graph, x, values: operator(graph, values))
    )(getattr(dgl.ops, f"copy_e_{reduce}"))
    for reduce in ("sum", "mean", "max", "min")
}
_GSDDMM = {
    f"{name} of ends": (lambda operator: _function(lambda graph, x, values: operator(graph, x, x)))(
        getattr(dgl.ops, name)
    )
    for name in ("u_dot_v", "u_add_v", "u_sub_v", "u_mul_v", "u_div_v")
}

_SEGMENTS = {
    f"segment_reduce {reduce}": (
        lambda reducer: _function(
            lambda graph, x, values: dgl.ops.segment_reduce(SIZES, x, reducer=reducer)
        )
    )(reduce)
    for reduce in ("sum", "mean", "max", "min")
}

CALLS: dict[str, Callable[[], Call]] = {
    **_GSPMM,
    **_COPIES,
    **_OF_EDGES,
    **_GSDDMM,
    "edge_softmax": _function(lambda graph, x, values: dgl.ops.edge_softmax(graph, values)),
    "edge_softmax by source": _function(
        lambda graph, x, values: dgl.ops.edge_softmax(graph, values, norm_by="src")
    ),
    **_SEGMENTS,
    "update_all sum": _message_passing(fn.u_mul_e("x", "v", "m"), fn.sum("m", "out")),
    "update_all max": _message_passing(fn.copy_u("x", "m"), fn.max("m", "out")),
    "GraphConv": _layer(lambda: dglnn.GraphConv(CHANNELS, 4, allow_zero_in_degree=True)),
    "GraphConv weighted": _layer(
        lambda: dglnn.GraphConv(CHANNELS, 9, norm="right", allow_zero_in_degree=True),
        edge_weight=False,
    ),
    "GraphConv without weight": _layer(
        lambda: dglnn.GraphConv(
            CHANNELS, CHANNELS, norm="none", weight=False, allow_zero_in_degree=True
        ),
        edge_weight=False,
    ),
    "SAGEConv mean": _layer(lambda: dglnn.SAGEConv(CHANNELS, 9, "mean")),
    "SAGEConv mean, weighted": _layer(
        lambda: dglnn.SAGEConv(CHANNELS, 4, "mean"), edge_weight=False
    ),
    "SAGEConv gcn": _layer(lambda: dglnn.SAGEConv(CHANNELS, 9, "gcn")),
    "SAGEConv pool": _layer(lambda: dglnn.SAGEConv(CHANNELS, 4, "pool")),
    "GINConv sum": _layer(lambda: dglnn.GINConv(None, "sum")),
    "GINConv max": _layer(lambda: dglnn.GINConv(None, "max")),
    "GINConv mean, weighted": _layer(lambda: dglnn.GINConv(None, "mean"), edge_weight=False),
    "SGConv": _layer(lambda: dglnn.SGConv(CHANNELS, 4, k=2, allow_zero_in_degree=True)),
    "TAGConv": _layer(lambda: dglnn.TAGConv(CHANNELS, 4, k=2)),
    "APPNPConv": _layer(lambda: dglnn.APPNPConv(2, 0.1)),
    "ChebConv": _layer(lambda: dglnn.ChebConv(CHANNELS, 4, 2), {"lambda_max": [2.0]}),
    "GATConv": _layer(lambda: dglnn.GATConv(CHANNELS, 5, 2, allow_zero_in_degree=True)),
    "GATConv residual": _layer(
        lambda: dglnn.GATConv(CHANNELS, 5, 2, residual=True, allow_zero_in_degree=True)
    ),
    "GATConv weighted": _layer(
        lambda: dglnn.GATConv(CHANNELS, 5, 2, allow_zero_in_degree=True), edge_weight=False
    ),
    "GATv2Conv": _layer(lambda: dglnn.GATv2Conv(CHANNELS, 5, 2, allow_zero_in_degree=True)),
    "DotGatConv": _layer(lambda: dglnn.DotGatConv(CHANNELS, 5, 2, allow_zero_in_degree=True)),
    "AGNNConv": _layer(lambda: dglnn.AGNNConv(allow_zero_in_degree=True)),
    "EdgeGATConv": _layer(
        lambda: dglnn.EdgeGATConv(CHANNELS, CHANNELS, 5, 2, allow_zero_in_degree=True),
        edge_feat=True,
    ),
    "EGATConv": _layer(
        lambda: _FirstOutput(dglnn.EGATConv(CHANNELS, CHANNELS, 4, 5, 2)), values=True
    ),
    "GMMConv": _layer(lambda: dglnn.GMMConv(CHANNELS, 8, CHANNELS, 3), pseudo=True),
    "GatedGraphConv": _layer(lambda: dglnn.GatedGraphConv(CHANNELS, 8, 2, 1)),
    "GatedGraphConv by types": _layer(
        lambda: dglnn.GatedGraphConv(CHANNELS, 8, 2, 1),
        {"etypes": torch.zeros(EDGES, dtype=torch.int64)},
    ),
    "HGTConv": _layer(
        lambda: dglnn.HGTConv(CHANNELS, 3, 2, 2, 3, dropout=0.0),
        {"ntype": torch.arange(NODES) % 2, "etype": torch.arange(EDGES) % 3},
    ),
    "HGTConv with norm": _layer(
        lambda: dglnn.HGTConv(CHANNELS, 3, 2, 2, 3, dropout=0.0, use_norm=True),
        {"ntype": torch.arange(NODES) % 2, "etype": torch.arange(EDGES) % 3},
    ),
    "RelGraphConv": _layer(
        lambda: dglnn.RelGraphConv(CHANNELS, 4, 3), {"etypes": torch.arange(EDGES) % 3}
    ),
    "RelGraphConv basis, weighted": _layer(
        lambda: _WithNorm(dglnn.RelGraphConv(CHANNELS, 9, 3, "basis", 2)),
        {"etypes": torch.arange(EDGES) % 3},
        norm=False,
    ),
    "EGNNConv": _layer(lambda: _Moving(dglnn.EGNNConv(3, 2 * CHANNELS, 5, CHANNELS)), values=True),
    "GCN2Conv": _layer(
        lambda: dglnn.GCN2Conv(CHANNELS, 1, allow_zero_in_degree=True),
        {"feat_0": torch.ones(NODES, CHANNELS, dtype=torch.float64)},
    ),
    "GCN2Conv weighted": _layer(
        lambda: dglnn.GCN2Conv(CHANNELS, 1, allow_zero_in_degree=True),
        {"feat_0": torch.ones(NODES, CHANNELS, dtype=torch.float64)},
        edge_weight=False,
    ),
    "NNConv": _layer(
        lambda: dglnn.NNConv(CHANNELS, 4, torch.nn.Linear(CHANNELS, CHANNELS * 4), "mean"),
        efeat=True,
    ),
    "CFConv": _layer(lambda: dglnn.CFConv(CHANNELS, CHANNELS, 8, 4), edge_feats=True),
    "EdgeConv": _layer(lambda: dglnn.EdgeConv(CHANNELS, 5, allow_zero_in_degree=True)),
}

if hasattr(dglnn, "GatedGCNConv"):  # not in DGL 1.1
    CALLS["GatedGCNConv"] = _layer(
        lambda: _FirstOutput(dglnn.GatedGCNConv(CHANNELS, CHANNELS, 5)), values=True
    )


def test_no_class_is_forgotten() -> None:
    graph = of_case(ORDINARY)
    x, values = torch.randn(NODES, CHANNELS), torch.rand(EDGES, CHANNELS)
    routed: set[type] = set()
    for make in CALLS.values():
        call = make()
        module = getattr(call, "module", None)
        if module is None:
            continue
        fastgraph.status().reset()
        with fastgraph.enabled(min_edges=0):
            call(graph, x, values)
        if any(row.routed for row in fastgraph.status().rows):
            routed.update(type(part) for part in module.modules())
    assert routed_classes() <= routed


def _gradients(
    call: Call, tied: bool, edit: str, *, constant: bool = False
) -> list[Tensor | None] | str:
    torch.manual_seed(0)
    graph = of_case(ORDINARY)
    leaf = torch.randn(NODES, CHANNELS, dtype=torch.float64)
    given = torch.rand(EDGES, CHANNELS, dtype=torch.float64) + 0.5
    if tied:
        leaf, given = leaf.round(), given.round() + 1
    leaf.requires_grad_(not constant)
    given.requires_grad_(not constant)
    x, values = leaf * 1, given * 1
    module = getattr(call, "module", None)
    leaves = [
        *(() if constant else (leaf, given)),
        *(() if module is None else module.parameters()),
    ]
    try:
        out = call(graph, x, values)
        loss = (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum()
        if EDITS[edit](x, out, values) is None and edit != "a row that is assigned":
            raise AssertionError("nothing was edited")
        loss = loss + out.sum() + x.square().sum() + values.square().sum()
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
    except RuntimeError as error:
        return next((text for text in _REFUSALS if text in str(error)), f"{error}")
    return [None if g is None else g.nan_to_num(0, 0, 0) for g in found]


# DGL saves these as they are beside views of others: its gradients are made of both contents.
MIXED = {("AGNNConv", "other memory"), ("EdgeGATConv", "other memory of edges")}

COPIED = ("NNConv", "CFConv", "EdgeConv")
"""Layers that keep a copy of features of nodes, whose edit changes no gradient."""

_REFUSALS = ("modified by an inplace operation", "must match the size of tensor")


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("tied", [False, True], ids=["distinct", "tied"])
@pytest.mark.parametrize("name", CALLS)
def test_edits_between_the_passes(name: str, tied: bool, edit: str) -> None:
    if (name, edit) in MIXED:
        pytest.skip("DGL's gradients are those of no content")
    call = CALLS[name]()
    expected = _expected(name, call, tied, edit)
    with fastgraph.enabled(min_edges=0):
        found = _gradients(call, tied, edit)
    if isinstance(expected, str) or isinstance(found, str):
        assert found == expected
    else:
        torch.testing.assert_close(found, expected)


def _expected(name: str, call: Call, tied: bool, edit: str, **options: bool) -> Any:
    """The gradients of DGL, or those of a call with copies where it has none or mixes two."""
    found = _gradients(call, tied, edit, **options)
    is_of_edges = "memory of edges" in edit
    if name not in COPIED or not (isinstance(found, str) or "memory" in edit):
        return found

    def with_copies(graph: Any, x: Tensor, values: Tensor) -> Tensor:
        return call(graph, x * 1, values * 1 if is_of_edges else values)

    with_copies.module = call.module  # type: ignore[attr-defined]
    return _gradients(with_copies, tied, edit, **options)


def _has_parameters(call: Call) -> bool:
    module = getattr(call, "module", None)
    return module is not None and any(True for _ in module.parameters())


LAYERS = [name for name, make in CALLS.items() if _has_parameters(make())]
EDITS_OF_FEATURES = ("a product", "a view", "a detached view", "a row that is assigned")


@pytest.mark.parametrize("edit", EDITS_OF_FEATURES)
@pytest.mark.parametrize("name", LAYERS)
def test_edits_of_features_that_need_no_gradient(name: str, edit: str) -> None:
    call = CALLS[name]()
    expected = _expected(name, call, False, edit, constant=True)
    with fastgraph.enabled(min_edges=0):
        found = _gradients(call, False, edit, constant=True)
    if isinstance(expected, str) or isinstance(found, str):
        assert found == expected
    else:
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["EGATConv", "GraphConv", "SAGEConv mean", "EdgeGATConv"])
def test_a_bias_that_is_edited_between_the_passes(name: str) -> None:
    call = CALLS[name]()
    biases = [p for n, p in call.module.named_parameters() if n.endswith("bias")]  # type: ignore[attr-defined]
    graph, given = of_case(ORDINARY), torch.rand(EDGES, CHANNELS)

    def gradient() -> list[Tensor]:
        x = torch.linspace(-1, 1, NODES * CHANNELS).view(NODES, CHANNELS).requires_grad_()
        out = call(graph, x, given)
        with torch.no_grad():
            for bias in biases:
                bias += 1
        return list(torch.autograd.grad(out.square().sum(), [x, *biases]))

    with torch.no_grad():
        for bias in biases:
            bias.zero_()
    expected = gradient()
    with torch.no_grad():
        for bias in biases:
            bias.zero_()
    with fastgraph.enabled(min_edges=0):
        torch.testing.assert_close(gradient(), expected)
