"""Random calls on random graphs, right and wrong ones: what DGL gives, results or errors.

Limits below which routes are not worth their while are lifted, so that operators get the narrowest
features as well.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fastgraph
from fastgraph.routing.switch import SWITCH
from tests.dgl.graphs import dgl

import dgl.function as fn  # isort: skip
import dgl.nn as dglnn  # isort: skip
from fastgraph.dgl import edge_softmax, gsddmm, gspmm  # isort: skip

# Of layers on graphs without edges; DGL's own class of warnings stops pytest-xdist.
pytestmark = pytest.mark.filterwarnings("ignore:The input graph for the user-defined")

SEEDS, CHUNKS = 1200, 3


class Call(NamedTuple):
    """A function of a graph and of tensors, and what is passed.

    Attributes:
        text: what it is, for messages.
        function: returns a tensor, or several.
        tensors: all that may need gradients.
    """

    text: str
    function: Callable[[Any, list[Tensor]], Any]
    tensors: list[Tensor]


@pytest.fixture(autouse=True)
def lift_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, names in (
        (gspmm, ("LEAST_CHANNELS", *(n for n in vars(gspmm) if n.startswith("_LEAST")))),
        (gsddmm, ("LEAST_CHANNELS", *(n for n in vars(gsddmm) if n.startswith("_LEAST")))),
        (edge_softmax, ("_LEAST_OF_ROWS",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, 1)


# --- graphs ---------------------------------------------------------------------------------------


def ends(draw: random.Random, num_src: int, num_dst: int) -> tuple[Tensor, Tensor]:
    """Of edges: none, few or many, with hubs, duplicates and self-loops among them."""
    if num_src == 0 or num_dst == 0:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    count = draw.choice((0, 1, 5, 30, 120))
    src, dst = torch.randint(num_src, (count,)), torch.randint(num_dst, (count,))
    kind = draw.randrange(4)
    if kind == 1:  # a hub, and nodes without edges
        dst = torch.where(torch.rand(count) < 0.8, 0, dst)
    elif kind == 2:  # duplicates
        src, dst = (x[: (count + 1) // 2].repeat(2)[:count] for x in (src, dst))
    elif kind == 3:
        src = torch.where(torch.rand(count) < 0.3, dst.clamp(max=num_src - 1), src)
    return src, dst


def homogeneous(draw: random.Random) -> Any:
    nodes = draw.choice((0, 1, 2, 9, 30))
    return dgl.graph(ends(draw, nodes, nodes), num_nodes=nodes)


def bipartite(draw: random.Random) -> Any:
    sizes = {"a": draw.choice((0, 1, 7, 20)), "b": draw.choice((0, 1, 5, 30))}
    relation = {("a", "to", "b"): ends(draw, sizes["a"], sizes["b"])}
    return dgl.heterograph(relation, num_nodes_dict=sizes)


def relation_of_many(draw: random.Random) -> Any:
    sizes = {"a": draw.choice((1, 7)), "b": draw.choice((0, 5)), "c": draw.choice((0, 3))}
    kinds = [("a", "r", "b"), ("a", "s", "a"), ("b", "t", "c")]
    g = dgl.heterograph({k: ends(draw, sizes[k[0]], sizes[k[2]]) for k in kinds}, sizes)
    return g[draw.choice(kinds)]


def block(draw: random.Random) -> Any:
    g = homogeneous(draw)
    seeds = torch.randperm(g.num_nodes())[: draw.choice((0, 1, 8))]
    return dgl.to_block(dgl.in_subgraph(g, seeds) if len(seeds) else g.edge_subgraph([]), seeds)


def batched(draw: random.Random) -> Any:
    return dgl.batch([homogeneous(draw) for _ in range(draw.choice((1, 3)))])


FORMATS = ["coo", "csr", "csc"]
GRAPHS = [homogeneous, homogeneous, bipartite, bipartite, relation_of_many, block, batched]


def drawn_graph(draw: random.Random) -> Any:
    g = draw.choice(GRAPHS)(draw)
    if draw.random() < 0.3:
        g = g.int()
    if draw.random() < 0.2 and not g.is_block:
        g = dgl.reverse(g)
    if draw.random() < 0.25:
        g = g.formats(draw.choice(["coo", "csc", "csr", ["coo", "csc"], ["csr", "csc"]]))
    return g


def edited(draw: random.Random, g: Any) -> None:
    """Changes a graph in place."""
    if draw.random() < 0.5 and g.num_src_nodes() and g.num_dst_nodes():
        src = torch.randint(g.num_src_nodes(), (3,), dtype=g.idtype)
        g.add_edges(src, torch.randint(g.num_dst_nodes(), (3,), dtype=g.idtype))
    elif g.num_edges():
        g.remove_edges(torch.arange(0, g.num_edges(), 2, dtype=g.idtype))


# --- features -------------------------------------------------------------------------------------


def features(draw: random.Random, rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """In some layout of memory, with ties, and rarely with a row more or less, or another dtype."""
    chance = draw.random()
    if chance < 0.03:
        rows += 1
    elif chance < 0.05 and rows > 1:  # with no row at all DGL dies, see below
        rows -= 1
    elif chance < 0.06:
        dtype = torch.int64
    elif chance < 0.08:
        dtype = torch.float32 if dtype == torch.float64 else torch.float64
    x = torch.randint(-8, 9, (rows, *shape)).to(dtype)
    x = x / 4 if dtype.is_floating_point else x
    layout = draw.randrange(4)
    if layout == 1 and x.dim() > 1:
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    elif layout == 2:
        x = x.repeat_interleave(2, 0)[::2]
    elif layout == 3 and x.dim() > 1:
        x = torch.cat([x, x], -1)[..., : x.shape[-1]]
    return x.requires_grad_(draw.random() < 0.6 and dtype.is_floating_point)


SHAPES = [(), (0,), (1,), (2,), (5,), (16,), (33,), (1, 1), (3, 1), (2, 9), (4, 16), (0, 3), (2, 0)]


def drawn_dtype(draw: random.Random) -> torch.dtype:
    return torch.float64 if draw.random() < 0.25 else torch.float32


# --- calls ----------------------------------------------------------------------------------------


def rows_of(g: Any, end: str) -> int:
    count: int = {"u": g.num_src_nodes, "v": g.num_dst_nodes, "e": g.num_edges}[end]()
    return count


def operation(draw: random.Random, g: Any) -> Call:
    """A function of ``dgl.ops``."""
    shape, dtype = draw.choice(SHAPES), drawn_dtype(draw)
    reduce = draw.choice(("", "sum", "sum", "mean", "max", "min"))
    if draw.random() < 0.4:
        lhs, op, rhs = "copy", draw.choice("ue"), ""
        shapes, names = [shape], [op]
        if not reduce and op == "e":
            reduce = "sum"
    else:
        op = draw.choice(("add", "sub", "mul", "mul", "div", "dot", "dot"))
        lhs, rhs = draw.choice((("u", "e"),) if reduce else (("u", "v"), ("v", "u"), ("u", "e")))
        if reduce and op == "dot":
            op = "mul"
        second = draw.choice([shape, shape, (), (1,), (*shape[:-1], 1), draw.choice(SHAPES)])
        shapes, names = [shape, second], [lhs, rhs]
    name = "_".join(part for part in (lhs, op, rhs, reduce) if part)
    tensors = [features(draw, rows_of(g, n), s, dtype) for n, s in zip(names, shapes, strict=True)]
    if op == "div":  # not by zero: there is no other test of what is not a number
        with torch.no_grad():
            tensors[1][tensors[1] == 0] = 3
    function = getattr(dgl.ops, name)
    return Call(name, lambda g, given: function(g, *given), tensors)


def scores(draw: random.Random, num_edges: int) -> Tensor:
    """Not fewer than edges, which are a test of their own: DGL writes beyond them and dies."""
    score = features(draw, num_edges, draw.choice(SHAPES), drawn_dtype(draw))
    return score if len(score) >= num_edges else scores(draw, num_edges)


def softmax(draw: random.Random, g: Any) -> Call:
    norm_by = draw.choice(("dst", "src"))
    score = scores(draw, g.num_edges())
    return Call(
        f"edge_softmax by {norm_by}",
        lambda g, given: dgl.ops.edge_softmax(g, given[0], norm_by=norm_by),
        [score],
    )


def softmax_of_some(draw: random.Random, g: Any) -> Call:
    chosen = torch.randperm(g.num_edges())[: g.num_edges() // 2].to(g.idtype)
    score = scores(draw, len(chosen))
    return Call(
        "edge_softmax of some",
        lambda g, given: dgl.ops.edge_softmax(g, given[0], eids=chosen),
        [score],
    )


def messages(draw: random.Random, g: Any) -> Call:
    """A random call of message passing through frames."""
    shape, dtype = draw.choice(SHAPES), drawn_dtype(draw)
    reduce = draw.choice(("sum", "mean", "max", "min"))
    x = features(draw, g.num_src_nodes(), shape, dtype)
    w = features(draw, g.num_edges(), (*shape[:-1], 1), dtype)
    message = draw.choice((fn.copy_u("x", "m"), fn.copy_e("w", "m"), fn.u_mul_e("x", "w", "m")))
    nodes = torch.arange(g.num_dst_nodes(), dtype=g.idtype)[::2]
    kind = draw.choice(("update_all", "pull", "send_and_recv"))

    def function(g: Any, given: list[Tensor]) -> Tensor:
        with g.local_scope():
            g.srcdata["x"], g.edata["w"] = given
            reduction = getattr(fn, reduce)("m", "out")
            if kind == "update_all":
                g.update_all(message, reduction)
            elif kind == "pull":
                g.pull(nodes, message, reduction)
            else:
                g.send_and_recv(
                    torch.arange(0, g.num_edges(), 3, dtype=g.idtype), message, reduction
                )
            out: Tensor = g.dstdata["out"]
            return out

    return Call(f"{kind} {message.name} {reduce}", function, [x, w])


def relations(draw: random.Random, _: Any) -> Call:
    """Several relations of a heterograph, one after another and at once."""
    sizes = {"a": draw.choice((1, 7)), "b": draw.choice((1, 5))}
    kinds = [("a", "r", "b"), ("a", "s", "a"), ("b", "t", "b")]
    whole = dgl.heterograph({k: ends(draw, sizes[k[0]], sizes[k[2]]) for k in kinds}, sizes)
    dtype, shape = drawn_dtype(draw), draw.choice([(1,), (3,), (16,), (2, 3)])
    tensors = [features(draw, sizes[kind], shape, dtype) for kind in ("a", "b")]
    reduce, across = draw.choice(("sum", "mean", "max")), draw.choice(("sum", "min", "stack"))

    def function(_: Any, given: list[Tensor]) -> list[Tensor]:
        with whole.local_scope():
            for kind, x in zip(("a", "b"), given, strict=True):
                whole.nodes[kind].data["x"] = x
            each = (fn.copy_u("x", "m"), getattr(fn, reduce)("m", "out"))
            whole.multi_update_all(dict.fromkeys(kinds, each), across)
            return [whole.nodes[kind].data["out"] for kind in ("a", "b")]

    return Call(f"multi_update_all {reduce} {across}", function, tensors)


LAYERS: dict[str, Callable[[random.Random, int, int], nn.Module]] = {
    "GATConv": lambda draw, size, out: dglnn.GATConv(
        size, out, draw.choice((1, 3)), residual=draw.random() < 0.5, bias=draw.random() < 0.5
    ),
    "GATv2Conv": lambda draw, size, out: dglnn.GATv2Conv(
        size,
        out,
        draw.choice((1, 3)),
        residual=draw.random() < 0.5,
        share_weights=draw.random() < 0.5,
    ),
    "DotGatConv": lambda draw, size, out: dglnn.DotGatConv(size, out, draw.choice((1, 3))),
    "EdgeGATConv": lambda draw, size, out: dglnn.EdgeGATConv(size, 2, out, draw.choice((1, 3))),
    "AGNNConv": lambda draw, size, out: dglnn.AGNNConv(),
    "HGTConv": lambda draw, size, out: dglnn.HGTConv(size, out, 2, 2, 3, dropout=0.0),
    "RelGraphConv": lambda draw, size, out: dglnn.RelGraphConv(
        size, out, 3, draw.choice((None, "basis")), 2, self_loop=draw.random() < 0.5
    ),
    "GraphConv": lambda draw, size, out: dglnn.GraphConv(
        size, out, norm=draw.choice(("none", "both", "left", "right"))
    ),
    "SAGEConv": lambda draw, size, out: dglnn.SAGEConv(
        size, out, draw.choice(("mean", "gcn", "pool"))
    ),
    "GINConv": lambda draw, size, out: dglnn.GINConv(None, draw.choice(("sum", "mean", "max"))),
    "TAGConv": lambda draw, size, out: dglnn.TAGConv(size, out, 2),
}


def layer(draw: random.Random, g: Any) -> Call:
    name = draw.choice(list(LAYERS))
    size, out, dtype = draw.choice((1, 4, 9)), draw.choice((1, 3, 8)), drawn_dtype(draw)
    module = LAYERS[name](draw, size, out).to(dtype)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    if draw.random() < 0.6 and hasattr(module, "set_allow_zero_in_degree"):
        module.set_allow_zero_in_degree(True)
    x = features(draw, g.num_src_nodes(), (size,), dtype)
    tensors, extra = [x], {}
    if draw.random() < 0.3 and name in ("GATConv", "GraphConv", "SAGEConv"):
        weight = features(draw, g.num_edges(), (), dtype)
        extra["edge_weight"] = weight.detach().abs() + 0.5
    if draw.random() < 0.3 and name.startswith(("GAT", "Dot", "EdgeGAT")):
        extra["get_attention"] = True
    if name == "EdgeGATConv":
        tensors.append(features(draw, g.num_edges(), (2,), dtype))
    more: list[Tensor] = []
    if name in ("HGTConv", "RelGraphConv"):
        kinds = torch.randint(3, (g.num_edges(),))
        more = [torch.randint(2, (g.num_src_nodes(),)), kinds] if name == "HGTConv" else [kinds]
    has_pair = not more and draw.random() < 0.3
    if has_pair:
        tensors.append(features(draw, g.num_dst_nodes(), (size,), dtype))

    def function(g: Any, given: list[Tensor]) -> Any:
        module.zero_grad()
        given, feat = list(given), given[0]
        if has_pair:
            feat = (feat, given.pop())
        return module(g, feat, *given[1:], *more, **extra)

    tensors_of_all = tensors + list(module.parameters())
    return Call(
        f"{name}({size}, {out}) pair={has_pair} {sorted(extra)} ",
        lambda g, given: function(g, given[: len(tensors)]),
        tensors_of_all,
    )


CALLS = [operation, operation, operation, softmax, softmax_of_some, messages, messages, relations]
CALLS += [layer] * 4


# --- comparison -----------------------------------------------------------------------------------


def outcome(call: Call, g: Any, seed: int) -> list[Tensor] | str:
    """Results and gradients, or the error."""
    try:
        out = call.function(g, call.tensors)
        outs = list(out) if isinstance(out, (list, tuple)) else [out]
        results = [value.detach() for value in outs]
        leaves = [x for x in call.tensors if x.requires_grad]
        if leaves and any(value.requires_grad for value in outs):
            torch.manual_seed(seed)
            # Nodes without edges have an infinity, whose gradient DGL gives to the first node.
            loss = sum((v.where(v.isfinite(), 0) * torch.randn_like(v)).sum() for v in outs)
            results += torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        return results
    except Exception as error:
        return f"{type(error).__name__}: {plain(str(error))}"


OWN_LIMITS = re.compile(
    r"IsContiguous|non-contiguous|Check  notnull"  # which features without channels meet as well
    r"|only supports? CSR and COO|Out degree cannot be computed|order\.empty\(\)"  # formats
    r"|cannot reshape tensor of 0 elements"  # heads of no nodes
)
"""Calls that DGL refuses for reasons of its own, where operators do not."""


def plain(text: str) -> str:
    """An error without the time and the addresses that DGL writes into it."""
    text = re.sub(r"\[\d\d:\d\d:\d\d\]", "", text)
    return text.split("Stack trace")[0]


def check(seed: int) -> None:
    """One call, with fastgraph enabled."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    g = drawn_graph(draw)
    formats = g.formats()
    if draw.random() < 0.2 and not g.is_block and len(formats["created"]) < 3:
        g = g.formats(FORMATS)
        outcome(draw.choice(CALLS)(draw, g), g, seed)
        edited(draw, g)
    call = draw.choice(CALLS)(draw, g)
    given = [(list(x.shape), x.dtype, x.requires_grad) for x in call.tensors[:3]]
    text = f"seed {seed}: {call.text} of {given} on {g}, {formats}"
    results: list[list[Tensor] | str] = ["", ""]
    for active in draw.choice(([False, True], [True, False])):  # who meets the graph first
        with contextlib.nullcontext() if active else SWITCH.upstream():
            results[active] = outcome(call, g, seed)
    expected, found = results
    is_error = isinstance(expected, str), isinstance(found, str)
    if is_error == (True, False) and OWN_LIMITS.search(str(expected)):
        ordinary = [
            x if x.is_contiguous() else x.detach().contiguous().requires_grad_(x.requires_grad)
            for x in call.tensors
        ]
        with SWITCH.upstream():
            expected = outcome(call._replace(tensors=ordinary), g.formats(FORMATS), seed)
        if isinstance(expected, str) and OWN_LIMITS.search(expected):
            assert not any(x.any() for x in found), text
            return
    elif is_error == (False, True):
        # Of a restricted graph DGL takes another format once it has made it, which may then fail.
        with SWITCH.upstream():
            expected = outcome(call, g, seed)
    same(found, expected, text)


