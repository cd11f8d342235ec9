"""Operators by blocks on a grid of ranks, beside upstream's on one process, and what is sent."""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch_geometric.data import Data

import fastgraph
import fastgraph.dist as fgd
from fastgraph import ops
from fastgraph.dist.operators import cost, links
from fastgraph.dist.operators.cost import Cluster, Layer
from fastgraph.dist.operators.grid.cost import (
    Exchanged,
    Widths,
    exchanged,
    largest_block,
    volume,
)
from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.mesh import Mesh, usual_mesh
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.running.launch import parser
from fastgraph.ops.spmm import SDDMM
from fastgraph.registry import operators
from tests.dist import test_fused, test_heads, test_models
from tests.dist.graphs import NUM_EDGES, NUM_NODES, PARTITIONS, graph
from tests.dist.test_fused import TOLERANCE, Case, Found, compared

MESHES: dict[int, list[Mesh]] = {
    2: [(1, 2), (2, 1)],
    3: [(1, 3), (3, 1)],
    4: [(1, 4), (2, 2), (4, 1)],
    8: [(2, 4)],
    9: [(3, 3)],
}

NAMES = [
    "GCN, improved",
    "GCN, no loops",
    "GCN, learned weights",
    "GCN, reversed",
    "SAGE",
    "SAGE, max with ties",
    "SAGE, min with ties",
    "SAGE, pair, max",
    "SAGE, replicated features",
    "GraphConv, mean",
    "GAT, no loops",
    "GAT, dropout, weights",
    "GAT, pair, features",
    "GATv2, shared",
    "GATv2, features",
    "GATv2, dropout",
    "Transformer, features",
    "Transformer, weights",
    "Transformer, dropout",
]
# The operators of these meet empty parts and ranks without edges as well.
IN_ALL_LAYOUTS = [
    "GCN, improved",
    "SAGE, max with ties",
    "SAGE, pair, max",  # what is sent of a row is no multiple of eight bytes
    "GAT, dropout, weights",
    "Transformer",
]

H, C, ITEM = 4, 3, 8  # heads, channels, bytes of float64


def hub() -> Data:
    """A graph in which nearly all edges lead to one node or come from it, some of them twice."""
    data = graph()
    data.edge_index[1, ::2] = 7
    data.edge_index[0, 1::2] = 7
    return data


def layouts(mesh: Mesh) -> dict[str, Callable[[Any], Any]]:
    return {
        name: test_fused.shards(parts(WORLD.size), mode="grid", mesh=mesh)
        for name, parts in PARTITIONS.items()
    }


def layers(mesh: Mesh) -> dict[str, tuple[Found, dict[str, int]]]:
    found = {}

    def compare(key: str, case: Case, make: Callable[[], Any], shard: Any) -> None:
        of_case = compared(case, make, shard)
        counts = fgd.COUNTS.attention + fgd.COUNTS.aggregation
        found[key] = of_case, dict(counts)

    for layout, shard in layouts(mesh).items():
        for name in NAMES if layout == "uneven" else IN_ALL_LAYOUTS:
            make = test_fused.bipartite if "pair" in name else graph
            compare(f"{name}, {layout}", test_fused.CASES[name], make, shard)
        if layout == "uneven":
            for name in ("GCN", "SAGE, max with ties", "GATv2"):
                compare(f"{name}, hub", test_fused.CASES[name], hub, shard)
    return found


Operands = list[tuple[int, ...]]
"""Their shapes, without the first dimension."""

