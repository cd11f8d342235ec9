"""Attention by heads: layers beside upstream's on one process, and what is sent for them."""

from __future__ import annotations

import contextlib
import functools
import io
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data

import fastgraph
import fastgraph.dist as fgd
from fastgraph import ops
from fastgraph.dist.forecast.forecast import partition_distribution
from fastgraph.dist.operators import cost, links, planner
from fastgraph.dist.operators.cost import Cluster
from fastgraph.dist.operators.halo.graph import neighbourhoods
from fastgraph.dist.operators.heads.exchange import layout_of_heads
from fastgraph.dist.operators.modes import MODES
from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.mesh import meshes
from fastgraph.dist.ranks.world import WORLD
from fastgraph.registry import operators
from tests.dist import test_fused, test_models
from tests.dist.graphs import NUM_EDGES, NUM_NODES, PARTITIONS, graph
from tests.dist.test_fused import TOLERANCE, Case, Found, compared, plain

D, C, EDGE_DIM = 8, 3, 3
# Divided by 2, 3 and 4.
H = 12
ITEM = 8  # bytes of float64


class Block(nn.Module):
    """A user's own: attention over edges in a subclass, then over all pairs of nodes."""

    class Normalised(gnn.TransformerConv):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return super().forward(F.layer_norm(x, x.shape[-1:]), edge_index) + 1

    def __init__(self) -> None:
        super().__init__()
        self.sparse = self.Normalised(D, 2, heads=4)
        self.dense = nn.Linear(D, 3 * D)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = x + self.sparse(x, edge_index)
        q, k, v = self.dense(x).view(len(x), 3, 4, 2).permute(1, 2, 0, 3)
        return x + F.scaled_dot_product_attention(q, k, v).permute(1, 0, 2).reshape(x.shape)


