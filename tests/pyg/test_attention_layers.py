"""GATv2Conv, GATConv and TransformerConv: routed where the operators can, upstream's elsewhere."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch_geometric import EdgeIndex
from torch_geometric.nn import GATConv, GATv2Conv, MessagePassing, TransformerConv
from torch_geometric.nn.models import GAT
from torch_geometric.utils import (
    to_torch_coo_tensor,
    to_torch_csr_tensor,
)

import fastgraph
from tests.ab import Arguments, arguments, assert_errors_alike, assert_same, run
from tests.graphs import random_edges, square_cases

NODES, CHANNELS = 24, 8
EDGES = random_edges(NODES, NODES, 90)
CLASSES = [GATv2Conv, GATConv, TransformerConv]

LAYERS: dict[str, Callable[[], MessagePassing]] = {
    "GATv2": lambda: GATv2Conv(CHANNELS, 5, heads=3),
    "GATv2-shared": lambda: GATv2Conv(CHANNELS, 5, heads=2, share_weights=True),
    "GATv2-mean": lambda: GATv2Conv(CHANNELS, 5, heads=2, concat=False, bias=False),
    "GATv2-residual": lambda: GATv2Conv(CHANNELS, 5, heads=2, residual=True),
    "GATv2-no-loops": lambda: GATv2Conv(CHANNELS, 5, add_self_loops=False, negative_slope=0.01),
    "GAT": lambda: GATConv(CHANNELS, 5, heads=3),
    "GAT-two-matrices": lambda: GATConv((CHANNELS, CHANNELS), 5, heads=2),
    "GAT-mean": lambda: GATConv(CHANNELS, 5, heads=2, concat=False, bias=False),
    "GAT-residual": lambda: GATConv(CHANNELS, 5, heads=2, residual=True),
    "GAT-no-loops": lambda: GATConv(CHANNELS, 5, add_self_loops=False, negative_slope=0.01),
    "Transformer": lambda: TransformerConv(CHANNELS, 5, heads=3),
    "Transformer-beta": lambda: TransformerConv(CHANNELS, 5, heads=2, beta=True),
    "Transformer-mean": lambda: TransformerConv(CHANNELS, 5, heads=2, concat=False, beta=True),
    "Transformer-no-root": lambda: TransformerConv(CHANNELS, 5, root_weight=False, bias=False),
}


def num_routed(cls: type[MessagePassing]) -> int:
    """How many calls of a layer ran through the operator, if none fell back."""
    rows = [row for row in fastgraph.status().rows if row.layer == cls.__name__]
    assert all(row.fell_back == 0 for row in rows)
    return sum(row.routed for row in rows)


def features(*shape: int) -> Tensor:
    torch.manual_seed(4)
    return torch.randn(*shape)


# On the emulator, tests/cuda/test_layers.py has these layers in these forms.
@pytest.mark.repeats
@pytest.mark.parametrize("kind", ["edge_index", "EdgeIndex"])
@pytest.mark.parametrize("name", LAYERS)
def test_constructor_options_and_forms_of_the_graph(name: str, kind: str) -> None:
    edges = {
        "edge_index": EDGES,
        "EdgeIndex": EdgeIndex(EDGES, sparse_size=(NODES, NODES)),
    }[kind]
    assert_same(LAYERS[name](), arguments(features(NODES, CHANNELS), edges))


@pytest.mark.parametrize("name", LAYERS)
def test_int32_indices_give_the_gradients_of_int64_ones(name: str) -> None:
    """Upstream's own gradients are wrong for int32, because those of scatter_reduce are."""
    module, x = LAYERS[name]().double(), features(NODES, CHANNELS).double()
    expected = run(module, arguments(x, EDGES))
    with fastgraph.enabled():
        ours = run(module, arguments(x, EDGES.int()))
    assert fastgraph.status().rows[0].routed == 1
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("case", [c for c in square_cases() if c.name != "int32"], ids=str)
@pytest.mark.parametrize("name", ["GATv2", "GATv2-no-loops", "GAT", "GAT-no-loops", "Transformer"])
def test_awkward_graphs(name: str, case: Any) -> None:
    assert_same(LAYERS[name](), arguments(features(case.num_src, CHANNELS), case.edge_index))