def same(found: list[Tensor] | str, expected: list[Tensor] | str, text: str) -> None:
    if isinstance(expected, str) or isinstance(found, str):
        assert found == expected, f"{text}\nexpected {expected}\nfound {found}"
        return
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, (
            f"{text}\n{a.shape} {a.dtype}, {b.shape} {b.dtype}"
        )
        # In float32 a gradient of parameters is a sum over edges that may cancel; what is rounded
        # has the size of the largest numbers. A quarter of all calls is in float64.
        largest = max(1.0, float(b.abs().where(b.isfinite(), 0).max())) if b.numel() else 1.0
        tolerance = 1e-10 if b.dtype == torch.float64 else 5e-5
        torch.testing.assert_close(
            a, b, rtol=tolerance, atol=tolerance * largest, msg=lambda m: f"{text}\n{m}"
        )


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_calls(chunk: int) -> None:
    with fastgraph.enabled(min_edges=0):
        for seed in range(chunk, SEEDS, CHUNKS):
            check(seed)
    for name in ("dgl.gspmm", "dgl.gsddmm", "dgl.edge_softmax"):
        assert fastgraph.status().row(name).routed > 0, name


TOO_FEW: dict[str, Callable[[Any], Any]] = {
    "edge_softmax": lambda g: dgl.ops.edge_softmax(g, torch.rand(29, 4)),
    "edge_softmax of one number": lambda g: dgl.ops.edge_softmax(g, torch.tensor(1.0)),
    "edge_softmax of some": lambda g: dgl.ops.edge_softmax(
        g, torch.rand(3, 4), eids=torch.arange(20)
    ),
    "u_dot_v": lambda g: dgl.ops.u_dot_v(g, torch.rand(9, 32), torch.rand(0, 32)),
    "u_add_v": lambda g: dgl.ops.u_add_v(g, torch.rand(0, 4), torch.rand(9, 4)),
    "e_mul_v": lambda g: dgl.ops.e_mul_v(g, torch.rand(0, 4), torch.rand(9, 4)),
    "copy_u": lambda g: dgl.ops.copy_u(g, torch.rand(0, 4)),
}
"""Calls in which DGL reads or writes out of bounds, so that it dies, hangs or returns garbage."""