class Encoder(nn.Module):
    """torch's own layers before one over edges."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(D, 4, 2 * D, batch_first=True)
        self.cross = nn.MultiheadAttention(D, 4, bias=False)
        self.sparse = gnn.TransformerConv(D, 2, heads=4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.encoder(x.unsqueeze(0)).squeeze(0)
        left_out, others = torch.arange(len(x)) % 7 == 0, x.relu()
        y, _ = self.cross(x, others, others, left_out, need_weights=False)
        return self.sparse(x + y, edge_index)


def gps(**options: Any) -> nn.Module:
    return gnn.GPSConv(D, gnn.GATv2Conv(D, 2, 4), heads=4, **options)


def heads(layer: type[nn.Module], num_heads: int) -> Case:
    # Heads are fewer than ranks, not divided by them, or one, which is computed by rows.
    return Case(lambda: layer(D, C, heads=num_heads), plain)


OF_LAYERS = {
    name: case
    for name, case in test_fused.CASES.items()
    if name.startswith(("GAT", "Transformer")) and case.routed
}
OTHERS = {
    **{f"GAT, {n} heads": heads(gnn.GATConv, n) for n in (1, 3, 5)},
    **{f"Transformer, {n} heads": heads(gnn.TransformerConv, n) for n in (1, 4)},
    "GPS": Case(gps, plain, label="GATv2Conv"),
    "GPS, dropout": Case(
        lambda: gps(dropout=0.3, attn_kwargs={"dropout": 0.2}), plain, label="GATv2Conv"
    ),
    "encoder": Case(Encoder, plain, label="TransformerConv"),
    "user's own": Case(Block, plain, label="Normalised"),
}
CASES = {**OF_LAYERS, **OTHERS}
# One with and one without features of edges, dropout and two kinds of nodes.
IN_ALL_LAYOUTS = {"GAT, dropout, features", "GATv2, pair", "Transformer", "GPS", "GAT, 5 heads"}
KEYS = [
    f"{name}, {layout}"
    for layout in PARTITIONS
    for name in CASES
    if layout == "uneven" or name in IN_ALL_LAYOUTS
]


def shard(layout: str, mode: str = "heads") -> Callable[[Any], Any]:
    return test_fused.shards(PARTITIONS[layout](WORLD.size), mode=mode)


def tensor(*shape: int) -> Tensor:
    """Of as many rows as there are nodes."""
    return torch.randn(NUM_NODES, *shape)


CALLS: dict[str, tuple[list[tuple[int, ...]], Callable[..., Any]]] = {
    "attention": (
        [(H, C), (H, C), (H, C)],
        lambda e, q, k, v: ops.attention(q, k, v, e),
    ),
    "gatv2": ([(H, C), (H, C)], lambda e, x, y: ops.gatv2(x, y, torch.ones(1, H, C), e)),
    "gatv2, shared": ([(H, C)], lambda e, x: ops.gatv2(x, x, torch.ones(1, H, C), e)),
    "gat": ([(H, C), (H,), (H,)], lambda e, x, s, t: ops.gat(x, s, t, e)),
    "gat_with_scores": ([(H, C)], lambda e, x: ops.gat_with_scores(x, torch.ones(2, H, C), e)),
}


def are_divided(ranks: int) -> bool:
    """True if each rank gets as many nodes and heads as every other."""
    return NUM_NODES % ranks == H % ranks == 0


def sent() -> dict[str, tuple[int, int]]:
    """Bytes of a forward and a backward pass of each operator, beside those that are expected."""
    found: dict[str, tuple[int, int]] = {}
    for layout, parts in {
        "even": torch.arange(NUM_NODES) % WORLD.size,
        "uneven": PARTITIONS["uneven"](WORLD.size),
    }.items():
        data = graph()
        for name, (shapes, _) in CALLS.items():
            for i, shape in enumerate(shapes):
                data[f"{name} {i}"] = tensor(*shape)
        data = fgd.shard(data, parts=parts, mode="heads")
        for name, (shapes, call) in CALLS.items():
            inputs = [data[f"{name} {i}"].requires_grad_() for i in range(len(shapes))]
            call(data.edge_index, *inputs)  # which plans
            mine, own = data.x.rows.mine, layout_of_heads(H).mine
            given = sum(torch.Size(shape).numel() for shape in shapes) * ITEM // H
            taken = C * ITEM
            # To heads: of own rows the other heads; to rows: of own heads the other rows.
            to_heads, to_rows = mine * (H - own), (NUM_NODES - mine) * own
            fgd.COUNTS.reset()
            out = call(data.edge_index, *inputs)[0]
            forward = sum(fgd.COUNTS.sent.values())
            expected = given * to_heads + taken * to_rows
            found[f"{name}, {layout}, forward"] = forward, expected
            if layout == "even" and are_divided(WORLD.size):
                # S d / P for each tensor there and back, of which a rank keeps 1 / P.
                size = NUM_NODES * H * ITEM // WORLD.size
                all_of_it = size * (given // ITEM + C)
                formula = all_of_it * (WORLD.size - 1) // WORLD.size
                found[f"{name}, {layout}, formula"] = forward, formula
            fgd.COUNTS.reset()
            torch.autograd.grad(out.local, [x.local for x in inputs], out.local)
            expected = given * to_rows + taken * to_heads
            found[f"{name}, {layout}, backward"] = sum(fgd.COUNTS.sent.values()), expected
    return found


def second_derivatives(data: Any) -> list[Tensor]:
    """Gradients of a penalty on gradients."""
    torch.manual_seed(0)
    layers = [
        gnn.GATConv(D, C, heads=3, edge_dim=EDGE_DIM, dropout=0.2),
        gnn.GATv2Conv(D, C, heads=3, edge_dim=EDGE_DIM),
        gnn.TransformerConv(D, C, heads=3, edge_dim=EDGE_DIM),
    ]
    parameters = [p for layer in layers for p in layer.parameters()]
    outs = [layer(data.x, data.edge_index, data.edge_attr) for layer in layers]
    first = torch.autograd.grad(
        sum(out.square().sum() for out in outs), parameters, create_graph=True
    )
    penalty = sum(grad.square().sum() for grad in first)
    found = torch.autograd.grad(penalty, parameters, allow_unused=True)
    scale = 1 / float(penalty.detach())
    return [scale * grad for grad in found if grad is not None]


def penalised() -> list[str]:
    """With tensors that are sent together, and with large ones, which are not."""
    fastgraph.disable()
    expected = second_derivatives(graph())
    found, before = [], transport._LARGE
    with fastgraph.enabled():
        for transport._LARGE in (before, 0):
            of_ranks = second_derivatives(shard("uneven")(graph()))
            found.append(test_fused.difference(list(expected), list(of_ranks)))
    transport._LARGE = before
    return found


def dense_derivatives(data: Any, name: str) -> list[Tensor]:
    """Gradients by attention of two heads to all nodes, and of a penalty on these."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(D, 2)
    x = data.x.detach().clone().requires_grad_()
    if name == "MultiheadAttention":
        left_out = torch.arange(NUM_NODES) % 7 == 0
        out, _ = layer(x, x, x.sin(), left_out, need_weights=False)
    else:
        projected = F.linear(x, layer.in_proj_weight)
        q, k, v = projected.view(NUM_NODES, 3, 2, -1).permute(1, 2, 0, 3)
        out = F.scaled_dot_product_attention(q, k, torch.cat([v, v.sin()], -1), scale=0.3)
    inputs, loss = [x, layer.in_proj_weight], (out * out.cos()).sum()
    once = torch.autograd.grad(loss, inputs, retain_graph=True)
    first = torch.autograd.grad(loss, inputs, create_graph=True)
    penalty = sum(grad.square().sum() for grad in first)
    return [*once, *torch.autograd.grad(penalty, inputs)]