@pytest.mark.parametrize("sizes", [(9, 5), (5, 9)])
@pytest.mark.parametrize("cls", CLASSES)
def test_bipartite(cls: type[MessagePassing], sizes: tuple[int, int]) -> None:
    edges = random_edges(*sizes, 40)
    pair = (features(sizes[0], 6), features(sizes[1], CHANNELS))
    assert_same(cls((6, CHANNELS), 4, heads=2), arguments(pair, edges))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["GATv2", "GAT", "Transformer"])
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    assert_same(LAYERS[name]().to(dtype), arguments(features(NODES, CHANNELS).to(dtype), EDGES))


@pytest.mark.parametrize("name", ["GATv2", "GATv2-mean", "GAT", "Transformer"])
def test_autocast(name: str) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # Under autocast the truth is rounded to bfloat16 too, so only its scale can be compared.
        assert_same(LAYERS[name](), arguments(features(NODES, CHANNELS), EDGES), factor=4)


@pytest.mark.parametrize("v2", [False, True])
def test_the_gat_model(v2: bool) -> None:
    # Normalised over a batch, the gradients of biases would be nothing but roundings.
    model = GAT(CHANNELS, 16, 3, 4, heads=2, v2=v2, jk="cat", norm="layer")
    layer = type(model.convs[0]).__name__
    assert_same(model, arguments(features(NODES, CHANNELS), EDGES), layer=layer)


@pytest.mark.parametrize("cls", CLASSES)
def test_dropout_in_evaluation_changes_nothing(cls: type[MessagePassing]) -> None:
    module = cls(CHANNELS, 4, heads=2, dropout=0.6)
    assert_same(module, arguments(features(NODES, CHANNELS), EDGES), training=False)


@pytest.mark.parametrize("cls", CLASSES)
def test_dropout_in_training_follows_torchs_seed(cls: type[MessagePassing]) -> None:
    module, x = cls(CHANNELS, 4, heads=2, dropout=0.6), features(NODES, CHANNELS)
    with fastgraph.enabled():
        outs = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            outs.append(module(x, EDGES))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    assert fastgraph.status().rows[0].routed == 3


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("cls", CLASSES)
def test_gradient_checkpointing_repeats_the_dropout(
    cls: type[MessagePassing], reentrant: bool
) -> None:
    module = cls(CHANNELS, 4, heads=2, dropout=0.6)
    gradients = []
    with fastgraph.enabled():
        for checkpointed in (False, True):
            x = features(NODES, CHANNELS).requires_grad_()
            torch.manual_seed(3)
            if checkpointed:
                out = checkpoint(module, x, EDGES, use_reentrant=reentrant)
            else:
                out = module(x, EDGES)
            out.square().sum().backward()
            gradients.append(x.grad)
    assert num_routed(cls) == 3  # a checkpoint runs the forward pass again
    torch.testing.assert_close(*gradients)


# On the emulator, tests/simt saturates the operators and compares them with the exact result.
@pytest.mark.repeats
@pytest.mark.parametrize("cls", CLASSES)
def test_a_maximum_of_scores_that_overflow_the_exponential(cls: type[MessagePassing]) -> None:
    def draw(seed: int) -> tuple[MessagePassing, Arguments]:
        torch.manual_seed(seed)
        module, x = cls(CHANNELS, 4, heads=2), 5 * torch.randn(NODES, CHANNELS)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(20)
        return module, arguments(x, EDGES)

    assert_errors_alike(draw(seed) for seed in range(100))


@pytest.mark.parametrize("cls", CLASSES)
def test_lazy_layers(cls: type[MessagePassing]) -> None:
    conv, x = cls(-1, 4, heads=2), features(NODES, CHANNELS)
    with fastgraph.enabled(strict=True):
        out = conv(x, EDGES)
    torch.testing.assert_close(out, conv(x, EDGES))


@pytest.mark.parametrize("name", LAYERS)
def test_a_result_is_a_view_where_upstreams_is(name: str) -> None:
    """A view refuses some operations in place."""
    module, x = LAYERS[name](), features(NODES, CHANNELS)
    with fastgraph.enabled():
        ours = module(x, EDGES)
    assert ours._is_view() == module(x, EDGES)._is_view()


@pytest.mark.parametrize("cls", CLASSES)
def test_an_edge_index_of_another_size_fails_as_upstream(cls: type[MessagePassing]) -> None:
    graph = EdgeIndex(EDGES, sparse_size=(NODES + 3, NODES + 3))
    with fastgraph.enabled(), pytest.raises(ValueError, match="expected size"):
        cls(CHANNELS, 4)(features(NODES, CHANNELS), graph)


class OwnMessage(GATv2Conv):
    def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:
        return 2 * super().message(x_j, alpha)