CALLS: dict[str, tuple[Operands, Callable[..., Any], Callable[..., Layer]]] = {
    "spmm": (
        [(C,)],
        lambda d, x: ops.spmm(x, d.edge_index, d.edge_weight, reduce="mean"),
        cost.sum_layer,
    ),
    "gcn": ([(C,)], lambda d, x: ops.gcn(x, d.edge_index), cost.sum_layer),
    "segment_reduce": (
        [(C,)],
        lambda d, x: ops.segment_reduce(x, d.edge_index),
        functools.partial(cost.sum_layer, is_extremum=True),
    ),
    "gat": (
        [(H, C), (H,), (H,)],
        lambda d, x, s, t: ops.gat(x, s, t, d.edge_index, score_edge=d.score)[0],
        lambda *x: of_attention(operators.GAT, *x),
    ),
    "gat_with_scores": (
        [(H, C)],
        lambda d, x: ops.gat_with_scores(x, torch.ones(2, H, C), d.edge_index)[0],
        lambda x: of_attention(operators.GAT_WITH_SCORES, x, torch.ones(2, H, C)),
    ),
    "gatv2": (
        [(H, C), (H, C)],
        lambda d, x, y: ops.gatv2(x, y, torch.ones(1, H, C), d.edge_index)[0],
        lambda x, y: of_attention(operators.GATV2, x, y, torch.ones(1, H, C)),
    ),
    "attention": (
        [(H, C), (H, C), (H, C)],
        lambda d, q, k, v: ops.attention(q, k, v, d.edge_index)[0],
        lambda *x: of_attention(operators.ATTENTION, *x),
    ),
}


def of_attention(operator: operators.Attention, *given: Tensor) -> Layer:
    inputs = [*given, *[None] * (len(operator.operands) - len(given))]
    return cost.attention_layer(operator.shapes, inputs, H, operator.made)


def sent(mesh: Mesh) -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
    """Bytes and collectives of a step of each operator, beside those that are predicted."""
    found = {}
    data = graph()
    data.score = torch.randn(NUM_EDGES, H)  # stays with its edges, and costs nothing
    for name, (shapes, *_) in CALLS.items():
        for i, shape in enumerate(shapes):
            data[f"{name} {i}"] = torch.randn(NUM_NODES, *shape)
    data = layouts(mesh)["uneven"](data)
    for name, (shapes, call, layer) in CALLS.items():
        for learns in (True, False):
            inputs = [
                data[f"{name} {i}"].detach().requires_grad_(learns) for i in range(len(shapes))
            ]
            call(data, *inputs)  # which plans
            fgd.COUNTS.reset()
            out = call(data, *inputs)
            if learns:
                torch.autograd.grad(out.local, [x.local for x in inputs], out.local)
            counted = sum(fgd.COUNTS.sent.values()), sum(fgd.COUNTS.calls.values())
            counts = data.x.rows.counts
            expected = volume(mesh, exchanged(layer(*inputs)), counts, counts)
            found[f"{name}, {learns}"] = counted, (expected.sent[WORLD.rank], expected.collectives)
    edges = torch.tensor([data.edge_index.rows.mine])
    blocks = int(transport.all_gather(edges, [1] * WORLD.size).max())
    owner = data.x.rows.owner
    largest = largest_block(fgd.whole(data.edge_index), owner, owner, mesh)
    return found | {"largest block": ((blocks, 1), (largest, 1))}


def special_values(mesh: Mesh) -> dict[str, str]:
    """Extrema of NaN, infinities and zeros, and results in half precision."""
    torch.manual_seed(2)
    data = graph()
    data.x = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0])[
        torch.multinomial(torch.tensor([1.0, 1, 1, 9, 1, 9]), NUM_NODES * 8, replacement=True)
    ].view(NUM_NODES, 8)
    data.half = torch.randn(NUM_NODES, H, C).to(torch.bfloat16)
    sharded = layouts(mesh)["uneven"](data)
    found = {}
    for reduce in ("max", "min"):
        results = []
        for d in (data, sharded):
            x = d.x.detach().requires_grad_()
            out = ops.segment_reduce(x, d.edge_index, reduce=reduce)
            (grad,) = torch.autograd.grad((out * torch.arange(8.0)).sum(), local_part(x))
            results.append((fgd.whole(out.detach()), whole_rows(grad, x)))
        for kind, expected, of_ranks in zip(("result", "gradient"), *results, strict=True):
            same = torch.allclose(expected, of_ranks, rtol=1e-12, atol=0, equal_nan=True)
            found[f"{reduce}, {kind}"] = "" if same else f"{expected} {of_ranks}"
    results = []
    for d in (data, sharded):
        out, _, stats = ops.gatv2(d.half, d.half, torch.ones(1, H, C).bfloat16(), d.edge_index)
        results.append((fgd.whole(out).double(), fgd.whole(stats)))
    (expected, stats), (of_ranks, joined) = results
    off = float((expected - of_ranks).abs().max())
    found["bfloat16"] = "" if off < 0.02 else f"is off by {off}"  # some roundings to 8 bits
    found["statistics"] = "" if torch.allclose(stats, joined, rtol=1e-5) else "are others"
    return found