def dense_twice() -> dict[str, str]:
    """On three ranks one has no head, and computes as many derivatives."""
    found = {}
    for name in ("MultiheadAttention", "scaled_dot_product_attention"):
        with sdpa_kernel(SDPBackend.MATH):  # torch has no second derivatives of others
            expected = dense_derivatives(graph(), name)
        data = shard("uneven")(graph())
        fgd.COUNTS.reset()
        results = [fgd.whole(x) for x in dense_derivatives(data, name)]
        found[name] = test_fused.difference(list(expected), results)
        found[f"{name} gathers"] = "".join(fgd.COUNTS.gathers)
    for name, step in {"checkpoint": checkpointed, "few rows": of_few_rows}.items():
        results = [fgd.whole(x) for x in step(shard("uneven")(graph()))]
        found[name] = test_fused.difference(step(graph()), results)
    x = by_heads(shard("uneven")(graph()).x.float())
    with torch.autocast("cpu", torch.bfloat16):
        dtype = F.scaled_dot_product_attention(x, x, x).dtype
    found["autocast"] = "" if dtype is torch.bfloat16 else str(dtype)
    return found


def by_heads(x: Tensor) -> Tensor:
    return x.view(NUM_NODES, 2, -1).transpose(0, 1)


def checkpointed(data: Any) -> list[Tensor]:
    """A gradient by tensors that are computed again, and given once."""

    def attended(x: Tensor) -> Tensor:
        heads = by_heads(x)
        return F.scaled_dot_product_attention(heads, heads.sin(), heads.cos())

    x = data.x.detach().clone().requires_grad_()
    out = checkpoint(attended, x, use_reentrant=False)
    assert isinstance(out, Tensor)
    return [*torch.autograd.grad(out.square().sum(), x)]


def of_few_rows(data: Any) -> list[Tensor]:
    """Second derivatives of attention of two nodes, of which most ranks have no pair."""
    x = data.x[:2].detach().clone().requires_grad_()
    rows = x.view(2, 1, -1)
    out, _ = ops.dense_attention(rows, rows.sin(), rows.cos(), torch.tensor([0, 2]))
    (first,) = torch.autograd.grad((out * out.cos()).sum(), x, create_graph=True)
    return [*torch.autograd.grad((first * first.sin()).sum(), x)]


