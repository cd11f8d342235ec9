"""Refused calls: the result is upstream's, and the reason is the expected one."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch_geometric import EdgeIndex
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.nn import (
    GATConv,
    GATv2Conv,
    GCNConv,
    GraphConv,
    MessagePassing,
    ResGatedGraphConv,
    SAGEConv,
    SumAggregation,
    TransformerConv,
)
from torch_geometric.utils import to_torch_coo_tensor, to_torch_csr_tensor

import fastgraph
from tests.ab import arguments, assert_same
from tests.graphs import random_edges

# No kernel of ours runs in what is left to upstream.
pytestmark = pytest.mark.repeats

NODES, CHANNELS = 24, 8
EDGES = random_edges(NODES, NODES, 90)


def features() -> Tensor:
    torch.manual_seed(4)
    return torch.randn(NODES, CHANNELS)


class OwnMessage(SAGEConv):
    def message(self, x_j: Tensor) -> Tensor:
        return x_j + 0 * torch.rand_like(x_j)


class OwnAggregate(SAGEConv):
    def aggregate(
        self, inputs: Tensor, index: Tensor, ptr: Tensor | None = None, dim_size: int | None = None
    ) -> Tensor:
        return 2 * super().aggregate(inputs, index, ptr, dim_size)


class OwnUpdate(SAGEConv):
    def update(self, inputs: Tensor) -> Tensor:
        return 2 * inputs


class OwnPropagate(GCNConv):
    def propagate(self, edge_index: Tensor, size: Any = None, **kwargs: Any) -> Tensor:
        return 2 * super().propagate(edge_index, size=size, **kwargs)


class OwnSelection(SAGEConv):
    def _index_select(self, src: Tensor, index: Tensor) -> Tensor:
        return 2 * super()._index_select(src, index)


class Inherits(SAGEConv):
    """Overrides nothing that matters, so it comes along."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x, edge_index).relu()


class Minimal(MessagePassing):
    """A user's own layer with the default message."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (OwnMessage(CHANNELS, 4), "its message is no edge program: it draws random numbers"),
        (OwnAggregate(CHANNELS, 4), "aggregate is overridden"),
        (OwnUpdate(CHANNELS, 4), "update is overridden"),
        (OwnSelection(CHANNELS, 4), "_index_select is overridden"),
        (ResGatedGraphConv(CHANNELS, 4), None),
        (SAGEConv(CHANNELS, 4, aggr=["mean", "median"]), "aggregation MedianAggregation"),
        (SAGEConv(CHANNELS, 4, aggr="median"), "aggregation MedianAggregation"),
        (Inherits(CHANNELS, 4), None),
        (Minimal("max"), None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, torch.nn.Module) else None,
)
def test_classes(module: MessagePassing, reason: str | None) -> None:
    assert_same(module, arguments(features(), EDGES), reason=reason)


def test_decomposed_layers() -> None:
    with fastgraph.enabled():
        GCNConv(CHANNELS, 4, decomposed_layers=2)(features(), EDGES)
    (row,) = fastgraph.status().rows
    assert row.routed == 0 and set(row.reasons) == {"propagate is replaced on the instance"}


def test_a_propagate_that_wraps_the_inherited_one() -> None:
    """The user's own runs, and what it calls takes a route."""
    torch.manual_seed(0)
    GCNConv(CHANNELS, 4)  # PyG generates a class's propagate for its first instance
    conv = OwnPropagate(CHANNELS, 4)
    expected = conv(features(), EDGES)
    with fastgraph.enabled(min_edges=0):
        torch.testing.assert_close(conv(features(), EDGES), expected)
        torch.testing.assert_close(copy.deepcopy(conv)(features(), EDGES), expected)
    (row,) = fastgraph.status().rows
    assert row.routed == 2 and row.reasons == {"propagate is overridden": 2}
    torch.testing.assert_close(conv(features(), EDGES), expected)


def test_learned_weights_of_a_maximum() -> None:
    call = arguments(features(), EDGES, torch.rand(90))
    reason = "max and min have no gradient for edge weights"
    assert_same(GraphConv(CHANNELS, 4, aggr="max"), call, reason=reason)