def local_part(x: Any) -> Tensor:
    """The rows of this rank, or all of an ordinary tensor."""
    local: Tensor = x.local if fgd.is_sharded(x) else x
    return local


def whole_rows(local: Tensor, like: Any) -> Tensor:
    """Distribution of a sharded tensor as all rows."""
    if not fgd.is_sharded(like):
        return local
    found: Tensor = fgd.whole(fgd.ShardedTensor(local, like.rows, 0))
    return found


def trained(mesh: Mesh, steps: int) -> dict[str, str]:
    found = {}
    for name in ("GCN", "SAGE", "GAT", "GATv2", "Transformer"):
        fastgraph.disable()
        expected = test_models.train(name, graph(), steps)
        with fastgraph.enabled():
            run = test_models.train(name, layouts(mesh)["uneven"](graph()), steps)
        found[name] = test_models.difference(expected, run)
    return found


def by_rows(mesh: Mesh) -> list[list[float]]:
    """Losses with random numbers by rows, computed by halo and by blocks."""
    before, WORLD.random = WORLD.random, "rows"
    parts = PARTITIONS["uneven"](WORLD.size)
    with fastgraph.enabled():
        losses = [
            test_models.train("GAT", fgd.shard(graph(), parts=parts, **options)).losses
            for options in ({"mode": "halo"}, {"mode": "grid", "mesh": mesh})
        ]
    WORLD.random = before
    return losses


def others(mesh: Mesh) -> dict[str, Any]:
    shard = layouts(mesh)["uneven"]
    data = shard(graph())
    found: dict[str, Any] = {}

    fastgraph.disable()
    expected = test_heads.second_derivatives(graph())
    with fastgraph.enabled():
        second = test_heads.second_derivatives(shard(graph()))
    found["second derivatives"] = test_fused.difference(list(expected), list(second))

    fgd.COUNTS.reset()
    SDDMM(data.x, data.x, data.edge_index, None, 1, "mean", False)
    ops.sddmm(data.x, data.x, data.edge_index)
    found["reasons"] = dict(fgd.COUNTS.aggregation)
    found["table"] = str(fastgraph.status())

    try:
        ops.spmm(data.x, data.edge_index + NUM_NODES - 10)
    except IndexError as error:
        found["an edge outside"] = str(error)

    layer = nn.ModuleList([gnn.GCNConv(8, 4), gnn.GATConv(4, 2, 2, edge_dim=3)])
    expected = computed(layer, data)
    WORLD.check = True
    with fastgraph.enabled():
        computed(layer, data)
    WORLD.check = False
    fgd.rebalance(data, weights=[rank + 1 for rank in range(WORLD.size)], method="even")
    with tempfile.TemporaryDirectory() as name:
        folder = transport.broadcast(name)
        if WORLD.rank == 0:
            fgd.write_shards(graph(), f"{folder}/shards", WORLD.size, method="even")
        transport.barrier()
        loaded = fgd.load_shards(f"{folder}/shards", mode="grid", mesh=mesh)
        for kind, of_ranks in {"moved": data, "from shards": loaded}.items():
            fgd.COUNTS.reset()
            with fastgraph.enabled():
                out = computed(layer, of_ranks)
            counts = fgd.COUNTS.attention, fgd.COUNTS.aggregation
            found[kind] = test_fused.difference([expected], [out]), [dict(c) for c in counts]
        transport.barrier()
    return found


