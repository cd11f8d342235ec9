"""Edge programs, softmaxes of edges and winners on a grid of ranks, beside one process."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor

import fastgraph
import fastgraph.dist as fgd
from fastgraph import ops
from fastgraph.dist.operators import cost
from fastgraph.dist.operators.grid.cost import exchanged, volume
from fastgraph.dist.operators.halo.cost import rows_of_halo
from fastgraph.dist.ranks.mesh import Mesh
from fastgraph.dist.ranks.world import WORLD
from fastgraph.edge_programs.program import parse
from fastgraph.ops.edge_program import with_records
from tests.dist import test_any_message
from tests.dist.comparing import deviation
from tests.dist.graphs import NUM_EDGES, NUM_FEATURES, NUM_NODES, PARTITIONS, graph
from tests.dist.test_any_message import PLANNED_EACH_TIME
from tests.dist.test_fused import TOLERANCE, Found, assert_as_expected, bipartite, compared, shards
from tests.dist.test_grid import MESHES, hub

VA = """
    y = row 4
    x = gathered 4
    t0 = dot y x 1
    t1 = mul t0 x
    sum t1
"""

PROGRAMS = {
    "sum": VA,
    "mean": "x = gathered 4\n w = edge 1\n t0 = mul w x\n mean t0",
    "max": "y = row 4\n x = gathered 4\n t0 = mul x y\n max t0",
    "min with zeros": "x = gathered 4\n t0 = relu x\n min t0\n max t0",
    "edges and all": """
        y = row 4
        x = gathered 4
        a = parameter 4
        m = parameter 12
        t0 = mul x a
        t1 = add t0 y
        t2 = tanh t1
        t3 = product t2 m 3
        edge t2
        total t2
        sum t3
    """,
    "several": """
        y = row 4
        x = gathered 4
        w = edge 2
        t0 = sub x y
        t1 = mul t0 w
        t2 = leaky_relu t1 w
        sum t1
        mean t1
        max t1
        min t0
        var t0
        std t1
    """,
    "softmax of heads": """
        y = row 4
        x = gathered 4
        w = edge 2
        t0 = dot x y 2
        t1 = mul t0 w
        softmax x t1
        sum t1
    """,
    "softmax of channels": "x = gathered 4\n a = parameter 1\n t0 = mul x a\n softmax x t0",
    "masked softmax": """
        x = gathered 4
        w = edge 1
        t0 = constant 0.5
        t1 = constant -inf
        t2 = lt t0 w
        t3 = where t2 w t1
        softmax x t3
    """,
}

# These have each kind of operands and of reductions.
IN_ALL_LAYOUTS = ["edges and all", "several", "softmax of heads"]


def operands_of(text: str, data: Any) -> dict[str, Tensor]:
    """Values for a program: a leaf of each, drawn alike on one process and on ranks."""
    found = {}
    for operand in parse(text).operands:
        g = torch.Generator().manual_seed(len(operand.name) * 7 + ord(operand.name[0]))
        rows = {"row": (NUM_NODES,), "gathered": (NUM_NODES,), "edge": (NUM_EDGES,)}
        x = torch.randn(*rows.get(operand.place, ()), operand.width, generator=g)
        if operand.name == "w":
            x = x.abs()
        # Many values are equal, and zero.
        x = (x * 2).round() / 2 if "max" in text or "min" in text else x
        if fgd.is_sharded(data.x) and operand.place != "parameter":
            layout = data.edge_index.rows if operand.place == "edge" else data.x.rows
            x = fgd.ShardedTensor(x[layout.position], layout, 0)
        found[operand.name] = x.requires_grad_()
    return found


def weighted(out: Sequence[Tensor]) -> Tensor:
    """A number of which all elements have gradients that are not alike."""
    return cast("Tensor", sum(((k + 1) * x.sin()).sum() for k, x in enumerate(out)))


def results(text: str, data: Any) -> list[Tensor]:
    """Outputs, all gradients and, of programs that have them, those of gradients."""
    given = operands_of(text, data)
    size = {"num_in": NUM_NODES, "num_out": NUM_NODES}
    out = ops.edge_program(text, given, data.edge_index, **size)
    leaves = list(given.values())
    grads = torch.autograd.grad(weighted(out), leaves, create_graph=True)
    of_grads = cast("Tensor", sum(g.square().sum() for g in grads))
    found = [*out, *grads, *torch.autograd.grad(of_grads, leaves, allow_unused=True)]
    with torch.no_grad():
        found += ops.edge_program(text, given, data.edge_index, **size)
    return [fgd.whole(x).detach() for x in found if x is not None]


class Outcome(NamedTuple):
    """A call on ranks.

    Attributes:
        wrong: how it differs from one process, empty if it does not.
        modes: how it was computed.
        gathers: what was gathered.
    """

    wrong: list[str]
    modes: set[str]
    gathers: dict[str, int]


def beside(call: Callable[[Any], list[Tensor]], one: Any, many: Any) -> Outcome:
    expected = call(one)
    fgd.COUNTS.reset()
    found = call(many)
    modes, gathers = set(fgd.COUNTS.aggregation), dict(fgd.COUNTS.gathers)
    wrong = []
    for on_one, of_ranks in zip(expected, found, strict=True):
        finite = on_one.nan_to_num(0, 0, 0), of_ranks.nan_to_num(0, 0, 0)
        wrong.append(deviation(finite[0], finite[1], TOLERANCE))
        special, others = (torch.where(x.isfinite(), 0, x) for x in (on_one, of_ranks))
        is_same = torch.allclose(special, others, equal_nan=True)
        wrong.append("" if is_same else "is not finite elsewhere")
    return Outcome([text for text in wrong if text], modes, gathers)


def softmax(data: Any) -> list[Tensor]:
    """Of scores of two heads, some of which are minus infinity."""
    g = torch.Generator().manual_seed(4)
    score = torch.randn(NUM_EDGES, 2, generator=g) * 30
    score[::5] = -math.inf  # of some nodes all, and of both heads
    factor = torch.randn(NUM_EDGES, 2, generator=g)
    if fgd.is_sharded(data.x):
        rows = data.edge_index.rows
        score, factor = (fgd.ShardedTensor(x[rows.position], rows, 0) for x in (score, factor))
    score.requires_grad_()
    found = []
    for x in (score, score[:, 0]):
        out = ops.edge_softmax(x, data.edge_index, num_out=NUM_NODES)
        by = factor if out.dim() == 2 else factor[:, 0]
        (grad,) = torch.autograd.grad((out * by).sum(), [score])
        # Where weights are NaN their gradients may be, too, or zeros.
        out, grad = fgd.whole(out.detach()), fgd.whole(grad)
        found += [out, grad[~out.view(NUM_EDGES, -1)[:, 0].isnan(), : out.dim()]]
    return found


def winners(data: Any) -> list[Tensor]:
    """Extrema with ties, NaN and infinities, of which one edge has the gradient."""
    g = torch.Generator().manual_seed(5)
    x = torch.randint(-2, 3, (NUM_NODES, 4), generator=g).double()
    x[::9], x[::11], x[4::13] = math.nan, -math.inf, math.inf
    weight = torch.randint(1, 3, (NUM_EDGES,), generator=g).double()
    if fgd.is_sharded(data.x):
        rows = data.edge_index.rows
        weight = fgd.ShardedTensor(weight[rows.position], rows, 0)
        x = fgd.ShardedTensor(x[data.x.rows.position], data.x.rows, 0)
    x.requires_grad_()
    found = []
    for reduce in ("max", "min"):
        for by in (None, weight):
            out = ops.segment_reduce(x, data.edge_index, by, reduce=reduce, ties="winner")
            factor = torch.arange(1.0, 1 + NUM_NODES * 4).view(NUM_NODES, 4)
            (grad,) = torch.autograd.grad((out * factor).sum(), [x])
            found += [fgd.whole(out.detach()), fgd.whole(grad)]
    return found


class Sent(NamedTuple):
    """A step of a program: bytes and collectives that were counted, and that were predicted."""

    counted: tuple[int, int]
    predicted: tuple[int, int]


def sent(mesh: Mesh, data: Any) -> dict[str, Sent]:
    """The bytes that a rank sends for programs of nodes alone, forward and backward."""
    found = {}
    for name, text in PROGRAMS.items():
        program = parse(text)
        if any(operand.place in ("edge", "parameter") for operand in program.operands):
            continue
        given = operands_of(text, data)
        leaves = list(given.values())
        torch.autograd.grad(weighted_local(text, given, data), leaves)  # which plans
        fgd.COUNTS.reset()
        loss = weighted_local(text, given, data)
        torch.autograd.grad(loss, leaves)
        counted = sum(fgd.COUNTS.sent.values()), sum(fgd.COUNTS.calls.values())
        layer = cost.program_layer(with_records(program), leaves)
        counts = data.x.rows.counts
        expected = volume(mesh, exchanged(layer), counts, counts)
        found[name] = Sent(counted, (expected.sent[WORLD.rank], expected.collectives))
    return found


def sent_by_layer(mesh: Mesh, data: Any) -> dict[str, tuple[int, int]]:
    """Bytes of a step of vanilla attention with a matrix: O(n k / sqrt(p) + k^2)."""
    given = operands_of(VA, data)
    leaves = list(given.values())
    weight = torch.randn(4, 4, requires_grad=True)

    def step() -> None:
        (out,) = ops.edge_program(VA, given, data.edge_index)
        torch.autograd.grad(cast("Any", out @ weight).local.sum(), [*leaves, weight])

    step()  # which plans
    fgd.COUNTS.reset()
    step()
    counts = data.x.rows.counts
    layer = cost.program_layer(parse(VA), leaves)
    rows = volume(mesh, exchanged(layer), counts, counts).sent[WORLD.rank]
    sent = fgd.COUNTS.sent
    return {
        "rows": (sent["all_to_all"], rows),
        "weights": (sum(sent.values()) - sent["all_to_all"], (WORLD.size - 1) * weight.nbytes),
    }


def sent_by_halo(data: Any) -> tuple[int, int]:
    """Bytes of a step of a sum by halo, beside those that are counted without ranks."""
    x = data.x.detach().requires_grad_()
    ops.spmm(x, data.edge_index)  # which plans
    fgd.COUNTS.reset()
    torch.autograd.grad(cast("Any", ops.spmm(x, data.edge_index)).local.sum(), [x])
    owner = data.x.rows.owner
    counted = fgd.COUNTS.sent["all_to_all"]
    rows = rows_of_halo(fgd.whole(data.edge_index), owner, owner, WORLD.size)
    of_rank = rows.sends[WORLD.rank] + rows.receives[WORLD.rank]
    return counted, of_rank * x.shape[1] * x.element_size()


def narrowed(one: Any, many: Any) -> tuple[str, int, int]:
    """A layer with fewer channels out than in: its result, and bytes beside those of a wide one."""
    sent = []
    for channels in (2, NUM_FEATURES):
        torch.manual_seed(0)
        layer = gnn.SAGEConv(NUM_FEATURES, channels)
        with torch.no_grad(), fastgraph.enabled():
            expected = layer(one.x, one.edge_index)
            layer(many.x, many.edge_index)  # which plans
            fgd.COUNTS.reset()
            out = layer(many.x, many.edge_index)
            sent.append(fgd.COUNTS.sent["all_to_all"])
        wrong = deviation(expected, fgd.whole(out), TOLERANCE)
    return wrong, sent[0] * NUM_FEATURES, sent[1] * 2


class Clipped(gnn.GCNConv):
    """A message that is no product with the features."""

    def message(self, x_j: Tensor, edge_weight: Tensor | None) -> Tensor:
        return super().message(x_j.relu(), edge_weight)


def gcn(**options: Any) -> Callable[[int, int], gnn.GCNConv]:
    return functools.partial(gnn.GCNConv, **options)


def watched(layer: gnn.GCNConv) -> gnn.GCNConv:
    layer.lin.register_forward_hook(lambda *_: None)
    return layer


D = NUM_FEATURES
WIDENING: dict[str, tuple[Any, int, bool, tuple[int, int]]] = {
    # How it is made, channels out, whether features have a gradient, and channels there and back.
    "wider": (gnn.GCNConv, 2 * D, True, (D, D)),
    "wider, of features": (gnn.GCNConv, 2 * D, False, (D, 0)),
    "as wide": (gnn.GCNConv, D, True, (D, D)),
    "as wide, of features": (gnn.GCNConv, D, False, (D, 0)),
    "narrower": (gnn.GCNConv, 2, True, (2, 2)),
    "narrower, of features": (gnn.GCNConv, 2, False, (2, 2)),
    "not normalised": (gcn(normalize=False, add_self_loops=False), 2 * D, True, (D, D)),
    "a message of its own": (Clipped, 2 * D, True, (2 * D, 2 * D)),
    "maxima": (gcn(aggr="max"), 2 * D, True, (2 * D, 2 * D)),
    "watched": (lambda *sizes: watched(gnn.GCNConv(*sizes)), 2 * D, True, (2 * D, 2 * D)),
}


def widened(one: Any, many: Any) -> dict[str, tuple[str, int, int]]:
    """Layers that upstream has multiply first: how far they are off, bytes sent and predicted."""
    found, units = {}, [0, 0]
    for name, (make, channels, learns, widths) in {
        "unit": WIDENING["narrower"],
        **WIDENING,
    }.items():
        results = []
        for data in (one, many):
            for _ in range(2):  # the first of which plans
                torch.manual_seed(0)
                layer, x = make(D, channels), data.x.detach().clone().requires_grad_(learns)
                fgd.COUNTS.reset()
                out = layer(x, data.edge_index)
                there = fgd.COUNTS.sent["all_to_all"]
                out.square().sum().backward()
                sent = fgd.COUNTS.sent["all_to_all"]
            grads = [p.grad for p in (*layer.parameters(), x) if p.grad is not None]
            results.append([fgd.whole(t).detach() for t in (out, *grads)])
        if name == "unit":
            units = [there // channels, (sent - there) // channels]
            continue
        wrong = [deviation(a, b, TOLERANCE) for a, b in zip(*results, strict=True)]
        predicted = sum(width * unit for width, unit in zip(widths, units, strict=True))
        # Extrema send what is none of features besides.
        found[name] = "; ".join(filter(None, wrong)), sent, predicted if name != "maxima" else sent
    return found


def widened_on(*sharded: Any) -> list[dict[str, tuple[str, int, int]]]:
    with fastgraph.enabled():
        return [widened(graph(), data) for data in sharded]


def weighted_local(text: str, given: dict[str, Tensor], data: Any) -> Tensor:
    """A number of this rank's rows, so that nothing is sent but by the program."""
    out = ops.edge_program(text, given, data.edge_index)
    return cast("Tensor", sum(cast("Any", x).local.sum() for x in out))