def test_sparse_matrices_that_learn_or_repeat() -> None:
    def rows() -> dict[str, int]:
        return dict(fastgraph.status().rows[0].reasons)

    x = features()
    learned = to_torch_csr_tensor(EDGES.unique(dim=1), size=(NODES, NODES)).requires_grad_()
    repeated = torch.sparse_coo_tensor(EDGES, torch.ones(90), (NODES, NODES))
    conv = SAGEConv(CHANNELS, 4, aggr="sum")
    for adj, reason in (
        (learned, "the sparse adjacency matrix requires a gradient"),
        (repeated, "the sparse COO adjacency matrix is not coalesced"),
    ):
        expected = conv(x, adj)
        fastgraph.status().reset()
        with fastgraph.enabled():
            torch.testing.assert_close(conv(x, adj), expected)
        assert rows() == {reason: 1}


HOOKS = [
    "propagate_forward_pre",
    "propagate_forward",
    "message_forward_pre",
    "message_forward",
    "aggregate_forward_pre",
    "aggregate_forward",
    "message_and_aggregate_forward_pre",
    "message_and_aggregate_forward",
]


@pytest.mark.parametrize("hook", HOOKS)
def test_message_passing_hooks_run(hook: str) -> None:
    conv = SAGEConv(CHANNELS, 4)
    seen: list[str] = []
    handle = getattr(conv, f"register_{hook}_hook")(lambda *_: seen.append(hook))
    adj = to_torch_csr_tensor(EDGES.unique(dim=1).flip(0), size=(NODES, NODES))
    with fastgraph.enabled():
        conv(features(), adj if "and_aggregate" in hook else EDGES)
        assert seen == [hook]
        handle.remove()
        fastgraph.status().reset()
        conv(features(), EDGES)
    assert fastgraph.status().rows[0].routed == 1


def watch_backward(conv: MessagePassing, seen: list[str]) -> None:
    conv.aggr_module.register_full_backward_hook(lambda *_: seen.append("backward"))


def replace_on_the_instance(conv: MessagePassing, seen: list[str]) -> None:
    original = conv.aggr_module.forward
    conv.aggr_module.forward = lambda *a, **k: (seen.append("instance"), 2 * original(*a, **k))[1]


@pytest.mark.parametrize("watch", [watch_backward, replace_on_the_instance])
@pytest.mark.parametrize("layer", [SAGEConv, GCNConv, GATv2Conv])
def test_an_aggregation_that_somebody_watches_or_replaces(layer: Any, watch: Any) -> None:
    conv, seen = layer(CHANNELS, 4), list[str]()
    watch(conv, seen)
    expected = conv(features(), EDGES)
    seen.clear()
    with fastgraph.enabled(min_edges=0):
        out = conv(features().requires_grad_(), EDGES)
        out.sum().backward()
    torch.testing.assert_close(out, expected)
    assert len(seen) == 1
    assert "the aggregation is replaced or has hooks" in fastgraph.status().rows[0].reasons


def test_an_aggregation_class_that_was_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SumAggregation.forward
    monkeypatch.setattr(SumAggregation, "forward", lambda *a, **k: 2 * original(*a, **k))
    conv = GCNConv(CHANNELS, 4)
    expected = conv(features(), EDGES)
    with fastgraph.enabled(min_edges=0):
        torch.testing.assert_close(conv(features(), EDGES), expected)


class OwnProduct(GraphConv):
    def message_and_aggregate(
        self, edge_index: Any, x: Any, edge_weight: Tensor | None = None
    ) -> Tensor:
        return 3 * super().message_and_aggregate(edge_index, x, edge_weight)


def test_an_own_product_with_a_sorted_edge_index() -> None:
    graph = EdgeIndex(EDGES, sparse_size=(NODES, NODES)).sort_by("col").values
    conv = OwnProduct(CHANNELS, 4)
    expected = conv(features(), graph)
    with fastgraph.enabled(min_edges=0):
        torch.testing.assert_close(conv(features(), graph), expected)
    assert "message_and_aggregate is overridden" in fastgraph.status().rows[0].reasons