def trained(steps: int) -> dict[str, str]:
    """Steps of gradient descent."""
    found = {}
    for name in ("GAT", "GATv2", "Transformer"):
        fastgraph.disable()
        expected = test_models.train(name, graph(), steps)
        data = shard("uneven")(graph())
        with fastgraph.enabled():
            found[name] = test_models.difference(expected, test_models.train(name, data, steps))
    return found


def by_rows() -> tuple[list[float], list[float]]:
    """Losses with random numbers by rows, computed by halo and by heads."""
    before, WORLD.random = WORLD.random, "rows"
    with fastgraph.enabled():
        losses = [
            test_models.train("GAT", shard("uneven", mode)(graph())).losses
            for mode in ("halo", "heads")
        ]
    WORLD.random = before
    return losses[0], losses[1]


def others() -> dict[str, Any]:
    data = shard("uneven")(graph())
    x = data.x.view(NUM_NODES, 4, 2)
    found: dict[str, Any] = {}

    _, _, stats = ops.gatv2(x, x, torch.ones(1, 4, 2), data.edge_index)
    on_one = [fgd.whole(x), fgd.whole(data.edge_index)]
    expected = ops.gatv2(on_one[0], on_one[0], torch.ones(1, 4, 2), on_one[1])[2]
    found["statistics"] = test_fused.difference([expected], [fgd.whole(stats)])

    layer = gnn.TransformerConv(D, 2, heads=4, edge_dim=EDGE_DIM)
    calls = []
    with fastgraph.enabled():
        for _ in range(2):
            fgd.COUNTS.reset()
            layer(data.x, data.edge_index, data.edge_attr).sum().backward()
            calls.append(fgd.COUNTS.calls["all_gather"])
    found["features of edges are sent"] = calls

    try:
        ops.gatv2(x, x, torch.ones(1, 4, 2), data.edge_index + NUM_NODES - 10)
    except IndexError as error:
        found["an edge outside"] = str(error)

    fgd.COUNTS.reset()
    one = data.x.view(NUM_NODES, 1, D)
    ops.gatv2(one, one, torch.ones(1, 1, D), data.edge_index)
    found["one head"] = dict(fgd.COUNTS.attention)
    found["table"] = str(fastgraph.status())

    with tempfile.TemporaryDirectory() as name:
        folder = transport.broadcast(name)
        if WORLD.rank == 0:
            fgd.write_shards(graph(), f"{folder}/shards", WORLD.size, method="even")
        transport.barrier()
        loaded = fgd.load_shards(f"{folder}/shards", mode="heads")
        expected = fgd.whole(layer(data.x, data.edge_index, data.edge_attr))
        fgd.COUNTS.reset()
        with fastgraph.enabled():
            out = layer(loaded.x, loaded.edge_index, loaded.edge_attr)
        found["from shards"] = test_fused.difference([expected], [fgd.whole(out)])
        found["from shards, attention"] = dict(fgd.COUNTS.attention)
        transport.barrier()

    fgd.COUNTS.reset()
    q = data.x.view(1, NUM_NODES, D).transpose(0, 1)
    F.scaled_dot_product_attention(*[q.permute(1, 0, 2)] * 3)
    found["one dense head"] = dict(fgd.COUNTS.gathers)
    return found


