"""Routes of attention layers beside DGL's own code: outputs, gradients, attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fastgraph
from tests.ab import arguments, assert_same
from tests.dgl.graphs import ALL, BLOCKS, ORDINARY, SQUARE, block, dgl, graph, of_case
from tests.graphs import Case, random_edges

from dgl.nn import DotGatConv, GATConv, GATv2Conv  # isort: skip

LAYERS = (GATConv, GATv2Conv, DotGatConv)
IN = 6


def layer(cls: type[nn.Module], in_feats: Any = IN, heads: int = 3, **options: Any) -> nn.Module:
    return cls(in_feats, 5, heads, allow_zero_in_degree=True, **options)


def pair(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(case.num_src, IN), torch.randn(case.num_dst, 4)


@pytest.mark.parametrize("cls", LAYERS)
@pytest.mark.parametrize("case", SQUARE, ids=str)
@pytest.mark.parametrize("heads", [1, 3])
def test_graphs(cls: type[nn.Module], case: Case, heads: int) -> None:
    x = torch.randn(case.num_src, IN)
    assert_same(layer(cls, heads=heads), arguments(of_case(case), x))


@pytest.mark.parametrize("cls", LAYERS)
@pytest.mark.parametrize("case", ALL, ids=str)
def test_pairs_of_features(cls: type[nn.Module], case: Case) -> None:
    g = of_case(case)
    if cls is DotGatConv and g.is_homogeneous:
        reason = "of which DGL's code uses the second only"
        features = torch.randn(case.num_src, IN), torch.randn(case.num_dst, IN)
        assert_same(layer(cls, (IN, IN)), arguments(g, features), reason=reason)
    else:
        assert_same(layer(cls, (IN, 4)), arguments(g, pair(case)))


@pytest.mark.parametrize("cls", [GATConv, GATv2Conv])
def test_a_pair_of_features_for_a_layer_made_for_one(cls: type[nn.Module]) -> None:
    features = torch.randn(30, IN), torch.randn(30, IN)
    assert_same(layer(cls), arguments(of_case(ORDINARY), features))


@pytest.mark.parametrize(
    ("cls", "in_feats"), [(DotGatConv, IN), (DotGatConv, (IN, IN)), (GATConv, (IN, IN))]
)
def test_features_in_another_form_are_dgls_business(cls: type[nn.Module], in_feats: Any) -> None:
    x = torch.randn(30, IN)
    features = (x, x) if in_feats == IN else x
    with fastgraph.enabled(), pytest.raises(AttributeError, match="has no attribute 'fc"):
        layer(cls, in_feats)(of_case(ORDINARY), features)
    assert fastgraph.status().row(cls.__name__).fell_back == 1


@pytest.mark.parametrize("cls", LAYERS)
@pytest.mark.parametrize("case", BLOCKS, ids=str)
def test_blocks(cls: type[nn.Module], case: Case) -> None:
    mfg = block(case)
    x = torch.randn(mfg.num_src_nodes(), IN)
    options = {} if cls is DotGatConv else {"residual": True}
    assert_same(layer(cls, **options), arguments(mfg, x))
    features = x, torch.randn(mfg.num_dst_nodes(), 4)
    assert_same(layer(cls, (IN, 4), **options), arguments(mfg, features))


OPTIONS: list[dict[str, Any]] = [
    {"residual": True},
    {"residual": True, "bias": False},
    {"bias": False},
    {"activation": nn.ReLU()},
    {"activation": nn.ELU(inplace=True), "residual": True},
    {"negative_slope": 0.01},
    {"negative_slope": -0.5},
    {"feat_drop": 0.5, "residual": True},
    {"attn_drop": 1.0},
]


@pytest.mark.parametrize("cls", [GATConv, GATv2Conv])
@pytest.mark.parametrize("options", OPTIONS, ids=", ".join)
@pytest.mark.parametrize("get_attention", [False, True])
@pytest.mark.parametrize("is_block", [False, True])
def test_options(
    cls: type[nn.Module], options: dict[str, Any], get_attention: bool, is_block: bool
) -> None:
    g = block(ORDINARY) if is_block else of_case(ORDINARY)
    x = torch.randn(g.num_src_nodes(), IN)
    # Dropout of features draws a number for each, so that it sees the same ones.
    assert_same(layer(cls, **options), arguments(g, x, get_attention=get_attention))


@pytest.mark.parametrize("cls", [GATConv, GATv2Conv])
@pytest.mark.parametrize("get_attention", [False, True])
def test_a_residual_that_is_the_input(cls: type[nn.Module], get_attention: bool) -> None:
    module = layer(cls, 15, residual=True)
    x = torch.randn(30, 15)
    assert_same(module, arguments(of_case(ORDINARY), x, get_attention=get_attention))
    before = x.clone()
    with fastgraph.enabled():
        module(of_case(ORDINARY), x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("is_block", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_shared_weights(is_block: bool, residual: bool) -> None:
    g = block(ORDINARY) if is_block else of_case(ORDINARY)
    x = torch.randn(g.num_src_nodes(), IN)
    assert_same(layer(GATv2Conv, share_weights=True, residual=residual), arguments(g, x))


@pytest.mark.parametrize("cls", LAYERS)
@pytest.mark.parametrize("case", ALL, ids=str)
def test_attention_by_number_of_edge(cls: type[nn.Module], case: Case) -> None:
    g = of_case(case)
    if g.is_homogeneous:
        call = arguments(g, torch.randn(case.num_src, IN), get_attention=True)
        assert_same(layer(cls), call)
    else:
        assert_same(layer(cls, (IN, 4)), arguments(g, pair(case), get_attention=True))


@pytest.mark.parametrize("cls", [GATConv, GATv2Conv])
def test_dropout_of_attention(cls: type[nn.Module]) -> None:
    g = graph(random_edges(60, 60, 4000), 60)
    module, x = layer(cls, attn_drop=0.4, bias=False), torch.randn(60, IN)
    with fastgraph.enabled(strict=True):
        torch.manual_seed(1)
        out, alpha = module(g, x, get_attention=True)
        torch.manual_seed(1)
        again, _ = module(g, x, get_attention=True)
        kept = (alpha != 0).double().mean()
        assert torch.equal(out, again)
        assert 0.55 < kept < 0.65
        module.eval()
        _, whole = module(g, x, get_attention=True)
    torch.testing.assert_close(alpha[alpha != 0], whole[alpha != 0] / 0.6)
    weighed = (module.fc_src if cls is GATv2Conv else module.fc)(x).view(60, 3, 5)
    if cls is GATConv or module.fc_src.bias is None:
        torch.testing.assert_close(out, dgl.ops.u_mul_e_sum(g, weighed, alpha))


@pytest.mark.parametrize("cls", [GATConv, GATv2Conv])
def test_dropout_is_a_matter_of_its_own_module(cls: type[nn.Module]) -> None:
    module = layer(cls, attn_drop=0.9)
    module.attn_drop.eval()
    assert_same(module.eval(), arguments(of_case(ORDINARY), torch.randn(30, IN)), training=False)
    x = torch.randn(30, IN)
    with fastgraph.enabled(strict=True):
        module.train().attn_drop.eval()
        assert torch.equal(module(of_case(ORDINARY), x), module(of_case(ORDINARY), x))


@pytest.mark.parametrize("cls", LAYERS)
def test_a_graph_that_came_as_csc(cls: type[nn.Module]) -> None:
    ptr = torch.tensor([0, 3, 3, 5])
    index = torch.tensor([2, 0, 0, 1, 2])
    without_ids = torch.tensor([], dtype=torch.int64)
    for ids in (torch.tensor([4, 0, 2, 1, 3]), without_ids):
        # With LIBXSMM, DGL's own backward pass fails without numbers of edges.
        dgl.use_libxsmm(ids is not without_ids)
        call = arguments(dgl.graph(("csc", (ptr, index, ids))), torch.randn(3, IN))
        assert_same(layer(cls), call)
        call[1]["get_attention"] = True
        assert_same(layer(cls), call)
    dgl.use_libxsmm(True)


@pytest.mark.parametrize("cls", LAYERS)
def test_without_allowing_nodes_without_edges_dgl_says_no(cls: type[nn.Module]) -> None:
    module = cls(IN, 5, 3)
    lonely = graph(torch.tensor([[0, 1], [1, 0]]), 3)
    with (
        fastgraph.enabled(),
        pytest.raises(dgl.DGLError, match="There are 0-in-degree nodes in the graph"),
    ):
        module(lonely, torch.randn(3, IN))
    row = fastgraph.status().row(cls.__name__)
    assert list(row.reasons) == ["nodes without incoming edges, which the layer does not allow"]
    assert_same(module, arguments(dgl.add_self_loop(lonely), torch.randn(3, IN)))


@pytest.mark.parametrize("cls", LAYERS)
def test_the_graph_keeps_its_features(cls: type[nn.Module]) -> None:
    g = of_case(ORDINARY)
    g.ndata["ft"], g.edata["a"] = torch.ones(30), torch.ones(150)
    with fastgraph.enabled(strict=True):
        layer(cls)(g, torch.randn(30, IN))
    assert set(g.ndata) == {"ft"} and set(g.edata) == {"a"}


@pytest.mark.parametrize("cls", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(cls: type[nn.Module], dtype: torch.dtype) -> None:
    module, x = layer(cls), torch.randn(30, IN)
    with fastgraph.enabled(strict=True):
        out = module.to(dtype)(of_case(ORDINARY), x.to(dtype))
    expected = module.double()(of_case(ORDINARY), x.to(dtype).double())
    assert out.dtype == dtype
    tolerance = 1e-12 if dtype == torch.float64 else 0.05
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def scores(module: nn.Module, src: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
    """The scores of edges, given projected features at their ends ``[E, heads, channels]``."""
    if isinstance(module, GATConv):
        return module.leaky_relu((src * module.attn_l + dst * module.attn_r).sum(-1))
    if isinstance(module, GATv2Conv):
        return (module.leaky_relu(src + dst) * module.attn).sum(-1)
    return (src * dst).sum(-1) / src.shape[-1] ** 0.5


def by_edges(module: nn.Module, g: Any, x: torch.Tensor) -> torch.Tensor:
    """A layer without bias and residual in torch's own operations, on a graph without gaps."""
    has_two = isinstance(module, GATv2Conv)
    projections = (module.fc_src, module.fc_dst) if has_two else (module.fc, module.fc)
    src, dst = (fc(x).view(len(x), 3, 5) for fc in projections)
    u, v = g.edges()
    weights = scores(module, src[u], dst[v]).exp()
    total = torch.zeros(len(x), 3, dtype=x.dtype).index_add(0, v, weights)
    messages = src[u] * (weights / total[v]).unsqueeze(-1)
    return torch.zeros_like(src).index_add(0, v, messages)