def test_the_product_of_an_edge_index_ignores_the_flow() -> None:
    graph = EdgeIndex(EDGES, sparse_size=(NODES, NODES)).sort_by("col").values
    conv = GraphConv(CHANNELS, 4, flow="target_to_source")
    expected = conv(features(), graph)
    with fastgraph.enabled(min_edges=0):
        torch.testing.assert_close(conv(features(), graph), expected)
        assert "EdgeIndex.matmul does not look at the flow" in fastgraph.status().rows[0].reasons


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.filterwarnings("ignore:Converting sparse tensor")
@pytest.mark.parametrize("aggr", ["sum", "max"])
@pytest.mark.parametrize("kind", ["edge_index", "csr", "coo", "EdgeIndex"])
@pytest.mark.parametrize("layer", [SAGEConv, GraphConv])
def test_products_go_by_the_name_of_the_aggregation(layer: Any, kind: str, aggr: str) -> None:
    edges = torch.unique(EDGES.flip(0), dim=1)  # a matrix has rows of destinations
    graph = {
        "edge_index": EDGES,
        "csr": to_torch_csr_tensor(edges, size=NODES),
        "coo": to_torch_coo_tensor(edges, size=NODES),
        "EdgeIndex": EdgeIndex(EDGES, sparse_size=(NODES, NODES)).sort_by("col").values,
    }[kind]
    conv, x = layer(CHANNELS, 4, aggr="mean"), features()
    before = conv(x, graph)
    conv.aggr = aggr  # messages go by `aggr_module`, which stays
    is_product = kind in ("csr", "coo") or (kind == "EdgeIndex" and layer is GraphConv)
    expected = conv(x, graph)
    assert torch.equal(before, expected) != is_product
    with fastgraph.enabled(min_edges=0):
        torch.testing.assert_close(conv(x, graph), expected)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layer", [GATConv, GATv2Conv])
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo])
def test_entries_in_one_place_are_one_beside_self_loops(layout: torch.layout, layer: Any) -> None:
    edges = torch.cat([EDGES, EDGES[:, :40]], dim=1)
    edges = edges[:, edges[1].argsort(stable=True)]
    if layout == torch.sparse_csr:
        offsets = torch._convert_indices_from_coo_to_csr(edges[1], NODES)
        graph = torch.sparse_csr_tensor(offsets, edges[0], torch.ones(130), (NODES, NODES))
    else:
        graph = torch.sparse_coo_tensor(edges.flip(0), torch.ones(130), (NODES, NODES))
    conv, x = layer(CHANNELS, 4), features()
    expected = conv(x, torch.unique(edges, dim=1))
    with fastgraph.enabled(min_edges=0):
        for _ in range(3):  # PyG says of the caller's COO matrix that it is coalesced
            torch.testing.assert_close(conv(x, graph), expected)


def test_parameters_on_another_device_fail_as_upstream() -> None:
    for layer in (GATConv, GATv2Conv, TransformerConv, SAGEConv):
        conv = layer(CHANNELS, 4).to("meta")
        with pytest.raises(Exception) as expected:
            conv(features(), EDGES)
        with fastgraph.enabled(min_edges=0), pytest.raises(expected.type):
            conv(features(), EDGES)


def test_sparse_features_fail_as_upstream() -> None:
    sparse = features().to_sparse()
    for conv in (SAGEConv(CHANNELS, 4), GraphConv(CHANNELS, 4)):
        with pytest.raises(Exception) as expected:
            conv(sparse, EDGES)
        with fastgraph.enabled(min_edges=0), pytest.raises(expected.type):
            conv(sparse, EDGES)


def test_what_is_remembered_does_not_become_a_constant_of_a_traced_graph() -> None:
    for conv in (GCNConv(CHANNELS, 4), GATConv(CHANNELS, 4)):
        edges = EDGES[:, EDGES[0] != EDGES[1]]  # as many in both graphs
        with fastgraph.enabled(min_edges=0):
            conv(features(), edges)
            graph = make_fx(lambda *given: conv(*given))(features(), edges)  # noqa: B023
            torch.testing.assert_close(
                graph(features(), edges.flip(0)), conv(features(), edges.flip(0))
            )


def test_wrong_calls_name_the_layer() -> None:
    x = features()
    with fastgraph.enabled():
        for conv in (GATConv(CHANNELS, 4), GCNConv(CHANNELS, 4), SAGEConv(CHANNELS, 4)):
            with pytest.raises(TypeError, match=rf"{type(conv).__name__}\.forward\(\)"):
                conv(x, EDGES, unheard_of=1)