SUMS: dict[str, Callable[..., Tensor]] = {
    "spmm": lambda d, x: ops.spmm(x, d.edge_index, reduce="mean"),
    "segment_reduce": lambda d, x: ops.segment_reduce(x, d.edge_index),
    "gcn": lambda d, x: ops.gcn(x, d.edge_index),
}


def fastest() -> dict[str, Any]:
    """Sums and extrema with ``mode="auto"`` on ranks whose work alone takes time.

    By halo the owner of the only node that edges lead to has all the work; by blocks it is that of
    all. What edges weigh would move to blocks at each call.
    """
    before, cost.LEAST_BYTES = cost.LEAST_BYTES, 0  # even these graphs are not too small
    links.KNOWN[WORLD.size] = Cluster(latency=0.0, bandwidth=math.inf, work=1.0, sums=1.0)
    found: dict[str, Any] = {}
    for end, name in enumerate(["from one node", "to one node"]):
        given = graph()
        given.edge_index[end] = 7
        data = fgd.shard(given, parts=torch.arange(NUM_NODES) % WORLD.size, mode="auto")
        fgd.COUNTS.reset()
        for sums, call in SUMS.items():
            results = []
            for d in (given, data):
                x = d.x.detach().requires_grad_()
                out = call(d, x)
                results.append([out.detach(), *torch.autograd.grad(out.square().sum(), [x])])
            of_ranks = [fgd.whole(result) for result in results[1]]
            found[f"{sums}, {name}"] = test_fused.difference(results[0], of_ranks)
        ops.spmm(data.x, data.edge_index, data.edge_weight)
        found[name] = dict(fgd.COUNTS.aggregation)
    del links.KNOWN[WORLD.size]
    cost.LEAST_BYTES = before
    return found


def computed(layer: Any, data: Any) -> Tensor:
    """By a sum and by attention."""
    x = layer[0](data.x, data.edge_index)
    found: Tensor = fgd.whole(layer[1](x, data.edge_index, data.edge_attr).detach())
    return found