class OwnEdgeUpdate(GATConv):
    def edge_update(
        self,
        alpha_j: Tensor,
        alpha_i: Tensor | None,
        edge_attr: Tensor | None,
        index: Tensor,
        ptr: Tensor | None,
        dim_size: int | None,
    ) -> Tensor:
        alpha = super().edge_update(alpha_j, alpha_i, edge_attr, index, ptr, dim_size)
        return alpha.square()


class OwnPropagate(TransformerConv):
    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        return 2 * MessagePassing.propagate(self, edge_index, size, **kwargs)


class OwnForward(GATv2Conv):
    """Overrides nothing that matters, so it comes along."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x, edge_index).relu()


@pytest.mark.parametrize(
    ("module", "extra", "reason"),
    [
        (OwnForward(CHANNELS, 4, heads=2), {}, None),
        (OwnMessage(CHANNELS, 4), {}, "message is overridden"),
        (OwnEdgeUpdate(CHANNELS, 4), {}, "edge_update is overridden"),
        (OwnPropagate(CHANNELS, 4), {}, "propagate is overridden"),
        (GATv2Conv(CHANNELS, 4, aggr="max"), {}, "aggregation MaxAggregation"),
        (GATConv(CHANNELS, 4, flow="target_to_source"), {}, "flow target_to_source"),
        (GATConv(CHANNELS, 4, edge_dim=2), {}, None),
        (GATConv(CHANNELS, 4), {"edge_attr": torch.rand(90, 2)}, None),
        (TransformerConv(CHANNELS, 4), {"edge_attr": torch.rand(90, 1, 1)}, None),
        (TransformerConv(CHANNELS, 4), {"edge_attr": torch.rand(90, 1, 4)}, None),
        (TransformerConv(CHANNELS, 4), {"edge_attr": torch.rand(4)}, "without edge_dim"),
        (GATConv(CHANNELS, 4), {"size": (NODES, NODES)}, None),
        (GATv2Conv(CHANNELS, 4), {"return_attention_weights": False}, None),
        (
            TransformerConv(CHANNELS, 4, dropout=0.5),
            {"return_attention_weights": True},
            "without the dropout",
        ),
    ],
)
def test_what_is_routed_and_what_is_not(
    module: MessagePassing, extra: dict[str, Any], reason: str | None
) -> None:
    assert_same(module, arguments(features(NODES, CHANNELS), EDGES, **extra), reason=reason)


EDGE_LAYERS: dict[str, Callable[[], MessagePassing]] = {
    "GATv2": lambda: GATv2Conv(CHANNELS, 5, heads=3, edge_dim=2),
    "GATv2-no-loops": lambda: GATv2Conv(CHANNELS, 5, heads=2, edge_dim=2, add_self_loops=False),
    "GAT": lambda: GATConv(CHANNELS, 5, heads=3, edge_dim=2),
    "GAT-no-loops": lambda: GATConv(CHANNELS, 5, heads=2, edge_dim=2, add_self_loops=False),
    "Transformer": lambda: TransformerConv(CHANNELS, 5, heads=3, edge_dim=2),
    "Transformer-beta": lambda: TransformerConv(CHANNELS, 5, heads=2, edge_dim=2, beta=True),
}


@pytest.mark.parametrize("needs", [None, True], ids=["", "weights"])
@pytest.mark.parametrize("name", EDGE_LAYERS)
def test_edge_features(name: str, needs: bool | None) -> None:
    call = arguments(
        features(NODES, CHANNELS), EDGES, features(90, 2), return_attention_weights=needs
    )
    assert_same(EDGE_LAYERS[name](), call)


@pytest.mark.parametrize("case", [c for c in square_cases() if c.name != "int32"], ids=str)
@pytest.mark.parametrize("name", EDGE_LAYERS)
def test_edge_features_on_awkward_graphs(name: str, case: Any) -> None:
    edge_attr = features(case.edge_index.shape[1], 2)
    call = arguments(features(case.num_src, CHANNELS), case.edge_index, edge_attr)
    assert_same(EDGE_LAYERS[name](), call)


@pytest.mark.parametrize("fill_value", ["mean", "add", "max", 0.5, torch.tensor([1.0, 2.0])])
@pytest.mark.parametrize("cls", [GATv2Conv, GATConv])
def test_features_of_self_loops(cls: type[MessagePassing], fill_value: Any) -> None:
    conv = cls(CHANNELS, 4, heads=2, edge_dim=2, fill_value=fill_value)
    if isinstance(fill_value, Tensor):
        # The comparison in float64 fills with float64.
        conv.double()
        assert_same(
            conv, arguments(features(NODES, CHANNELS).double(), EDGES, features(90, 2).double())
        )
    else:
        assert_same(conv, arguments(features(NODES, CHANNELS), EDGES, features(90, 2)))


@pytest.mark.parametrize("cls", [GATv2Conv, GATConv])
def test_one_feature_for_each_edge(cls: type[MessagePassing]) -> None:
    conv = cls(CHANNELS, 4, heads=2, edge_dim=1)
    assert_same(conv, arguments(features(NODES, CHANNELS), EDGES, features(90)))


@pytest.mark.parametrize("cls", [GATConv, GATv2Conv, TransformerConv])
def test_without_edges_the_same_parameters_get_a_gradient(cls: type[MessagePassing]) -> None:
    options = {} if cls is TransformerConv else {"add_self_loops": False}
    module = cls(CHANNELS, 4, edge_dim=3, **options)
    edges, edge_attr = torch.empty(2, 0, dtype=torch.int64), torch.empty(0, 3)
    trained = []
    for enabled in (False, True):
        module.zero_grad()
        with fastgraph.enabled() if enabled else contextlib.nullcontext():
            module(features(5, CHANNELS).float(), edges, edge_attr).sum().backward()
        trained.append({n for n, p in module.named_parameters() if p.grad is not None})
    assert trained[0] == trained[1]


@pytest.mark.parametrize("cls", CLASSES)
def test_edge_features_of_a_bipartite_graph(cls: type[MessagePassing]) -> None:
    pair = (features(9, 6), features(5, CHANNELS))
    edges = random_edges(9, 5, 40)
    conv = cls((6, CHANNELS), 4, heads=2, edge_dim=3)
    assert_same(conv, arguments(pair, edges, features(40, 3)))


@pytest.mark.parametrize("name", ["GATv2", "GAT", "Transformer"])
def test_edge_features_under_autocast(name: str) -> None:
    def draw(seed: int) -> tuple[MessagePassing, Arguments]:
        torch.manual_seed(seed)
        call = arguments(torch.randn(NODES, CHANNELS), EDGES, torch.randn(90, 2))
        return EDGE_LAYERS[name](), call

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_errors_alike(draw(seed) for seed in range(15))
    assert fastgraph.status().rows[0].fell_back == 0


@pytest.mark.parametrize("name", EDGE_LAYERS)
def test_edge_features_that_do_not_fit_fail_as_upstream(name: str) -> None:
    module, x = EDGE_LAYERS[name](), features(NODES, CHANNELS)
    for wrong in (features(89, 2), features(90, 3), features(90, 2).double()):
        with pytest.raises(Exception) as expected:
            module(x, EDGES, wrong)
        with fastgraph.enabled(), pytest.raises(expected.type):
            module(x, EDGES, wrong)


@pytest.mark.parametrize("name", ["GATv2", "GAT", "Transformer"])
def test_a_projection_that_is_watched_runs(name: str) -> None:
    module, seen = EDGE_LAYERS[name](), []
    module.lin_edge.register_forward_hook(lambda *_: seen.append(1))
    with fastgraph.enabled():
        module(features(NODES, CHANNELS), EDGES, features(90, 2))
    assert seen == [1]
    assert "lin_edge has hooks" in next(iter(fastgraph.status().rows[0].reasons))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("cls", CLASSES)
def test_attention_weights(cls: type[MessagePassing], dtype: torch.dtype) -> None:
    module, x, given = cls(CHANNELS, 4, heads=2), features(NODES, CHANNELS), EDGES.to(dtype)
    assert_same(module, arguments(x, EDGES, return_attention_weights=True))
    with torch.no_grad():  # upstream's gradient is wrong for int32
        _, (edges, alpha) = module(x, given, return_attention_weights=True)
    with fastgraph.enabled():
        _, (our_edges, our_alpha) = module(x, given, return_attention_weights=True)
        torch.testing.assert_close(our_edges, edges, rtol=0, atol=0)
        torch.testing.assert_close(our_alpha, alpha)
        if cls is not TransformerConv:
            # An edit must not reach what later calls use.
            our_edges.zero_()
            assert torch.equal(module(x, given, return_attention_weights=True)[1][0], edges)


def test_a_refused_call_is_counted_once() -> None:
    module = TransformerConv(CHANNELS, 4, dropout=0.5)
    with fastgraph.enabled():
        module(features(NODES, CHANNELS), EDGES, return_attention_weights=True)
    (row,) = fastgraph.status().rows
    assert (row.routed, row.fell_back, len(row.reasons)) == (0, 1, 1)


SIMPLE = EDGES.unique(dim=1)
MATRICES = {"csr": to_torch_csr_tensor, "coo": to_torch_coo_tensor}


@pytest.mark.repeats  # kernels are given the same rows, sorted
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.filterwarnings("ignore:Converting sparse tensor")
@pytest.mark.parametrize("layout", MATRICES)
@pytest.mark.parametrize("name", LAYERS)
def test_sparse_matrices(name: str, layout: str) -> None:
    matrix = MATRICES[layout](SIMPLE.flip(0), torch.rand(SIMPLE.shape[1]), size=(NODES, NODES))
    x, module = features(NODES, CHANNELS), LAYERS[name]()
    torch.testing.assert_close(module(x, matrix), module(x, SIMPLE))
    assert_same(module, arguments(x, matrix), upstream_call=arguments(x, SIMPLE))


@pytest.mark.parametrize("cls", CLASSES)
def test_a_bipartite_sparse_matrix(cls: type[MessagePassing]) -> None:
    edges = random_edges(9, 5, 40).unique(dim=1)
    matrix = to_torch_csr_tensor(edges.flip(0), size=(5, 9))
    pair = (features(9, 6), features(5, CHANNELS))
    assert_same(
        cls((6, CHANNELS), 4, heads=2),
        arguments(pair, matrix),
        upstream_call=arguments(pair, edges),
    )


@pytest.mark.parametrize("cls", CLASSES)
def test_a_sparse_matrix_that_does_not_fit_or_gives_weights(cls: type[MessagePassing]) -> None:
    conv, x = cls(CHANNELS, 4), features(NODES, CHANNELS)
    matrix = to_torch_csr_tensor(SIMPLE.flip(0), size=(NODES, NODES))
    wrong = to_torch_csr_tensor(SIMPLE.flip(0), size=(NODES + 1, NODES + 1))
    with fastgraph.enabled(), pytest.raises(ValueError, match="expected size"):
        conv(x, wrong)
    expected = conv(x, matrix, return_attention_weights=True)
    fastgraph.status().reset()
    with fastgraph.enabled():
        ours = conv(x, matrix, return_attention_weights=True)
    torch.testing.assert_close(ours[0], expected[0])
    assert "attention weights of" in next(iter(fastgraph.status().rows[0].reasons))


@pytest.mark.parametrize(
    "hook",
    [
        "edge_update_forward_pre",
        "edge_update_forward",
        "message_forward_pre",
        "propagate_forward",
        "aggregate_forward",
    ],
)
def test_message_passing_hooks_run(hook: str) -> None:
    conv = GATv2Conv(CHANNELS, 4)
    seen: list[str] = []
    handle = getattr(conv, f"register_{hook}_hook")(lambda *_: seen.append(hook))
    with fastgraph.enabled():
        conv(features(NODES, CHANNELS), EDGES)
        assert seen == [hook]
        handle.remove()
        conv(features(NODES, CHANNELS), EDGES)
    (row,) = fastgraph.status().rows
    assert seen == [hook] and row.routed == 1 and row.fell_back == 1


@pytest.mark.parametrize("cls", CLASSES)
def test_copies_and_the_state_dict(cls: type[MessagePassing]) -> None:
    conv, x = cls(CHANNELS, 4, heads=2), features(NODES, CHANNELS)
    keys = list(conv.state_dict())
    with fastgraph.enabled():
        expected = conv(x, EDGES)
        for clone in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv))):
            assert torch.equal(clone(x, EDGES), expected)
        assert list(conv.state_dict()) == keys
    assert num_routed(cls) == 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripting_sees_upstream() -> None:
    """GATConv and GATv2Conv of this PyG cannot be scripted with this torch, routed or not."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = TransformerConv(CHANNELS, 4, heads=2)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.conv(x, edge_index)

    model, x = Model(), features(NODES, CHANNELS)
    expected = model(x, EDGES)
    with fastgraph.enabled():
        torch.testing.assert_close(torch.jit.script(model)(x, EDGES), expected)


