"""The routes of message passing: ``dgl.ops``, ``update_all``, and layers made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastgraph
from tests.ab import arguments, assert_same, double, run
from tests.dgl.graphs import ALL, BLOCKS, ORDINARY, SQUARE, block, dgl, graph, of_case
from tests.graphs import Case, quantised, random_edges

import dgl.function as fn  # isort: skip
import dgl.nn as dglnn  # isort: skip
from dgl.nn.functional import edge_softmax  # isort: skip

GSPMM, GSDDMM, SOFTMAX = "dgl.gspmm", "dgl.gsddmm", "dgl.edge_softmax"


class Op(nn.Module):
    """A function of ``dgl.ops`` as a module, for :func:`assert_same`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.function = getattr(dgl.ops, name)

    def forward(self, g: Any, *features: Tensor) -> Tensor:
        out: Tensor = self.function(g, *features)
        # What DGL itself makes of the infinity of nodes without edges.
        return out.masked_fill(out.isinf(), 0)


@pytest.mark.parametrize("case", ALL, ids=str)
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 2)], ids=str)
def test_copies_of_sources(case: Case, reduce: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(case.num_src, *shape)
    assert_same(
        Op(f"copy_u_{reduce}"),
        arguments(of_case(case), x),
        layer=GSPMM,
        reason=refused_without_edges(case, reduce),
    )


def refused_without_edges(case: Case, reduce: str) -> str | None:
    is_refused = reduce in ("max", "min") and case.num_edges == 0
    return "without any edge" if is_refused else None


@pytest.mark.parametrize("case", ALL, ids=str)
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("shape", [(16,), (19,), (3, 6), (2, 2, 5)], ids=str)
def test_copies_of_edges(case: Case, reduce: str, shape: tuple[int, ...]) -> None:
    if refused_without_edges(case, reduce):
        pytest.skip("DGL's own backward pass raises, see below")
    x = torch.randn(case.num_edges, *shape)
    assert_same(Op(f"copy_e_{reduce}"), arguments(of_case(case), x), layer=GSPMM)


@pytest.mark.parametrize("case", ALL, ids=str)
@pytest.mark.parametrize("op", ["u_add_v", "u_sub_v", "v_mul_e", "e_add_u", "copy_u"])
def test_gradients_of_edges_are_summed_for_nodes(case: Case, op: str) -> None:
    """DGL's own function of edges ends in sums of edges in its backward pass."""
    g = of_case(case)
    rows = {"u": case.num_src, "v": case.num_dst, "e": case.num_edges}
    ends = op[-1] if op == "copy_u" else op[0] + op[-1]
    features = [torch.randn(rows[end], 131) for end in ends]
    graded = sum(end != "e" for end in ends)
    module, call = Op(op), arguments(g, *features)
    upstream, truth = run(module, call), run(module, double(call))
    fastgraph.status().reset()
    with fastgraph.enabled(strict=True):
        ours = run(module, call)
    assert fastgraph.status().row(GSPMM).routed == graded
    for a, b, exact in zip(ours, upstream, truth, strict=True):
        error, own_error = ((value.double() - exact).abs().sum() for value in (a, b))
        assert error <= 2 * own_error + 1e-6 * (1 + exact.abs().sum())


def test_edges_of_a_graph_that_was_edited() -> None:
    g, e = of_case(ORDINARY).clone(), torch.randn(152, 128)
    with fastgraph.enabled(strict=True):
        before = dgl.ops.copy_e_sum(g, e[:150])
        g.add_edges([0, 1], [2, 2])
        after = dgl.ops.copy_e_sum(g, e)
    torch.testing.assert_close(after[2], before[2] + e[150] + e[151])


def test_edges_first_seen_in_inference_mode() -> None:
    g, e = of_case(ORDINARY).clone(), torch.randn(150, 128, requires_grad=True)
    for reduce in ("sum", "max"):
        function = getattr(dgl.ops, f"copy_e_{reduce}")
        with fastgraph.enabled(strict=True):
            with torch.inference_mode():
                function(g, e)
            (grad,) = torch.autograd.grad(function(g, e).sum(), e)
        assert grad.abs().sum() > 0


@pytest.mark.parametrize("case", ALL, ids=str)
@pytest.mark.parametrize("op", ["mul", "div"])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize(
    ("shape", "weight"),
    [
        ((4,), ()),
        ((4,), (1,)),
        ((7,), ()),
        ((7,), (1,)),
        ((3, 2), (1, 1)),
        ((3, 8), (3, 1)),
        ((3, 11), (3, 1)),
        ((40, 8), (40, 1)),
        ((1, 5), (1, 1)),
        ((2, 3, 9), (2, 3, 1)),
        ((8, 8), (8, 1)),
    ],
    ids=str,
)
def test_weights_of_edges(
    case: Case, op: str, reduce: str, shape: tuple[int, ...], weight: tuple[int, ...]
) -> None:
    x, w = torch.randn(case.num_src, *shape), torch.rand(case.num_edges, *weight) + 0.5
    assert_same(Op(f"u_{op}_e_{reduce}"), arguments(of_case(case), x, w), layer=GSPMM)


class FixedWeights(nn.Module):
    """Sums by weights that no gradient is asked for."""

    def forward(self, g: Any, x: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = dgl.ops.u_mul_e_sum(g, x, weight.detach())
        return out


@pytest.mark.parametrize("case", ALL, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (2,), (3,), (1, 2)], ids=str)
def test_few_channels_by_fixed_weights(case: Case, shape: tuple[int, ...]) -> None:
    weight = torch.rand(case.num_edges, *[1] * len(shape)) + 0.5
    x = torch.randn(case.num_src, *shape)
    assert_same(FixedWeights(), arguments(of_case(case), x, weight), layer=GSPMM)


HEADS = [(8,), (13,), (1, 9), (3, 11), (4, 16), (2, 3, 8)]


@pytest.mark.parametrize("case", ALL, ids=str)
@pytest.mark.parametrize("shape", HEADS, ids=str)
@pytest.mark.parametrize("op", ["u_dot_v", "v_dot_u"])
def test_dot_products_of_ends(case: Case, op: str, shape: tuple[int, ...]) -> None:
    rows = [case.num_src, case.num_dst] if op == "u_dot_v" else [case.num_dst, case.num_src]
    x, y = (torch.randn(count, *shape) for count in rows)
    assert_same(Op(op), arguments(of_case(case), x, y), layer=GSDDMM)


class Softmax(nn.Module):
    def __init__(self, norm_by: str) -> None:
        super().__init__()
        self.norm_by = norm_by

    def forward(self, g: Any, score: Tensor) -> Tensor:
        out: Tensor = edge_softmax(g, score, norm_by=self.norm_by)
        return out


@pytest.mark.parametrize("case", ALL, ids=str)
@pytest.mark.parametrize("shape", [(3,), (4, 1), (2, 5), (17,)], ids=str)
@pytest.mark.parametrize("norm_by", ["dst", "src"])
def test_softmax(case: Case, norm_by: str, shape: tuple[int, ...]) -> None:
    score = 3 * torch.randn(case.num_edges, *shape)
    assert_same(Softmax(norm_by), arguments(of_case(case), score), layer=SOFTMAX)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize("norm_by", ["dst", "src"])
def test_softmax_of_single_scores(norm_by: str, shape: tuple[int, ...]) -> None:
    """Where nodes have edges enough."""
    g = graph(random_edges(20, 20, 400), 20)
    assert_same(Softmax(norm_by), arguments(g, 3 * torch.randn(400, *shape)), layer=SOFTMAX)


class Transformer(nn.Module):
    """As in DGL's examples: all of it made of functions that DGL has."""

    def forward(self, g: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with g.local_scope():
            g.srcdata.update({"k": key, "v": value})
            g.dstdata["q"] = query
            g.apply_edges(fn.u_dot_v("k", "q", "score"))
            g.edata["a"] = edge_softmax(g, g.edata["score"] / key.shape[-1] ** 0.5)
            g.update_all(fn.u_mul_e("v", "a", "m"), fn.sum("m", "out"))
            out: Tensor = g.dstdata["out"]
            return out


GRAPHS: dict[str, Callable[[Case], Any]] = {
    "homogeneous or bipartite": of_case,
    "reversed": lambda case: dgl.reverse(of_case(case)),
    "int32": lambda case: of_case(case).int(),
    "sorted by source": lambda case: (
        dgl.reorder_graph(of_case(case), None, "src", store_ids=False)
        if case.num_src == case.num_dst
        else of_case(case)
    ),
}


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("case", ALL, ids=str)
@pytest.mark.parametrize("shape", [(2, 17), (4, 16), (3, 19)], ids=str)
def test_transformer_of_functions(case: Case, shape: tuple[int, int], kind: str) -> None:
    g = GRAPHS[kind](case)
    rows = [g.num_dst_nodes(), g.num_src_nodes(), g.num_src_nodes()]
    call = arguments(g, *(torch.randn(count, *shape) for count in rows))
    # Scores are rounded before the softmax, in another order of summands than DGL's.
    assert_same(Transformer(), call, layer=GSPMM, factor=4.0)
    with fastgraph.enabled(strict=True):
        fastgraph.status().reset()
        Transformer()(*call[0])
    assert [fastgraph.status().row(name).routed for name in (GSDDMM, SOFTMAX, GSPMM)] == [1, 1, 1]


@pytest.mark.parametrize("case", BLOCKS, ids=str)
def test_transformer_on_blocks(case: Case) -> None:
    mfg = block(case)
    rows = [mfg.num_dst_nodes(), mfg.num_src_nodes(), mfg.num_src_nodes()]
    call = arguments(mfg, *(torch.randn(count, 2, 9) for count in rows))
    assert_same(Transformer(), call, layer=SOFTMAX, factor=4.0)


def test_transformer_agrees_with_dgl_in_float64() -> None:
    g = dgl.add_self_loop(of_case(ORDINARY))
    given = [torch.randn(30, 4, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    cotangent = torch.randn(30, 4, 8, dtype=torch.float64)

    def results() -> list[Tensor]:
        out = Transformer()(g, *given)
        return [out.detach(), *torch.autograd.grad((out * cotangent).sum(), given)]

    expected = results()
    with fastgraph.enabled(strict=True):
        torch.testing.assert_close(results(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", BLOCKS, ids=str)
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_blocks(case: Case, reduce: str) -> None:
    mfg = block(case)
    assert_same(
        Op(f"copy_u_{reduce}"), arguments(mfg, torch.randn(mfg.num_src_nodes(), 5)), layer=GSPMM
    )


@pytest.mark.parametrize("use_libxsmm", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("op", ["copy_u", "copy_e"])
@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("case", [c for c in ALL if c.num_edges > 0], ids=str)
def test_one_of_several_extrema_gets_the_gradient(
    case: Case, reduce: str, op: str, dtype: torch.dtype, use_libxsmm: bool
) -> None:
    """The very one that gets it in DGL: the last edge where LIBXSMM computes, else the first."""
    rows = case.num_src if op == "copy_u" else case.num_edges
    x, g = quantised(rows, 16, dtype=dtype), of_case(case)
    cotangent = torch.randn(case.num_dst, 16, dtype=dtype)

    def gradient() -> Tensor:
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad((Op(f"{op}_{reduce}")(g, leaf) * cotangent).sum(), leaf)[0]

    dgl.use_libxsmm(use_libxsmm)
    expected = gradient()
    with fastgraph.enabled(strict=True):
        torch.testing.assert_close(gradient(), expected)
    dgl.use_libxsmm(True)
    assert fastgraph.status().row(GSPMM).routed == 1


IN_PLACE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "copy_u_max": lambda g, x: dgl.ops.copy_u_max(g, x[:30]),
    "copy_e_min": lambda g, x: dgl.ops.copy_e_min(g, x),
    "weights of constants": lambda g, x: dgl.ops.u_mul_e_sum(g, torch.ones(30, 8), x[:, :1]),
    "products with constants": lambda g, x: dgl.ops.u_dot_v(g, x[:30], torch.ones(30, 16)),
}
"""Functions of ``[150, 16]``, which DGL does not look at again."""


@pytest.mark.parametrize("name", IN_PLACE)
def test_features_and_results_that_are_edited_before_the_backward_pass(name: str) -> None:
    g, leaf = of_case(ORDINARY), torch.randn(150, 16, requires_grad=True)

    def gradient() -> Tensor:
        x = leaf * 1
        out = IN_PLACE[name](g, x)
        x.detach().zero_()
        out.mul_(2)
        return torch.autograd.grad(out.square().sum(), leaf)[0]

    expected = gradient()
    with fastgraph.enabled(strict=True):
        torch.testing.assert_close(gradient(), expected)
    assert fastgraph.status().row(GSDDMM if "products" in name else GSPMM).routed > 0


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_nodes_without_edges_get_what_dgl_gives_them(reduce: str) -> None:
    g, x = graph(torch.tensor([[0, 1], [1, 1]]), 4), torch.randn(4, 3, requires_grad=True)
    function = getattr(dgl.ops, f"copy_u_{reduce}")
    expected = function(g, x)
    with fastgraph.enabled(strict=True):
        out = function(g, x)
        assert torch.equal(out, expected) and out[0].isinf().all()
        # DGL's own gradient adds those of nodes without edges to the first node.
        (grad,) = torch.autograd.grad(out[[0, 2, 3]].sum(), x)
        assert torch.equal(grad, torch.zeros(4, 3))
        g.ndata["h"] = x
        g.update_all(fn.copy_u("h", "m"), getattr(fn, reduce)("m", "out"))
    assert torch.equal(g.ndata["out"][1], expected[1])
    assert torch.equal(g.ndata["out"][[0, 2, 3]], torch.zeros(3, 3))


@pytest.mark.parametrize("op", ["copy_u", "copy_e"])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_without_any_edge_everything_is_what_dgl_gives(op: str, reduce: str) -> None:
    g = graph(torch.empty(2, 0, dtype=torch.int64), 4)
    x = torch.randn(4 if op == "copy_u" else 0, 16, requires_grad=True)
    function = getattr(dgl.ops, f"{op}_{reduce}")

    def results() -> list[Tensor]:
        out = function(g, x)
        return [out, *torch.autograd.grad(out.sum(), x)]

    def outcome() -> list[Tensor] | str:
        try:
            return results()
        except RuntimeError as error:
            return str(error)

    expected = outcome()
    with fastgraph.enabled(strict=True):
        out = outcome()
    if isinstance(expected, str):
        assert out == expected
    else:
        torch.testing.assert_close(out, expected)
    assert fastgraph.status().row(GSPMM).routed == (reduce in ("sum", "mean"))


def test_attention_of_your_own() -> None:
    """A user's own attention: sums of scores are DGL's, softmax and the sum by heads are ours."""
    g, x = dgl.add_self_loop(of_case(ORDINARY)), torch.randn(30, 3, 8)

    class Attention(nn.Module):
        def forward(self, g: Any, x: Tensor) -> Tensor:
            with g.local_scope():
                g.ndata["x"], g.ndata["s"] = x, x.sum(-1, keepdim=True)
                g.apply_edges(fn.u_add_v("s", "s", "e"))
                g.edata["a"] = dgl.nn.functional.edge_softmax(g, g.edata["e"].relu())
                g.update_all(fn.u_mul_e("x", "a", "m"), fn.sum("m", "out"))
                out: Tensor = g.ndata["out"]
                return out

    with fastgraph.enabled():
        Attention()(g, x)
    assert [fastgraph.status().row(name).routed for name in (GSDDMM, SOFTMAX, GSPMM)] == [0, 1, 1]
    upstream, ours = [], []
    for results, active in ((upstream, False), (ours, True)):
        (fastgraph.enable if active else fastgraph.disable)()
        leaf = x.clone().requires_grad_()
        out = Attention()(g, leaf)
        results += [out.detach(), *torch.autograd.grad(out.square().sum(), leaf)]
    torch.testing.assert_close(ours, upstream, atol=1e-5, rtol=1e-4)


def test_double_backward() -> None:
    g = of_case(ORDINARY)
    x = torch.randn(30, 4, dtype=torch.float64, requires_grad=True)
    w = torch.rand(150, 1, dtype=torch.float64, requires_grad=True)
    with fastgraph.enabled(strict=True):
        assert torch.autograd.gradgradcheck(lambda x, w: dgl.ops.u_mul_e_sum(g, x, w), (x, w))
        assert torch.autograd.gradgradcheck(lambda x: dgl.ops.copy_u_max(g, x), (x,))
        x = torch.randn(30, 2, 8, dtype=torch.float64, requires_grad=True)
        w = torch.rand(150, 2, 1, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradgradcheck(lambda x, w: dgl.ops.u_mul_e_sum(g, x, w), (x, w))
        assert torch.autograd.gradgradcheck(lambda x: dgl.ops.u_dot_v(g, x, x.sin()), (x,))
        assert torch.autograd.gradgradcheck(lambda w: edge_softmax(g, w), (w,))


def test_update_all_and_its_kind() -> None:
    g, x = of_case(ORDINARY), torch.randn(30, 4)
    g.ndata["h"], g.edata["w"] = x, torch.rand(150, 1)
    calls: list[Callable[[], object]] = [
        lambda: g.update_all(fn.copy_u("h", "m"), fn.mean("m", "out")),
        lambda: g.update_all(fn.u_mul_e("h", "w", "m"), fn.sum("m", "out")),
        lambda: g.pull(torch.tensor([3, 7]), fn.copy_u("h", "m"), fn.max("m", "out")),
        lambda: g.send_and_recv(torch.tensor([3, 7]), fn.copy_u("h", "m"), fn.sum("m", "out")),
        lambda: dgl.reverse(g, copy_ndata=False).update_all(
            fn.copy_u("h", "m"), fn.sum("m", "out")
        ),
    ]
    for number, call in enumerate(calls[:-1]):
        g.ndata["out"] = torch.zeros(30, 4)
        call()
        expected = g.ndata["out"]
        g.ndata["out"] = torch.zeros(30, 4)
        fastgraph.status().reset()
        with fastgraph.enabled(strict=True):
            call()
        torch.testing.assert_close(g.ndata["out"], expected)
        assert fastgraph.status().row(GSPMM).routed == 1, number


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU())


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "GINConv sum": lambda: dglnn.GINConv(mlp(), "sum", learn_eps=True),
    "GINConv mean": lambda: dglnn.GINConv(mlp(), "mean"),
    "GINConv max": lambda: dglnn.GINConv(mlp(), "max"),
    "SGConv": lambda: dglnn.SGConv(6, 4, k=2, allow_zero_in_degree=True),
    "TAGConv": lambda: dglnn.TAGConv(6, 4, k=2),
    "GCN2Conv": lambda: dglnn.GCN2Conv(6, layer=1, allow_zero_in_degree=True),
    "ChebConv": lambda: dglnn.ChebConv(6, 4, 3),
    "GatedGraphConv": lambda: dglnn.GatedGraphConv(6, 6, 2, 1),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("case", SQUARE, ids=str)
def test_layers(name: str, case: Case) -> None:
    module = LAYERS[name]()
    x = torch.randn(case.num_src, 6)
    features = (x, x) if name == "GCN2Conv" else (x,)
    if name == "ChebConv":
        features = (x, [2.0])
    reason = refused_without_edges(case, "max" if name == "GINConv max" else "sum")
    assert_same(module, arguments(of_case(case), *features), layer=GSPMM, factor=4.0, reason=reason)


@pytest.mark.parametrize("case", SQUARE, ids=str)
def test_appnp(case: Case) -> None:
    """Its weights are ones of float32, whatever the features are."""
    module, g = dglnn.APPNPConv(k=3, alpha=0.2), of_case(case)
    x = torch.randn(case.num_src, 6, requires_grad=True)
    cotangent = torch.randn(case.num_src, 6)

    def both() -> tuple[Tensor, Tensor]:
        out = module(g, x)
        return out.detach(), torch.autograd.grad((out * cotangent).sum(), x)[0]

    expected = both()
    with fastgraph.enabled(strict=True):
        torch.testing.assert_close(both(), expected)
    assert fastgraph.status().row("APPNPConv").routed == 1


@pytest.mark.parametrize(
    "kind", ["weights", "a hook", "dropped edges", "float64", "more dimensions"]
)
def test_appnp_that_has_weights_passes_messages(kind: str) -> None:
    module, g = dglnn.APPNPConv(2, 0.1, 0.5 if kind == "dropped edges" else 0.0), of_case(SQUARE[0])
    x = torch.randn(g.num_nodes(), 6, dtype=torch.float64 if kind == "float64" else None)
    seen: list[int] = []
    if kind == "a hook":
        module.edge_drop.register_forward_hook(lambda *_: seen.append(1))
    weights = (torch.rand(g.num_edges()) + 0.1,) if kind == "weights" else ()
    x = x.view(-1, 2, 3) if kind == "more dimensions" else x

    def end() -> Tensor | str:
        torch.manual_seed(0)
        try:
            out: Tensor = module(g, x, *weights)
        except Exception as error:
            return type(error).__name__
        return out

    expected = end()
    with fastgraph.enabled(min_edges=0):
        found = end()
        module.eval()
        assert isinstance(found, str) or fastgraph.status().row(GSPMM).routed == 2
        assert fastgraph.status().row("APPNPConv").routed == 0
        end()
        assert fastgraph.status().row("APPNPConv").routed == (kind == "dropped edges")
    assert len(seen) == (6 if kind == "a hook" else 0)
    if isinstance(expected, str):
        assert found == expected
    else:
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("case", ALL, ids=str)
@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_gmm(case: Case, reduce: str) -> None:
    """Its kernels are heads, whose weights need gradients."""
    if refused_without_edges(case, reduce):
        pytest.skip("DGL's own backward pass raises")
    module = dglnn.GMMConv(6, 8, 2, 3, reduce, residual=True, allow_zero_in_degree=True)
    features = torch.randn(case.num_src, 6)
    both = features if case.num_src == case.num_dst else (features, torch.randn(case.num_dst, 6))
    call = arguments(of_case(case), both, torch.rand(case.num_edges, 2))
    reason = "max of mul has no operator" if reduce == "max" else None
    assert_same(module, call, layer=GSPMM, factor=4.0, reason=reason)


def test_several_relations_one_after_another() -> None:
    a, b = random_edges(9, 9, 40), random_edges(9, 5, 20)
    g = dgl.heterograph(
        {("a", "r", "a"): tuple(a), ("a", "s", "b"): tuple(b)}, num_nodes_dict={"a": 9, "b": 5}
    )
    convolutions = {
        "r": dglnn.GATConv(4, 3, 2, allow_zero_in_degree=True),
        "s": dglnn.SAGEConv((4, 6), 3, "mean"),
    }
    module = dglnn.HeteroGraphConv(convolutions, aggregate="sum")
    features = {"a": torch.randn(9, 4), "b": torch.randn(5, 6)}
    assert_same(module, arguments(g, features), layer="SAGEConv")
    assert_same(module, arguments(g, features), layer="GATConv")


def test_gradients_that_dgl_computes_are_routed_where_they_can_be() -> None:
    """Those of products with features of edges, which have no route, are sums of sources."""
    g = of_case(ORDINARY)
    x, y = (torch.randn(30, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def gradients() -> tuple[Tensor, ...]:
        out = dgl.ops.u_mul_v(g, x, y).sum(1)
        return torch.autograd.grad((out * torch.arange(150.0)).sum(), (x, y))

    expected = gradients()
    with fastgraph.enabled():
        torch.testing.assert_close(gradients(), expected)
    row = fastgraph.status().row(GSPMM)
    assert (row.routed, row.fell_back) == (0, 2)  # a weight for each channel