def test_module_hooks_are_none_of_our_business() -> None:
    conv = SAGEConv(CHANNELS, 4)
    seen: list[torch.Size] = []
    conv.register_forward_hook(lambda module, inputs, out: seen.append(out.shape))
    with fastgraph.enabled():
        conv(features(), EDGES)
    assert seen == [(NODES, 4)] and fastgraph.status().rows[0].routed == 1


EXPLAINED = [GCNConv, SAGEConv, GraphConv, GATConv, GATv2Conv, TransformerConv]


@pytest.mark.parametrize("layer", EXPLAINED)
def test_explaining(layer: Any) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = layer(CHANNELS, 3)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.conv(x, edge_index).log_softmax(-1)

    def explain(net: Net) -> None:
        explainer = Explainer(
            net,
            GNNExplainer(epochs=2),
            explanation_type="model",
            edge_mask_type="object",
            model_config={
                "mode": "multiclass_classification",
                "task_level": "node",
                "return_type": "log_probs",
            },
        )
        explanation = explainer(features(), EDGES)
        assert explanation.edge_mask.shape == (90,) and explanation.edge_mask.abs().sum() > 0

    net, earlier = Net(), Net()
    explain(earlier)
    with fastgraph.enabled(min_edges=0):
        explain(net)
    with fastgraph.enabled(min_edges=0, strict=True):
        for explained in (net, earlier):  # an instance-bound propagate is routed, too
            fastgraph.status().reset()
            explained(features(), EDGES)
            assert fastgraph.status().rows[0].routed == 1
            assert fastgraph.is_accelerated(explained, features(), EDGES) == (True, [])
    fastgraph.status().reset()
    net(features(), EDGES)
    assert not fastgraph.status().rows


@pytest.mark.parametrize("layer", EXPLAINED)
def test_layers_that_were_decomposed(layer: Any) -> None:
    conv = layer(CHANNELS, 4)
    conv.decomposed_layers = 2
    conv.decomposed_layers = 1
    assert_same(conv, arguments(features(), EDGES))


@pytest.mark.parametrize("layer", [GATConv, GCNConv])
def test_a_propagate_of_a_users_own_on_the_instance(layer: Any) -> None:
    conv = layer(CHANNELS, 4)
    original = conv.propagate
    conv.propagate = lambda *args, **kwargs: 2 * original(*args, **kwargs)
    expected = conv(features(), EDGES)
    with fastgraph.enabled(min_edges=0):
        torch.testing.assert_close(conv(features(), EDGES), expected)
    assert any("on the instance" in reason for reason in fastgraph.status().rows[0].reasons)


class PassesOn(MessagePassing):
    """For which PyG generates no ``propagate``, as it cannot tell the arguments."""

    def forward(self, x: Tensor, edge_index: Tensor, **options: Any) -> Tensor:
        return self.propagate(edge_index, x=x, **options)


class Multiplies(PassesOn):
    def message(self, x_j: Tensor, factor: float) -> Tensor:
        return factor * x_j


def test_a_forward_that_passes_on_what_it_is_given() -> None:
    assert_same(PassesOn("mean"), arguments(features(), EDGES))
    assert_same(Multiplies(), arguments(features(), EDGES, factor=2.0))
    original = vars(MessagePassing)["propagate"]
    with fastgraph.enabled():
        assert vars(MessagePassing)["propagate"] is not original
    assert vars(MessagePassing)["propagate"] is original


def test_forward_mode_and_functional_transforms() -> None:
    conv, x = SAGEConv(CHANNELS, 4), features()
    tangent = torch.randn_like(x)
    _, expected = torch.func.jvp(lambda v: conv(v, EDGES), (x,), (tangent,))
    with fastgraph.enabled():
        _, ours = torch.func.jvp(lambda v: conv(v, EDGES), (x,), (tangent,))
        torch.testing.assert_close(ours, expected)
        rows = torch.func.vmap(lambda v: conv(v, EDGES))(torch.stack([x, tangent]))
        torch.testing.assert_close(rows[1], conv(tangent, EDGES))
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, tangent)
            out = torch.autograd.forward_ad.unpack_dual(conv(dual, EDGES))
        torch.testing.assert_close(out.tangent, expected)
    reasons = fastgraph.status().rows[0].reasons
    assert set(reasons) == {
        "inside a torch.func transform",
        "forward-mode automatic differentiation is active",
    }