def compare_on_this_rank(steps: int) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    WORLD.random = "exact"
    meshes = MESHES[WORLD.size]
    chosen = meshes[(len(meshes) - 1) // 2]  # with more columns than one
    return {
        "layers": {f"{label(mesh)}, {k}": v for mesh in meshes for k, v in layers(mesh).items()},
        "sent": {f"{label(mesh)}, {k}": v for mesh in meshes for k, v in sent(mesh).items()},
        "special values": {
            f"{label(mesh)}, {k}": v for mesh in meshes for k, v in special_values(mesh).items()
        },
        "trained": trained(chosen, steps),
        "by rows": by_rows(chosen),
        "fastest": fastest(),
        **others(chosen),
    }


def label(mesh: Mesh) -> str:
    return "x".join(map(str, mesh))


@pytest.fixture(scope="module")
def found(world_size: int, once_on_ranks: Any, pytestconfig: pytest.Config) -> list[dict[str, Any]]:
    steps = pytestconfig.getoption("--steps")
    found: list[dict[str, Any]] = once_on_ranks(compare_on_this_rank, world_size, steps)
    return found


def test_layers(found: list[dict[str, Any]]) -> None:
    for rank, of_rank in enumerate(found):
        assert len(of_rank["layers"]) >= len(NAMES)
        for key, (result, counts) in of_rank["layers"].items():
            at = f"{key}, rank {rank}"
            assert not result.error, f"{at}: {result.error}"
            assert result.routed, f"{at}: {result.reasons}"
            assert not result.gathers, at
            case = key.split(", ", 1)[1].rpartition(", ")[0]
            assert bool(result.planned_again) == (case in test_fused.PLANNED_EACH_TIME), at
            assert set(counts) == {"grid"}, at


def test_what_is_sent(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        for key, (counted, expected) in of_rank["sent"].items():
            assert counted == expected, key
            assert min(counted) > 0, key


def test_special_values(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert set(of_rank["special values"].values()) == {""}, of_rank["special values"]


def test_training_is_that_of_one_process(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert set(of_rank["trained"].values()) == {""}, of_rank["trained"]


def test_random_numbers_do_not_depend_on_the_mode(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        halo, by_blocks = of_rank["by rows"]
        assert by_blocks == pytest.approx(halo, rel=TOLERANCE)


def test_gradients_of_gradients(found: list[dict[str, Any]]) -> None:
    assert [of_rank["second derivatives"] for of_rank in found] == [""] * len(found)


def test_what_is_computed_by_halo_says_why(found: list[dict[str, Any]]) -> None:
    reasons = {"halo: products are divided by degrees": 1, "grid": 1}
    for of_rank in found:
        assert of_rank["reasons"] == reasons
        assert "other fused operators" in of_rank["table"]


def test_sums_are_computed_in_the_fastest_mode(found: list[dict[str, Any]]) -> None:
    counts = {"from one node": "halo: fastest", "to one node": "grid: fastest"}
    for of_rank in found:
        for name, way in counts.items():
            assert of_rank["fastest"].pop(name) == {way: len(SUMS)}
        assert of_rank["fastest"] == {f"{sums}, {name}": "" for name in counts for sums in SUMS}


def test_an_edge_outside_is_an_error_on_all_ranks(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert "points outside the nodes" in of_rank["an edge outside"]


@pytest.mark.parametrize("kind", ["moved", "from shards"])
def test_edges_come_to_their_blocks(found: list[dict[str, Any]], kind: str) -> None:
    for of_rank in found:
        assert of_rank[kind] == ("", [{"grid": 1}, {"grid": 1}])


def test_the_volume_falls_with_the_root_of_ranks() -> None:
    n, k = 14400, 7
    for root in (1, 2, 3, 4, 5):
        ranks = root * root
        counts = [n // ranks] * ranks
        of_sum = volume((root, root), Exchanged(Widths(k, 0, k)), counts, counts)
        # Along each axis; doubled by a backward pass.
        assert set(of_sum.sent) == {2 * n * k * (root - 1) // ranks}
        both = volume((root, root), Exchanged(Widths(k, 0, k), Widths(k, 0, k)), counts, counts)
        assert both.sent == [2 * x for x in of_sum.sent]
        assert both.collectives == (4 if root > 1 else 0)


def test_the_usual_mesh_is_the_most_square_one() -> None:
    expected = {1: (1, 1), 2: (2, 1), 3: (3, 1), 4: (2, 2), 8: (4, 2), 12: (4, 3), 512: (32, 16)}
    assert {size: usual_mesh(size) for size in expected} == expected


def test_a_mesh_is_one_of_the_ranks() -> None:
    fgd.init()
    with pytest.raises(ValueError, match=r"mesh must be .* 1 ranks, .* got \(2, 2\)"):
        fgd.shard(graph(), mode="grid", mesh=(2, 2))
    with pytest.raises(ValueError, match="mesh is for mode='grid', got mode='heads'"):
        fgd.shard(graph(), mode="heads", mesh=(1, 1))
    options = parser().parse_args(["--mode", "grid", "--mesh", "2x4", "train.py"])
    assert options.mesh == (2, 4)
    with pytest.raises(SystemExit):
        parser().parse_args(["--mesh", "2,4", "train.py"])


def test_the_grid_is_known_by_the_name_that_it_had() -> None:
    fgd.init()
    assert fgd.shard(graph(), mode="2d", mesh=(1, 1)).x.rows.mode == "grid"
    assert parser().parse_args(["--mode", "2d", "train.py"]).mode == "grid"