@pytest.mark.parametrize("name", TOO_FEW)
def test_too_few_rows_are_an_error(name: str) -> None:
    g = dgl.graph((torch.arange(30) % 9, torch.arange(30) % 7), num_nodes=9)
    with fastgraph.enabled(), pytest.raises(ValueError, match=r"must have a row for each of \d+"):
        TOO_FEW[name](g)


def test_too_few_rows_of_one_of_several_relations_are_an_error() -> None:
    g = dgl.heterograph(
        {("a", "r", "b"): ([0, 1], [0, 1]), ("b", "s", "a"): ([0, 1, 1], [0, 1, 1])}
    )
    scores = {"r": torch.rand(2, 4), "s": torch.rand(1, 4)}
    with (
        fastgraph.enabled(),
        pytest.raises(ValueError, match=r"each of 3 edges, got shape \[1, 4\]"),
    ):
        dgl.ops.edge_softmax(g, scores)


@pytest.mark.parametrize("reduce", ["foo", None, []], ids=str)
@pytest.mark.parametrize("op", ["mul", "foo", None, []], ids=str)
def test_unknown_functions_are_dgls_errors(op: Any, reduce: Any) -> None:
    g = dgl.graph((torch.arange(30) % 9, torch.arange(30) % 7), num_nodes=9)
    call = Call(
        "",
        lambda g, given: dgl.ops.gspmm(g, op, reduce, *given),
        [torch.rand(9, 4), torch.rand(30, 1)],
    )
    expected = outcome(call, g, 0)
    assert isinstance(expected, str)
    with fastgraph.enabled(strict=True):
        assert outcome(call, g, 0) == expected