@pytest.mark.parametrize("cls", CLASSES)
def test_compiles(cls: type[MessagePassing]) -> None:
    conv, x = cls(CHANNELS, 4, heads=2), features(NODES, CHANNELS)
    expected = conv(x, EDGES)
    with fastgraph.enabled():
        graphs: list[str] = []

        def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
            graphs.append(graph.code)
            return graph.forward

        compiled = torch.compile(conv, backend=backend, fullgraph=True)
        torch.testing.assert_close(compiled(x, EDGES), expected)
    assert len(graphs) == 1 and "torch.ops.fastgraph." in graphs[0]


@pytest.mark.parametrize("cls", CLASSES)
def test_compiled_layers_sort_a_graph_once(
    cls: type[MessagePassing], sorted_graphs: list[fastgraph.Graph]
) -> None:
    conv, x, edges = cls(CHANNELS, 4, heads=2), features(NODES, CHANNELS), EDGES.clone()
    with fastgraph.enabled():
        compiled = torch.compile(conv, backend="aot_eager", fullgraph=True)
        for _ in range(3):
            compiled(x, edges).sum().backward()
    assert len(sorted_graphs) == 1


@pytest.mark.parametrize("cls", CLASSES)
def test_disabling_restores_the_same_function(cls: type[MessagePassing]) -> None:
    upstream = cls.forward
    with fastgraph.enabled():
        assert cls.forward is not upstream
    assert cls.forward is upstream


