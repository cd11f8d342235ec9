"""Routes of whole layers that are not GAT's, beside DGL's own code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastgraph
from tests.ab import Arguments, arguments, assert_same
from tests.dgl.graphs import ALL, BLOCKS, ORDINARY, SQUARE, block, dgl, graph, of_case
from tests.graphs import Case, random_edges

import dgl.nn as dglnn  # isort: skip

IN, RELATIONS = 6, 3


def doubled(x: Tensor) -> Tensor:
    """An activation."""
    return 2 * x


SUMS: dict[str, Callable[[], nn.Module]] = {
    "GraphConv both": lambda: dglnn.GraphConv(IN, 4, allow_zero_in_degree=True),
    "GraphConv both, widening": lambda: dglnn.GraphConv(IN, 9, allow_zero_in_degree=True),
    "GraphConv right": lambda: dglnn.GraphConv(IN, 4, norm="right", allow_zero_in_degree=True),
    "GraphConv left": lambda: dglnn.GraphConv(
        IN, 9, norm="left", bias=False, allow_zero_in_degree=True
    ),
    "GraphConv none": lambda: dglnn.GraphConv(
        IN, IN, norm="none", weight=False, activation=doubled, allow_zero_in_degree=True
    ),
    "SAGEConv mean": lambda: dglnn.SAGEConv(IN, 4, "mean"),
    "SAGEConv mean, widening": lambda: dglnn.SAGEConv(IN, 9, "mean", feat_drop=0.5, bias=False),
    "SAGEConv gcn": lambda: dglnn.SAGEConv(IN, 4, "gcn", activation=doubled),
    "SAGEConv gcn, widening": lambda: dglnn.SAGEConv(IN, 9, "gcn", bias=False),
    "SAGEConv pool": lambda: dglnn.SAGEConv(IN, 4, "pool", norm=doubled),
}


def first_word(name: str) -> str:
    return name.partition(" ")[0]


def agree(module: nn.Module, call: Arguments, **options: Any) -> None:
    """The same with twice the factor: sums and products are taken in another order."""
    assert_same(module, call, factor=4.0, **options)


def test_a_weight_that_is_computed() -> None:
    module = nn.utils.parametrizations.weight_norm(dglnn.GraphConv(IN, 4))
    nodes = torch.arange(9)
    agree(module, arguments(dgl.graph((nodes, (nodes + 1) % 9)), torch.randn(9, IN)))


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("case", [case for case in SQUARE if case.num_edges > 0], ids=str)
def test_sums(name: str, case: Case) -> None:
    agree(SUMS[name](), arguments(of_case(case), torch.randn(case.num_src, IN)))


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("case", BLOCKS[:4], ids=str)
def test_sums_of_blocks(name: str, case: Case) -> None:
    mfg = block(case)
    x = torch.randn(mfg.num_src_nodes(), IN)
    agree(SUMS[name](), arguments(mfg, x))
    if "gcn" not in name:
        agree(SUMS[name](), arguments(mfg, (x, torch.randn(mfg.num_dst_nodes(), IN))))


@pytest.mark.parametrize("case", [c for c in ALL if c.num_src != c.num_dst], ids=str)
@pytest.mark.parametrize("kind", ["mean", "pool"])
def test_sums_between_two_kinds_of_nodes(case: Case, kind: str) -> None:
    if case.num_edges == 0:
        return
    features = torch.randn(case.num_src, IN), torch.randn(case.num_dst, 4)
    agree(dglnn.SAGEConv((IN, 4), 5, kind), arguments(of_case(case), features))
    conv = dglnn.GraphConv(IN, 4, allow_zero_in_degree=True)
    agree(conv, arguments(of_case(case), features))


@pytest.mark.parametrize("shape", [(150,), (150, 1)], ids=str)
@pytest.mark.parametrize(
    "name", [name for name in SUMS if "gcn" not in name and "pool" not in name]
)
def test_edge_weights(name: str, shape: tuple[int, ...]) -> None:
    weight = torch.rand(shape)
    agree(SUMS[name](), arguments(of_case(ORDINARY), torch.randn(30, IN), edge_weight=weight))


@pytest.mark.parametrize("weight", [torch.rand(149), torch.rand(150, 1, 1), [0.5] * 150])
def test_edge_weights_of_other_shapes_are_dgls_business(weight: Any) -> None:
    def outcome() -> Any:
        try:
            return module(of_case(ORDINARY), x, edge_weight=weight).shape
        except (AssertionError, AttributeError, RuntimeError, dgl.DGLError) as error:
            return type(error), str(error)

    x = torch.randn(30, IN)
    for module in (dglnn.SAGEConv(IN, 4, "mean"), dglnn.GraphConv(IN, 4, norm="none")):
        module._allow_zero_in_degree = True
        expected = outcome()
        with fastgraph.enabled(min_edges=0):
            assert outcome() == expected


def test_a_weight_from_outside() -> None:
    module = dglnn.GraphConv(IN, 4, weight=False, allow_zero_in_degree=True)
    agree(module, arguments(of_case(ORDINARY), torch.randn(30, IN), weight=torch.randn(IN, 4)))
    twice = dglnn.GraphConv(IN, 4, allow_zero_in_degree=True)
    with fastgraph.enabled(), pytest.raises(dgl.DGLError, match="External weight is provided"):
        twice(of_case(ORDINARY), torch.randn(30, IN), weight=torch.randn(IN, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ties_go_to_whom_dgl_gives_them(dtype: torch.dtype) -> None:
    module = dglnn.SAGEConv(2, 2, "pool").to(dtype)
    with torch.no_grad():
        for linear in (module.fc_pool, module.fc_neigh, module.fc_self):
            linear.weight.copy_(torch.eye(2))
    x = torch.randint(1, 3, (30, 2)).to(dtype)  # many are equal
    g = of_case(ORDINARY)

    def gradient() -> Tensor:
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad((module(g, leaf) * torch.arange(30)[:, None]).sum(), leaf)[0]

    expected = gradient()
    with fastgraph.enabled(strict=True):
        torch.testing.assert_close(gradient(), expected)
    assert fastgraph.status().row("SAGEConv").routed == 1


def test_what_has_no_whole_route_passes_messages() -> None:
    """The layer is not counted then: its sums are, by the functions that they call."""
    g, x = of_case(ORDINARY), torch.randn(30, 2, IN)
    conv = dglnn.GraphConv(IN, 4, allow_zero_in_degree=True)
    agree(conv, arguments(g, x), layer="dgl.gspmm")
    weight = torch.rand(150, 1)
    pool = dglnn.SAGEConv(IN, 4, "pool")
    with fastgraph.enabled(min_edges=0):
        pool(g, torch.randn(30, IN), edge_weight=weight)
        dglnn.SAGEConv(IN, 4, "lstm")(g, torch.randn(30, IN))
    rows = {row.layer for row in fastgraph.status().rows}
    assert "dgl.gspmm" in rows and not rows & {"dgl.GraphConv", "dgl.SAGEConv"}


def test_lonely_nodes_are_dgls_business() -> None:
    lonely = graph(torch.tensor([[0, 1], [1, 0]]), 3)
    edge_gat = dglnn.EdgeGATConv(IN, 2, 5, 3)
    calls = [
        (dglnn.GraphConv(IN, 4), ()),
        (dglnn.AGNNConv(), ()),
        (edge_gat, (torch.randn(2, 2),)),
    ]
    for module, more in calls:
        with fastgraph.enabled(), pytest.raises(dgl.DGLError, match="There are 0-in-degree nodes"):
            module(lonely, torch.randn(3, IN), *more)


def agnn(**options: Any) -> nn.Module:
    return dglnn.AGNNConv(init_beta=0.7, allow_zero_in_degree=True, **options)


@pytest.mark.parametrize("case", SQUARE, ids=str)
@pytest.mark.parametrize("learn_beta", [False, True])
def test_agnn(case: Case, learn_beta: bool) -> None:
    agree(agnn(learn_beta=learn_beta), arguments(of_case(case), torch.randn(case.num_src, IN)))


@pytest.mark.parametrize("case", BLOCKS[:4], ids=str)
def test_agnn_of_blocks_and_pairs(case: Case) -> None:
    mfg = block(case)
    x = torch.randn(mfg.num_src_nodes(), IN)
    agree(agnn(), arguments(mfg, x))
    agree(agnn(), arguments(mfg, (x, torch.randn(mfg.num_dst_nodes(), IN))))
    pair = torch.randn(case.num_src, IN), torch.randn(case.num_dst, IN)
    agree(agnn(), arguments(of_case(case), pair), reason="normalises one only")


def test_agnn_of_rows_without_length() -> None:
    """Upstream divides by 1e-12 there, so that gradients are large."""
    x = torch.randn(30, IN)
    x[3] = 0
    module, g = agnn(), of_case(ORDINARY)
    agree(module.double(), arguments(g, x.double()))


def test_agnn_twice_differentiated() -> None:
    module, g = agnn().double(), dgl.add_self_loop(of_case(ORDINARY))
    u, v = g.edges()

    def by_edges(x: Tensor) -> Tensor:
        normal = nn.functional.normalize(x, dim=-1)
        weights = (module.beta * (normal[u] * normal[v]).sum(-1)).exp()
        total = torch.zeros(30, dtype=x.dtype).index_add(0, v, weights)
        return torch.zeros_like(x).index_add(0, v, x[u] * (weights / total[v]).unsqueeze(-1))

    def second(compute: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(3)
        leaves = [torch.randn(30, IN, dtype=torch.float64, requires_grad=True), module.beta]
        loss = compute(leaves[0]).sigmoid().sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))

    with fastgraph.enabled(strict=True):
        ours = second(lambda x: module(g, x))
    torch.testing.assert_close(ours, second(by_edges))


EDGE_OPTIONS: list[dict[str, Any]] = [
    {},
    {"residual": False, "bias": False},
    {"activation": nn.ELU(inplace=True), "feat_drop": 0.5, "negative_slope": -0.1},
]


def edge_gat(in_feats: Any = IN, **options: Any) -> nn.Module:
    return dglnn.EdgeGATConv(in_feats, 2, 5, 3, allow_zero_in_degree=True, **options)


@pytest.mark.parametrize("case", SQUARE, ids=str)
@pytest.mark.parametrize("get_attention", [False, True])
def test_edge_gat(case: Case, get_attention: bool) -> None:
    x, edge_feat = torch.randn(case.num_src, IN), torch.randn(case.num_edges, 2)
    agree(edge_gat(), arguments(of_case(case), x, edge_feat, get_attention=get_attention))


@pytest.mark.parametrize("options", EDGE_OPTIONS, ids=", ".join)
def test_edge_gat_of_blocks_and_pairs(options: dict[str, Any]) -> None:
    mfg = block(ORDINARY)
    x, edge_feat = torch.randn(mfg.num_src_nodes(), IN), torch.randn(mfg.num_edges(), 2)
    agree(edge_gat(**options), arguments(mfg, x, edge_feat))
    features = x, torch.randn(mfg.num_dst_nodes(), 4)
    agree(edge_gat((IN, 4), **options), arguments(mfg, features, edge_feat))


def test_edge_gat_made_in_float64() -> None:
    """DGL makes ``attn_edge`` in float32 all the same, and multiplies it as torch promotes."""
    torch.set_default_dtype(torch.float64)
    try:
        module = edge_gat()
    finally:
        torch.set_default_dtype(torch.float32)
    assert module.attn_edge.dtype == torch.float32
    x, edge_feat = torch.randn(30, IN).double(), torch.randn(150, 2).double()
    agree(module, arguments(of_case(ORDINARY), x, edge_feat))


@pytest.mark.parametrize(
    ("module", "channels", "text"),
    [
        (dglnn.RelGraphConv(IN, 5, 3), IN + 1, "batch2 tensor to be"),
        (dglnn.AGNNConv(allow_zero_in_degree=True).double(), IN, "match edge features' data type"),
        (dglnn.AGNNConv(allow_zero_in_degree=True), 0, "to be a contiguous tensor"),
    ],
    ids=["another size", "a wider parameter", "no channels"],
)
def test_features_that_dgl_refuses(module: nn.Module, channels: int, text: str) -> None:
    more = [torch.arange(150) % 3] if isinstance(module, dglnn.RelGraphConv) else []
    with fastgraph.enabled(), pytest.raises((RuntimeError, dgl.DGLError), match=text):
        module(of_case(ORDINARY), torch.randn(30, channels), *more)


def test_edge_gat_drops_edges_by_their_attention() -> None:
    module = edge_gat(attn_drop=0.4, bias=False, residual=False)
    g = graph(random_edges(60, 60, 4000), 60)
    x, edge_feat = torch.randn(60, IN), torch.randn(4000, 2)
    with fastgraph.enabled(strict=True):
        out, alpha = module(g, x, edge_feat, get_attention=True)
    u, v = g.edges()
    messages = module.fc(x).view(60, 3, 5)[u] + module.fc_edge(edge_feat).view(-1, 3, 5)
    expected = torch.zeros(60, 3, 5).index_add(0, v, alpha * messages)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    assert 0.55 < (alpha != 0).double().mean() < 0.65


@pytest.mark.parametrize(
    ("reason", "change", "edge_feat"),
    [
        ("fc_edge has hooks", lambda m: m.fc_edge.register_forward_hook(lambda *_: None), (2,)),
        ("edge_feat of shape [150, 1, 2]", lambda m: None, (1, 2)),
    ],
)
def test_edge_gat_left_to_dgl(reason: str, change: Callable[[Any], Any], edge_feat: Any) -> None:
    module = edge_gat()
    change(module)
    call = arguments(of_case(ORDINARY), torch.randn(30, IN), torch.randn(150, *edge_feat))
    fastgraph.enable()
    with contextlib.suppress(RuntimeError, dgl.DGLError):
        module(*call[0])
    assert any(reason in r for r in fastgraph.status().row("EdgeGATConv").reasons)


REL_OPTIONS: list[dict[str, Any]] = [
    {},
    {"regularizer": "basis", "num_bases": 2, "layer_norm": True},
    {"regularizer": "bdd", "num_bases": 2},
    {"regularizer": "bdd", "num_bases": 1, "layer_norm": True},
    {"bias": False, "self_loop": False, "activation": doubled, "dropout": 0.5},
]


def test_types_of_edges_that_are_made_in_inference_mode() -> None:
    g, x = of_case(ORDINARY), torch.randn(30, IN)
    for module in (dglnn.RelGraphConv(IN, 5, 3), dglnn.HGTConv(IN, 4, 2, 2, 3)):
        kinds = [torch.arange(30) % 2] if isinstance(module, dglnn.HGTConv) else []
        expected = module.eval()(g, x, *kinds, torch.arange(150) % 3)
        with torch.inference_mode(), fastgraph.enabled(strict=True):
            found = module(g, x, *kinds, torch.arange(150) % 3)
        torch.testing.assert_close(found, expected.detach())


@pytest.mark.parametrize("options", REL_OPTIONS, ids=", ".join)
@pytest.mark.parametrize("case", BLOCKS, ids=str)
def test_relations(options: dict[str, Any], case: Case) -> None:
    module = dglnn.RelGraphConv(IN, 4, RELATIONS, **options)
    etypes = torch.randint(RELATIONS, (case.num_edges,))
    x = torch.randn(case.num_src, IN)
    agree(module, arguments(of_case(case), x, etypes))
    norm = torch.rand(case.num_edges, 1)
    agree(module, arguments(of_case(case), x, etypes.sort().values, norm, presorted=True))


def test_relations_of_blocks() -> None:
    mfg = block(ORDINARY)
    etypes = torch.randint(RELATIONS, (mfg.num_edges(),))
    module = dglnn.RelGraphConv(IN, 5, RELATIONS)
    agree(module, arguments(mfg, torch.randn(mfg.num_src_nodes(), IN), etypes))


def test_relations_that_change() -> None:
    """Types of edges that are edited in place are other types."""
    g, x = of_case(ORDINARY), torch.randn(30, IN)
    module, etypes = dglnn.RelGraphConv(IN, 5, RELATIONS), torch.randint(RELATIONS, (150,))
    with torch.no_grad():
        for _ in range(2):
            expected = module(g, x, etypes)
            with fastgraph.enabled(strict=True):
                torch.testing.assert_close(module(g, x, etypes), expected)
            etypes.copy_((etypes + 1) % RELATIONS)


@pytest.mark.parametrize(
    ("reason", "options", "etypes"),
    [
        ("types of edges from 0 to 3 for 3", {}, torch.arange(150) % 4),
        ("types of edges of shape [149]", {}, torch.zeros(149).long()),
    ],
)
def test_relations_left_to_dgl(reason: str, options: dict[str, Any], etypes: Tensor) -> None:
    module = dglnn.RelGraphConv(IN, 6, RELATIONS, **options)
    fastgraph.enable(min_edges=0)
    with contextlib.suppress(RuntimeError, IndexError, dgl.DGLError):
        module(of_case(ORDINARY), torch.randn(30, IN), etypes)
    assert any(reason in r for r in fastgraph.status().row("RelGraphConv").reasons)


HGT_OPTIONS: list[dict[str, Any]] = [{"dropout": 0.0}, {"dropout": 0.5, "use_norm": True}]


@pytest.mark.parametrize("options", HGT_OPTIONS, ids=", ".join)
@pytest.mark.parametrize("size", [IN, 8])
@pytest.mark.parametrize("case", BLOCKS, ids=str)
def test_hgt(options: dict[str, Any], size: int, case: Case) -> None:
    module = dglnn.HGTConv(size, 4, 2, 2, RELATIONS, **options)
    for relation in module.relation_pri:
        nn.init.uniform_(relation)
    ntype = torch.randint(2, (case.num_src,))
    etype = torch.randint(RELATIONS, (case.num_edges,))
    agree(module, arguments(of_case(case), torch.randn(case.num_src, size), ntype, etype))


def test_hgt_of_blocks() -> None:
    mfg = block(ORDINARY)
    ntype = torch.randint(2, (mfg.num_src_nodes(),))
    etype = torch.randint(RELATIONS, (mfg.num_edges(),))
    x = torch.randn(mfg.num_src_nodes(), IN)
    agree(dglnn.HGTConv(IN, 4, 2, 2, RELATIONS), arguments(mfg, x, ntype, etype))


@pytest.mark.parametrize("kind", ["mean", "gcn", "pool"])
@pytest.mark.parametrize("width", [4, 9])
@pytest.mark.parametrize("paired", [False, True])
def test_modules_are_called_in_upstreams_order(kind: str, width: int, paired: bool) -> None:
    if kind == "gcn" and paired:
        pytest.skip("a pair has no route")
    module = dglnn.SAGEConv(IN, width, kind, feat_drop=0.5)
    seen: list[tuple[str, Tensor]] = []
    for name, child in module.named_children():
        child.register_forward_hook(lambda _, __, out, n=name: seen.append((n, out.detach())))
    g, x = of_case(SQUARE[0]), torch.randn(SQUARE[0].num_src, IN)
    feat = (x, 2 * x) if paired else x

    def run() -> list[tuple[str, Tensor]]:
        seen.clear()
        torch.manual_seed(0)
        seen.append(("all", module(g, feat)))
        return list(seen)

    expected = run()
    with fastgraph.enabled(min_edges=0):
        found = run()
    assert fastgraph.status().row("SAGEConv").routed == 1
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_result_of_inference_may_be_changed_in_place() -> None:
    """Autograd refuses to record a change of a view that was made without gradients."""
    g, x = dgl.add_self_loop(of_case(SQUARE[0])), torch.randn(SQUARE[0].num_src, IN)
    added = torch.randn_like(x, requires_grad=True)
    module = dglnn.AGNNConv()
    with fastgraph.enabled(min_edges=0):
        with torch.no_grad():
            out = module(g, x)
        out += added
        assert fastgraph.status().row("AGNNConv").routed == 1
    (grad,) = torch.autograd.grad(out.sum(), added)
    assert torch.equal(grad, torch.ones_like(grad))