def within_ranks() -> Tensor:
    """Edges between nodes of one rank each, where rank ``r`` has every node ``r + k * ranks``."""
    ends = torch.randint(NUM_NODES // WORLD.size, (2, NUM_EDGES)) * WORLD.size
    return ends + torch.randint(WORLD.size, (NUM_EDGES,))


def planned() -> dict[str, Any]:
    """The predictions for both modes beside the counts, and the choice by bytes alone."""
    torch.manual_seed(1)
    edges = {"anywhere": torch.randint(NUM_NODES, (2, 10 * NUM_EDGES)), "within": within_ranks()}
    shapes = [operand.shape for operand in operators.ATTENTION.operands]
    found: dict[str, Any] = {}
    least, cost.LEAST_BYTES = cost.LEAST_BYTES, 0  # even these graphs are not too small
    measured = links.of_ranks()
    links.KNOWN[WORLD.size] = Cluster(latency=0.0, bandwidth=1.0, work=0.0, sums=0.0)
    for name, index in edges.items():
        data = Data(edge_index=index, num_nodes=NUM_NODES)
        data.q, data.k, data.v = tensor(H, C), tensor(H, C), tensor(H, C)
        counted = {}
        for mode in MODES:
            sharded = fgd.shard(data, parts=torch.arange(NUM_NODES) % WORLD.size, mode=mode)
            inputs = [sharded[key].requires_grad_() for key in "qkv"]
            call = functools.partial(ops.attention, *inputs, sharded.edge_index)
            call()  # which plans
            fgd.COUNTS.reset()
            out = call()[0].local
            torch.autograd.grad(out, [x.local for x in inputs], out)
            counts = fgd.COUNTS
            counted[mode] = sum(counts.sent.values()), sum(counts.calls.values())
            found[f"{name}, {mode}"] = list(counts.attention)
        rows = inputs[0].rows
        local = neighbourhoods(sharded.edge_index, rows, rows)
        choice = planner.compared(planner.layer_of(shapes, [*inputs, None], H), local)
        found[name] = counted, dict(choice.modes)
        parts = torch.arange(NUM_NODES) % WORLD.size
        beforehand = partition_distribution(index, parts, parts, WORLD.size)
        found[f"{name}, beforehand"] = beforehand, planner.distribution(local, meshes(WORLD.size))
    links.KNOWN[WORLD.size] = measured
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        data = shard("uneven", "auto")(graph())
        ops.gatv2(data.x[:, None, :], data.x[:, None, :], torch.ones(1, 1, D), data.edge_index)
        x, att = data.x.view(-1, 2, D // 2), torch.ones(1, 2, D // 2)
        for _ in range(2):  # with edges that are new each time
            ops.gatv2(x, x, att, data.edge_index + 0)
        local = neighbourhoods(data.edge_index, x.rows, x.rows)
        of_gatv2 = [operand.shape for operand in operators.GATV2.operands]
        shared, apart = (
            planner.compared(planner.layer_of(of_gatv2, [x, y, att, None, None], 2), local)
            for y in (x, x + 0)
        )
    halves = [of.modes[mode].sent for mode in ("heads", "halo") for of in (shared, apart)]
    cost.LEAST_BYTES = least
    return found | {"printed": printed.getvalue(), "machine": measured, "shared": halves}


def compare_on_this_rank(steps: int) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    WORLD.random = "exact"
    layers = {}
    for key in KEYS:
        name, _, layout = key.rpartition(", ")
        make = test_fused.bipartite if "pair" in name else graph
        case = CASES[name]
        layers[key] = compared(case, make, shard(layout)), dict(fgd.COUNTS.attention)
    return {
        "layers": layers,
        "sent": sent(),
        "penalised": penalised(),
        "dense attention": dense_twice(),
        "trained": trained(steps),
        "by rows": by_rows(),
        "planned": planned(),
        **others(),
    }


@pytest.fixture(scope="module")
def found(world_size: int, once_on_ranks: Any, pytestconfig: pytest.Config) -> list[dict[str, Any]]:
    steps = pytestconfig.getoption("--steps")
    found: list[dict[str, Any]] = once_on_ranks(compare_on_this_rank, world_size, steps)
    return found


@pytest.mark.parametrize("key", KEYS)
def test_layers(found: list[dict[str, Any]], key: str) -> None:
    name, _, _ = key.rpartition(", ")
    case = CASES[name]
    for rank, of_rank in enumerate(found):
        result: Found
        result, attention = of_rank["layers"][key]
        assert not result.error, f"rank {rank}: {result.error}"
        assert result.routed == case.routed, f"rank {rank}: {result.reasons}"
        assert not result.gathers
        assert bool(result.planned_again) == (name in test_fused.PLANNED_EACH_TIME)
        if name.endswith(" 1 heads"):
            assert set(attention) == {"halo: heads cannot be shared out, there are 1"}
        else:
            assert set(attention) <= {"heads", "heads (dense)"} and attention["heads"]


def test_what_is_sent(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert len(of_rank["sent"]) == (5 if are_divided(len(found)) else 4) * len(CALLS)
        for name, (counted, expected) in of_rank["sent"].items():
            assert counted == expected > 0, name


def test_gradients_of_gradients(found: list[dict[str, Any]]) -> None:
    assert [of_rank["penalised"] for of_rank in found] == [["", ""]] * len(found)


def test_second_derivatives_of_attention_to_all_nodes(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert not any(of_rank["dense attention"].values()), of_rank["dense attention"]


def test_training_is_that_of_one_process(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert set(of_rank["trained"].values()) == {""}


def test_random_numbers_do_not_depend_on_the_mode(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        halo, by_heads = of_rank["by rows"]
        assert by_heads == pytest.approx(halo, rel=TOLERANCE)


def test_the_plan_predicts_what_is_sent(found: list[dict[str, Any]]) -> None:
    for name in ("anywhere", "within"):
        for mode in ("halo", "heads"):
            counted = [of_rank["planned"][name][0][mode] for of_rank in found]
            for of_rank in found:
                predicted = of_rank["planned"][name][1][mode]
                assert predicted.sent == max(sent for sent, _ in counted)
                assert {predicted.collectives} == {calls for _, calls in counted}
                assert predicted.work > 0


def test_the_faster_mode_is_chosen(found: list[dict[str, Any]]) -> None:
    for rank, of_rank in enumerate(found):
        planned = of_rank["planned"]
        assert planned["within, auto"] == ["halo: fastest"]
        # The halo is all other nodes: on two ranks both send the same.
        for name in ("anywhere", "within"):
            beforehand, shared_out = planned[f"{name}, beforehand"]
            assert beforehand == shared_out
        chosen = "heads: fastest" if len(found) > 2 else "halo: fastest"
        assert planned["anywhere, auto"] == [chosen]
        assert planned["machine"] == found[0]["planned"]["machine"]
        said = planned["printed"].splitlines()
        assert len(said) == 2 * (rank == 0), said
        shared, apart, *by_halo = planned["shared"]
        assert 3 * shared == 2 * apart  # of three tensors there and back two are left
        assert by_halo[0] == by_halo[1]
        assert not said or "attention with 1 head by" in said[0]
        assert not said or "attention with 2 heads by" in said[1]


def test_statistics(found: list[dict[str, Any]]) -> None:
    assert [of_rank["statistics"] for of_rank in found] == [""] * len(found)


def test_features_of_edges_without_gradient_are_sent_once(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        first, second = of_rank["features of edges are sent"]
        assert first and not second


def test_an_edge_outside_is_an_error_on_all_ranks(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert "points outside the nodes" in of_rank["an edge outside"]


def test_one_head_is_computed_by_rows(found: list[dict[str, Any]]) -> None:
    reason = "halo: heads cannot be shared out, there are 1"
    for of_rank in found:
        assert of_rank["one head"] == {reason: 1}
        assert reason in of_rank["table"]
        assert of_rank["one dense head"] == {"scaled_dot_product_attention": 1}


def test_loaded_shards(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert of_rank["from shards"] == ""
        assert of_rank["from shards, attention"] == {"heads": 1}


def test_heads_are_shared_out_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WORLD, "size", 4)
    assert layout_of_heads(10).counts == [2, 3, 2, 3]
    assert layout_of_heads(3).counts == [0, 1, 1, 1]


def test_an_unknown_mode() -> None:
    fgd.init()
    with pytest.raises(ValueError, match=r"mode must be one of .*, got 'rows'"):
        fgd.shard(graph(), mode="rows")