@pytest.mark.parametrize("cls", [GATConv, GATv2Conv])
def test_an_edit_of_the_graph_is_seen(cls: type[MessagePassing]) -> None:
    conv, x, edges = cls(CHANNELS, 4), features(NODES, CHANNELS), EDGES.clone()
    with fastgraph.enabled():
        conv(x, edges)
        edges[1, :30] = 2
        out = conv(x, edges)
    assert num_routed(cls) == 2
    torch.testing.assert_close(out, conv(x, edges))


@pytest.mark.parametrize("edge_dim", [None, 2])
@pytest.mark.parametrize("cls", [GATConv, GATv2Conv])
def test_an_edit_of_the_graph_between_the_passes(
    cls: type[MessagePassing], edge_dim: int | None
) -> None:
    """Upstream's gradient does not see it: it goes by a copy that has the self-loops."""
    conv = cls(CHANNELS, 4, edge_dim=edge_dim)
    edges = EDGES[:, EDGES[0] != EDGES[1]]
    leaves = [features(NODES, CHANNELS).requires_grad_()]
    if edge_dim is not None:
        leaves.append(features(edges.shape[1], edge_dim).requires_grad_())

    def gradients() -> tuple[Tensor, ...]:
        given = edges.clone()
        out = conv(leaves[0], given, *leaves[1:])
        given.zero_()
        return torch.autograd.grad(out.square().sum(), leaves)

    expected = gradients()
    with fastgraph.enabled(strict=True):
        torch.testing.assert_close(gradients(), expected)