@pytest.mark.parametrize("cls", LAYERS)
def test_double_backward(cls: type[nn.Module]) -> None:
    """Against torch: DGL's own edge_softmax has no second derivative, which it does not say."""
    module, g = layer(cls).double(), dgl.add_self_loop(of_case(ORDINARY))

    def second(compute: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        torch.manual_seed(3)
        x = torch.randn(30, IN, dtype=torch.float64, requires_grad=True)
        (first,) = torch.autograd.grad(compute(x).sigmoid().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    with fastgraph.enabled(strict=True):
        torch.testing.assert_close(
            second(lambda x: module(g, x)), second(lambda x: by_edges(module, g, x))
        )


class Doubled(GATConv):  # type: ignore[misc]
    """A user's subclass, which calls upstream's."""

    def forward(self, graph: Any, feat: Any) -> Any:
        return 2 * super().forward(graph, feat)


def test_subclasses() -> None:
    assert_same(layer(Doubled), arguments(of_case(ORDINARY), torch.randn(30, IN)))


Change = Callable[[Any], None]

REFUSALS: list[tuple[str, Change]] = [
    ("attn_drop has hooks", lambda m: m.attn_drop.register_forward_hook(lambda *_: None)),
    ("attn_drop is a Identity", lambda m: setattr(m, "attn_drop", nn.Identity())),
    ("leaky_relu is a ELU", lambda m: setattr(m, "leaky_relu", nn.ELU())),
]


@pytest.mark.parametrize("cls", [GATConv, GATv2Conv])
@pytest.mark.parametrize(("reason", "change"), REFUSALS, ids=[r for r, _ in REFUSALS])
def test_changed_layers_run_dgls_code(cls: type[nn.Module], reason: str, change: Change) -> None:
    module = layer(cls)
    change(module)
    assert_same(module, arguments(of_case(ORDINARY), torch.randn(30, IN)), reason=reason)


@pytest.mark.parametrize("get_attention", [False, True])
@pytest.mark.parametrize("case", SQUARE, ids=str)
def test_edge_weights(case: Case, get_attention: bool) -> None:
    weight = torch.rand(case.num_edges)
    x = torch.randn(case.num_src, IN)
    call = arguments(of_case(case), x, edge_weight=weight, get_attention=get_attention)
    assert_same(layer(GATConv, residual=True), call)


def test_edge_weights_of_other_shapes_run_dgls_code() -> None:
    call = arguments(of_case(ORDINARY), torch.randn(30, IN), edge_weight=torch.rand(150, 1))
    with fastgraph.enabled(), pytest.raises((dgl.DGLError, RuntimeError)):
        layer(GATConv)(*call[0], **call[1])
    assert list(fastgraph.status().row("GATConv").reasons) == ["edge_weight of shape [150, 1]"]


def test_features_of_more_dimensions_run_dgls_code() -> None:
    call = arguments(of_case(ORDINARY), torch.randn(30, 2, IN))
    assert_same(layer(GATConv), call, reason="features that are not a dense matrix")


@pytest.mark.parametrize("cls", LAYERS)
def test_formats_without_csc_are_dgls_business(cls: type[nn.Module]) -> None:
    with fastgraph.enabled(), pytest.raises(dgl.DGLError, match="cannot create CSC matrix"):
        layer(cls)(of_case(ORDINARY).formats("coo"), torch.randn(30, IN))
    (reason,) = fastgraph.status().row(cls.__name__).reasons
    assert reason == "a graph that is restricted to formats without CSC"


@pytest.mark.parametrize("cls", LAYERS)
def test_small_graphs_are_left_to_dgl_on_request(cls: type[nn.Module]) -> None:
    with fastgraph.enabled(min_edges=151):
        layer(cls)(of_case(ORDINARY), torch.randn(30, IN))
    assert "fewer than min_edges=151 edges" in fastgraph.status().row(cls.__name__).reasons


@pytest.mark.parametrize("cls", LAYERS)
def test_features_that_do_not_fit_are_dgls_business(cls: type[nn.Module]) -> None:
    with fastgraph.enabled(), pytest.raises(dgl.DGLError):
        layer(cls)(of_case(ORDINARY), torch.randn(29, IN))
    (reason,) = fastgraph.status().row(cls.__name__).reasons
    assert reason.startswith("features of 29 sources and 29 destinations for a graph with 30 and")


@pytest.mark.parametrize("cls", LAYERS)
def test_integers_are_dgls_business(cls: type[nn.Module]) -> None:
    with fastgraph.enabled(), pytest.raises(RuntimeError):
        layer(cls)(of_case(ORDINARY), torch.ones(30, IN, dtype=torch.int64))
    assert fastgraph.status().row(cls.__name__).routed == 0


def test_strict_raises() -> None:
    with fastgraph.enabled(strict=True), pytest.raises(fastgraph.RouteRefusedError, match="dense"):
        layer(GATConv)(of_case(ORDINARY), torch.randn(30, 2, IN))


@pytest.mark.parametrize("cls", LAYERS)
def test_several_relations_are_dgls_business(cls: type[nn.Module]) -> None:
    edges = tuple(random_edges(5, 5, 9))
    g = dgl.heterograph({("a", "r", "a"): edges, ("a", "s", "a"): edges})
    with fastgraph.enabled(), pytest.raises((dgl.DGLError, TypeError)):
        layer(cls)(g, torch.randn(5, IN))
    assert "several relations at once" in fastgraph.status().row(cls.__name__).reasons