def test_tensor_subclasses_run_upstream() -> None:
    class Tagged(torch.Tensor):
        pass

    conv = SAGEConv(CHANNELS, 4)
    with fastgraph.enabled():
        conv(features().as_subclass(Tagged), EDGES)
    assert fastgraph.status().rows[0].reasons == {"x is a Tagged, not a plain tensor": 1}


def test_strict_raises_for_layers_with_a_route_only() -> None:
    with fastgraph.enabled(strict=True):
        ResGatedGraphConv(CHANNELS, 4)(features(), EDGES)
        with pytest.raises(fastgraph.RouteRefusedError, match="SAGEConv cannot be routed: aggreg"):
            SAGEConv(CHANNELS, 4, aggr="median")(features(), EDGES)


def test_min_edges() -> None:
    conv = SAGEConv(CHANNELS, 4)
    with fastgraph.enabled(min_edges=91):
        conv(features(), EDGES)
        assert fastgraph.status().rows[0].reasons == {"fewer than min_edges=91 edges": 1}
    with fastgraph.enabled(min_edges=90):
        conv(features(), EDGES)
    assert fastgraph.status().rows[0].routed == 1


def test_one_warning_for_each_reason() -> None:
    class Unheard(SAGEConv):
        def message(self, x_j: Tensor) -> Tensor:
            return x_j.flip(0)

    from fastgraph.routing import status

    status._warned.clear()
    conv = Unheard(CHANNELS, 4)
    with fastgraph.enabled(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            conv(features(), EDGES)
    ours = [w for w in caught if issubclass(w.category, fastgraph.FallbackWarning)]
    assert len(ours) == 1 and "Unheard runs upstream's own code" in str(ours[0].message)


def test_mismatched_sizes_raise_as_upstream_does() -> None:
    conv = SAGEConv((CHANNELS, CHANNELS), 4)
    pair = (features(), features()[:5])
    edges = random_edges(NODES, 5, 20)
    for call in ((pair, edges, (NODES, 6)), ((features()[:, :3], features()), edges, None)):
        with pytest.raises((ValueError, RuntimeError)) as upstream:
            conv(*call)
        with fastgraph.enabled(), pytest.raises(type(upstream.value)) as ours:
            conv(*call)
        assert str(ours.value) == str(upstream.value)
    gcn, weight = GCNConv(CHANNELS, 4, normalize=False), torch.rand(7)
    with pytest.raises(RuntimeError) as upstream:
        gcn(features(), EDGES, weight)
    with fastgraph.enabled(), pytest.raises(RuntimeError) as ours:
        gcn(features(), EDGES, weight)
    assert str(ours.value) == str(upstream.value)


def test_pickle_deepcopy_and_state_dict() -> None:
    conv, x = GCNConv(CHANNELS, 4), features()
    expected = conv(x, EDGES)
    before = set(conv.__dict__)
    with fastgraph.enabled():
        copies = [copy.deepcopy(conv), pickle.loads(pickle.dumps(conv))]
        assert set(conv.__dict__) == before
        assert list(conv.state_dict()) == list(copies[0].state_dict())
    for clone in copies:
        torch.testing.assert_close(clone(x, EDGES), expected)
        with fastgraph.enabled():
            torch.testing.assert_close(clone(x, EDGES), expected)
    sparse = to_torch_coo_tensor(EDGES.unique(dim=1).flip(0), size=(NODES, NODES))
    torch.testing.assert_close(pickle.loads(pickle.dumps(conv))(x, sparse), conv(x, sparse))


def test_arguments_of_propagate_go_by_position_too() -> None:
    conv, x = SAGEConv(CHANNELS, 4), features()
    expected = conv.propagate(EDGES, (x, x))
    with pytest.raises(TypeError) as upstream:
        conv.propagate(EDGES)
    with fastgraph.enabled():
        torch.testing.assert_close(conv.propagate(EDGES, (x, x)), expected)
        torch.testing.assert_close(conv.propagate(EDGES, (x, x), (NODES, NODES)), expected)
        with pytest.raises(TypeError) as ours:
            conv.propagate(EDGES)
    assert str(ours.value) == str(upstream.value)
    row = fastgraph.status().rows[0]
    assert (row.routed, row.fell_back) == (2, 0)