@pytest.mark.parametrize("cls", [GATConv, GATv2Conv, TransformerConv])
def test_edited_edges_refuse_only_the_gradients_that_depend_on_them(
    cls: type[MessagePassing],
) -> None:
    """Without self-loops upstream saves the caller's edges for all gradients but the bias's."""
    conv = cls(CHANNELS, 4, **({} if cls is TransformerConv else {"add_self_loops": False}))
    x = features(NODES, CHANNELS).requires_grad_()
    bias = conv.lin_skip.bias if cls is TransformerConv else conv.bias

    def run() -> None:
        edges = EDGES.clone()
        loss = conv(x, edges).square().sum()
        edges.zero_()
        torch.autograd.grad(loss, bias, retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, x)

    run()
    with fastgraph.enabled(strict=True):
        run()


def test_training_after_inference_mode() -> None:
    conv, x, edges = GATv2Conv(CHANNELS, 4), features(NODES, CHANNELS), EDGES.clone()
    with fastgraph.enabled(strict=True):
        with torch.inference_mode():
            conv(x, edges)
        conv(x, edges).sum().backward()


@pytest.mark.parametrize("cls", [GATConv, GATv2Conv])
def test_training_on_a_graph_made_in_inference_mode(cls: type[MessagePassing]) -> None:
    conv, x = cls(CHANNELS, 4), features(NODES, CHANNELS).requires_grad_()
    with torch.inference_mode():
        edges = EDGES.clone()
    expected = torch.autograd.grad(conv(x, edges).square().sum(), x)
    with fastgraph.enabled(strict=True):
        ours = torch.autograd.grad(conv(x, edges).square().sum(), x)
    torch.testing.assert_close(ours, expected)


def test_indices_out_of_range() -> None:
    with fastgraph.enabled(), pytest.raises(IndexError):
        TransformerConv(CHANNELS, 4)(features(5, CHANNELS), torch.tensor([[0], [5]]))