LAYERS = [
    *("ResGated, features", "ResGated, pair", "ResGated, replicated edges", "GINE, pair"),
    *("CG, max", "GEN, softmax", "own, attending", "EG", "own, of types", "own, of rare types"),
    *("own, min with ties", "own, max with ties", "own, several aggregations", "RGAT"),
    *("own, gated, reversed", "own, of edges alone", "own, leaving attention"),
    *("EdgeConv, two layers", "FastRGCN, pair", "own, gated, twice"),
]
REASON = "halo: gathered rows are laid out for it"
# Layers of pairs of nodes and types, which are with their edges.
BY_HALO = {"own, of types", "own, of rare types", "RGAT", "FastRGCN, pair"}


def on_this_rank() -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    WORLD.random = "exact"
    meshes = MESHES[WORLD.size]
    mesh = meshes[(len(meshes) - 1) // 2]  # with more columns than one
    outcomes: dict[str, Outcome] = {}
    for layout, parts in PARTITIONS.items():
        shard = shards(parts(WORLD.size), mode="grid", mesh=mesh)
        is_usual = layout == "uneven"
        for kind, make in {"usual": graph, "hub": hub}.items() if is_usual else [("usual", graph)]:
            one, many = make(), shard(make())
            for name in PROGRAMS if is_usual and kind == "usual" else IN_ALL_LAYOUTS:
                text = PROGRAMS[name]
                call = functools.partial(results, text)
                outcomes[f"{name}, {kind}, {layout}"] = beside(call, one, many)
            for other in (softmax, winners):
                outcomes[f"{other.__name__}, {kind}, {layout}"] = beside(other, one, many)
    shard = shards(PARTITIONS["uneven"](WORLD.size), mode="grid", mesh=mesh)
    layers = {}
    for name in LAYERS:
        make = bipartite if "pair" in name else graph
        found = compared(test_any_message.CASES[name], make, shard)
        layers[name] = found, set(fgd.COUNTS.aggregation)
    data = shard(graph())
    by_halo = shards(PARTITIONS["uneven"](WORLD.size), mode="halo")(graph())
    return {
        "outcomes": outcomes,
        "layers": layers,
        "sent": sent(mesh, data),
        "sent by a layer": sent_by_layer(mesh, data),
        "sent by halo": sent_by_halo(by_halo),
        "narrowed": [narrowed(graph(), many) for many in (data, by_halo)],
        "widened": widened_on(data, by_halo),
    }


@pytest.fixture(scope="module")
def found(world_size: int, once_on_ranks: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = once_on_ranks(on_this_rank, world_size)
    return found


def test_programs_softmaxes_and_winners(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        for key, outcome in of_rank["outcomes"].items():
            assert outcome == Outcome([], {"grid"}, {}), key


@pytest.mark.parametrize("name", LAYERS)
def test_layers(found: list[dict[str, Any]], name: str) -> None:
    results = [of_rank["layers"][name] for of_rank in found]
    of_layer: list[Found] = [result for result, _ in results]
    case = test_any_message.CASES[name]
    assert_as_expected(of_layer, case, is_planned_again=name in PLANNED_EACH_TIME)
    for _, modes in results:
        assert modes - {"grid"} == ({REASON} if name in BY_HALO else set())
        assert modes


def test_what_programs_send(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        for name, step in of_rank["sent"].items():
            assert step.counted == step.predicted, name
            assert min(step.counted) > 0, name


def test_the_volume_of_a_layer_is_that_of_its_rows_and_its_matrix(
    found: list[dict[str, Any]],
) -> None:
    for of_rank in found:
        for counted, predicted in (*of_rank["sent by a layer"].values(), of_rank["sent by halo"]):
            assert counted == predicted > 0


def test_the_narrower_features_are_sent(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        for wrong, narrow, wide in of_rank["narrowed"]:
            assert not wrong
            assert 0 < narrow == wide


def test_a_layer_multiplies_where_less_is_sent(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        for of_mode in of_rank["widened"]:
            for name, (wrong, sent, predicted) in of_mode.items():
                assert not wrong, name
                assert sent == predicted > 0, name
