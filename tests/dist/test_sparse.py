"""Sparse matrices of sharded edges, and layers on them, beside those of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastgraph.dist as fgd
import fastgraph.sparse as fgs
from fastgraph.dist.operators import cost
from fastgraph.dist.operators.grid.cost import Exchanged, Widths, exchanged, volume
from fastgraph.dist.ranks.mesh import Mesh
from fastgraph.dist.ranks.world import WORLD
from fastgraph.nn import GlobalAGNN, GlobalGAT, GlobalVA
from fastgraph.registry import operators
from fastgraph.sparse import SparseMatrix
from fastgraph.sparse.groups import REDUCTIONS
from tests.dist.comparing import deviation
from tests.dist.graphs import NUM_FEATURES, NUM_NODES, PARTITIONS, graph
from tests.dist.test_fused import TOLERANCE, shards
from tests.dist.test_grid import MESHES

MODES = ("halo", "grid")
LAYERS = {layer.__name__: layer for layer in (GlobalVA, GlobalAGNN, GlobalGAT)}

FUNCTIONS: dict[str, Callable[[SparseMatrix, Tensor], Tensor]] = {
    "sddmm": lambda a, h: fgs.sddmm(a, h, h.T).val,
    "sddmm of heads": lambda a, h: fgs.bsddmm(a, in_heads(h), in_heads(h).transpose(1, 0)).val,
    "sddmm of the transpose": lambda a, h: fgs.sddmm(a.T, h, h.T).val,
    "spmm": lambda a, h: a @ h,
    "spmm of the transpose": lambda a, h: a.T @ h,
    "spmm with a vector": lambda a, h: a @ h[:, 0],
    "softmax": lambda a, h: a.softmax().val,
    "softmax of columns": lambda a, h: a.softmax(0).val,
    "softmax and spmm": lambda a, h: fgs.sddmm(a, h, h.T).softmax() @ h,
    "powers": lambda a, h: ((-a) ** 2 * 3).val,
    "rows": lambda a, h: fgs.sp_mul_v(a, h[:, :1]).val,
    "columns": lambda a, h: fgs.sp_add_v(a, h[:, 0]).val,
    **{
        f"{name} of {dim}": lambda a, h, name=name, dim=dim: a.reduce(dim, name)
        for name in REDUCTIONS
        for dim in (None, 0, 1)
    },
}


def of_norms(a: SparseMatrix, h: Tensor) -> Tensor:
    n = torch.linalg.vector_norm(h, dim=1)
    return a * (fgs.dense(h) @ h.T) / (fgs.rows(n) * fgs.cols(n)) @ h


def of_ends(a: SparseMatrix, h: Tensor) -> SparseMatrix:
    return a * F.leaky_relu(fgs.rows(h[:, 0]) + fgs.cols(h[:, 1]), 0.2)


def of_channels(a: SparseMatrix, h: Tensor) -> Tensor:
    both = F.leaky_relu(fgs.rows(in_heads(h)) + fgs.cols(in_heads(h) * 2), 0.3)
    weights = a * (both @ torch.linspace(-1, 1, 8, device=h.device).view(4, 2))
    return weights.softmax() @ in_heads(h)


# One operator each, so that every row is sent once.
FUSED: dict[str, Callable[[SparseMatrix, Tensor], Tensor]] = {
    "dots": lambda a, h: a * (fgs.dense(h) @ h.T) @ h,
    "dots of heads": lambda a, h: fgs.bsddmm(a, in_heads(h), keys(h)) @ in_heads(h),
    "dots, other features": lambda a, h: fgs.sddmm(a, h, h.T) @ h.sin(),
    "dots of the transpose": lambda a, h: fgs.sddmm(a.T, h, h.T) @ h,
    "dots over norms": of_norms,
    "softmax of ends": lambda a, h: of_ends(a, h).softmax() @ h,
    "ends": lambda a, h: of_ends(a, h) @ h,
    "softmax of dots of heads": lambda a, h: (
        fgs.bsddmm(a, in_heads(h), keys(h)).softmax() @ in_heads(h)
    ),
    "softmax of channels": of_channels,
    "tanh of dots": lambda a, h: a * torch.tanh(fgs.dense(h) @ h.T) @ h,
    "factors of columns": lambda a, h: a * fgs.cols(h[:, 0]) @ h,
}
FUNCTIONS.update(FUSED)
# Which operands are one tensor is found alike on a rank that has none of its rows.
IN_ALL_LAYOUTS = ["dots", "dots of heads", "dots over norms", "softmax of channels"]
FUNCTIONS.update(
    {
        "sums of dots": lambda a, h: fgs.sddmm(a, h, h.T).sum(1),
        "extrema of dots": lambda a, h: fgs.sddmm(a, h, h.T).smax(0),
        "values of dots": lambda a, h: fgs.sddmm(a, h, h.T).val.tanh(),
    }
)
# Products of groups that are with several ranks, or of all values, have no rule.
GATHERING = ["sprod of None", "sprod of 0", "sprod of 1"]

REFUSED: dict[str, Callable[[SparseMatrix], object]] = {
    "csr": lambda a: a.csr(),
    "csc": lambda a: a.csc(),
    "coalesce": lambda a: a.coalesce(),
    "duplicates": lambda a: a.has_duplicate(),
    "a sparse product": lambda a: a @ a,
    "a sum": lambda a: a + a,
    "an entry by entry product": lambda a: a * a,
    "rows by number": lambda a: a.index_select(0, torch.tensor([1])),
    "consecutive rows": lambda a: a.range_select(0, slice(0, 4)),
    "a sample": lambda a: a.sample(0, 2),
    "compact": lambda a: a.compact(0),
}


def in_heads(h: Tensor) -> Tensor:
    return h.view(NUM_NODES, 4, 2)


def keys(h: Tensor) -> Tensor:
    return in_heads(h).permute(1, 0, 2)


def results(data: Any, call: Callable[[SparseMatrix, Tensor], Any], *more: Tensor) -> list[Tensor]:
    """The result of a function, and the gradients of values, features and parameters."""
    h, val = (x.detach().requires_grad_() for x in (data.x, data.edge_weight))
    out = call(fgs.from_edge_index(data.edge_index, val, NUM_NODES), h)
    grads = torch.autograd.grad(out.sin().sum(), [h, val, *more], allow_unused=True)
    return [fgd.whole(x).detach() for x in (out, *grads) if x is not None]


def on_this_rank() -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    found: dict[str, Any] = {"wrong": {}, "gathers": {}, "refused": {}, "modes": {}}
    found["calls"] = {}
    for mode in ("halo", "grid"):
        one = graph()
        many = shards(PARTITIONS["uneven"](WORLD.size), mode=mode)(graph())

        def compare(
            name: str, call: Any, *more: Tensor, one: Any = one, many: Any = many, mode: str = mode
        ) -> None:
            expected = results(one, call, *more)
            fgd.COUNTS.reset()
            of_ranks = results(many, call, *more)
            pairs = zip(expected, of_ranks, strict=True)
            key = f"{name}, {mode}"
            found["wrong"][key] = [text for p in pairs if (text := deviation(*p, TOLERANCE))]
            found["gathers"][key] = dict(fgd.COUNTS.gathers)
            found["modes"][key] = dict(fgd.COUNTS.aggregation)
            counted = fgd.COUNTS.aggregation["grid"] + fgd.COUNTS.attention["grid"]
            found["calls"][key] = counted

        for name, call in FUNCTIONS.items():
            if mode == "grid" or name not in FUSED or name in IN_ALL_LAYOUTS:
                compare(name, call)
        for name, make in LAYERS.items():
            for channels in (3, NUM_FEATURES + 3):
                torch.manual_seed(0)
                layer = make(NUM_FEATURES, channels)
                compare(f"{name}, {channels}", layer, *layer.parameters())
        if mode == "grid":
            empty = shards(PARTITIONS["one is empty"](WORLD.size), mode=mode)(graph())
            for name in IN_ALL_LAYOUTS:
                compare(f"{name}, one is empty", FUSED[name], many=empty)
        a = fgs.from_edge_index(many.edge_index, num_nodes=NUM_NODES)
        waiting, h = fgs.sddmm(a, many.x, many.x.T), many.x
        h += 1
        try:
            waiting @ h
        except RuntimeError as error:
            found["edited"] = str(error)
        assert fgd.is_sharded(a.val) and a.val.dtype == torch.float64
        for name, refused in REFUSED.items():
            try:
                refused(a)
            except NotImplementedError as error:
                found["refused"][f"{name}, {mode}"] = str(error)
        try:
            fgs.from_edge_index(many.edge_index, num_nodes=3)
        except IndexError as error:
            found["outside"] = str(error)
    found["sent"] = {mesh: sent(mesh) for mesh in MESHES[WORLD.size]}
    found["kinds"] = kinds_sent()
    return found


class Sent(NamedTuple):
    """A step: the bytes of rows and of all else, and collectives, counted and predicted."""

    counted: tuple[int, int, int]
    predicted: tuple[int, int, int]


def step(call: Any, data: Any) -> None:
    """Forward and backward of the rows of this rank, so that nothing is sent but by the call."""
    a = fgs.from_edge_index(data.edge_index, num_nodes=NUM_NODES)
    for _ in range(2):  # the first one plans, and finds rows without entries
        h = data.x.detach().requires_grad_()
        fgd.COUNTS.reset()
        parameters = [*call.parameters()] if isinstance(call, torch.nn.Module) else []
        torch.autograd.grad(call(a, h).local.sin().sum(), [h, *parameters])


def two_or_more() -> Tensor:
    """Uneven parts: ranks with a row or none compare whether a reshape has copied."""
    parts = PARTITIONS["uneven"](WORLD.size)
    parts[: 2 * WORLD.size] = torch.arange(2 * WORLD.size) % WORLD.size
    return parts


def sent(mesh: Mesh) -> dict[str, Sent]:
    """The bytes of a step of attention on a grid, beside the formulas."""
    data = shards(two_or_more(), mode="grid", mesh=mesh)(graph())
    counts, k = data.x.rows.counts, NUM_FEATURES
    found = {}

    def by_two(a: SparseMatrix, h: Tensor) -> Tensor:
        scores = fgs.SparseMatrix(a.pattern, fgs.sddmm(a, h, h.T).val * 1.0)
        return fgs.spmm(scores, h)

    def alike(sources: int, destinations: int, partial: int) -> Exchanged:
        of_bytes = Widths(8 * sources, 8 * destinations, 8 * partial)
        return Exchanged(of_bytes, of_bytes)

    given = [x.requires_grad_() for x in (torch.empty(1, 1, k), *torch.empty(2, 1, 1))]
    gat = exchanged(cost.attention_layer(operators.GAT.shapes, [*given, None], 1))
    # A layer with much fewer channels out multiplies first.
    calls: dict[str, tuple[Any, Exchanged]] = {
        "one operator": (lambda a, h: fgs.sddmm(a, h, h.T) @ h, alike(k, k, k)),
        "two operators": (by_two, alike(2 * k, k, k)),
        "a layer": (GlobalVA(k, k), alike(k, k, k)),
        "a narrowing layer": (GlobalVA(k, 3), alike(k + 3, k, 3)),
        "a layer of cosines": (GlobalAGNN(k, k), alike(k + 1, k, k)),
        "a layer of ends": (GlobalGAT(k, k), gat),
    }
    for name, (call, widths) in calls.items():
        step(call, data)
        rows = fgd.COUNTS.sent["all_to_all"]
        others = sum(fgd.COUNTS.sent.values()) - rows
        parameters = [*call.parameters()] if isinstance(call, torch.nn.Module) else []
        expected = volume(mesh, widths, counts, counts)
        of_parameters = (WORLD.size - 1) * sum(w.nbytes for w in parameters)
        collectives = expected.collectives + len(parameters)
        # Two operators gather one after the other.
        collectives += 2 * (name == "two operators" and mesh[0] > 1)
        found[name] = Sent(
            (rows, others, sum(fgd.COUNTS.calls.values())),
            (expected.sent[WORLD.rank], of_parameters, collectives),
        )
    return found


def kinds_sent() -> dict[str, set[str]]:
    """The collectives that products of expressions of nodes take."""
    found = {}
    for mode in MODES:
        data = shards(two_or_more(), mode=mode)(graph())
        for name, call in FUSED.items():
            step(call, data)
            found[f"{name}, {mode}"] = {kind for kind, n in fgd.COUNTS.calls.items() if n > 0}
    return found


@pytest.fixture(scope="module")
def found(world_size: int, once_on_ranks: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = once_on_ranks(on_this_rank, world_size)
    return found


def test_functions_and_layers_are_those_of_one_process(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        left_out = len(FUSED) - 2 * len(IN_ALL_LAYOUTS)
        assert len(of_rank["wrong"]) == 2 * (len(FUNCTIONS) + 2 * len(LAYERS)) - left_out
        assert {key: wrong for key, wrong in of_rank["wrong"].items() if wrong} == {}
        gathering = {key.rpartition(", ")[0] for key, some in of_rank["gathers"].items() if some}
        assert gathering <= {*GATHERING}


def test_layers_are_computed_on_the_grid(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        for name in LAYERS:
            assert of_rank["modes"][f"{name}, 3, grid"] == {"grid": 1}
        for name in FUSED:
            assert of_rank["calls"][f"{name}, grid"] == 1, name
        for name in IN_ALL_LAYOUTS:
            assert of_rank["calls"][f"{name}, one is empty, grid"] == 1, name


def test_a_row_is_sent_once_by_one_operator(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        for steps in of_rank["sent"].values():
            for name, step in steps.items():
                assert step.counted == step.predicted, name
                assert step.counted[0] > 0, name
            rows = {name: step.counted[0] for name, step in steps.items()}
            assert 4 * rows["one operator"] >= 2 * rows["two operators"]


def test_nothing_but_rows_is_sent(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        kinds = of_rank["kinds"]
        assert len(kinds) == len(MODES) * len(FUSED)
        assert {name: kind for name, kind in kinds.items() if kind != {"all_to_all"}} == {}


def test_operands_that_were_edited_are_an_error(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert "was edited in place before the values were computed" in of_rank["edited"]


def test_what_needs_all_entries_is_refused(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert set(of_rank["refused"]) == {f"{n}, {mode}" for n in REFUSED for mode in MODES}
        assert all("no rank has all of them" in text for text in of_rank["refused"].values())
        assert "expected 0 <= row < 3" in of_rank["outside"]
