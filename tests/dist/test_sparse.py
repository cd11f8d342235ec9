"""Sparse matrices of sharded edges, and layers on them, beside those of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgraph.dist as fgd
import fastgraph.sparse as fgs
from fastgraph.dist.ranks.world import WORLD
from fastgraph.nn import GlobalAGNN, GlobalGAT, GlobalVA
from fastgraph.sparse import SparseMatrix
from fastgraph.sparse.groups import REDUCTIONS
from tests.dist.comparing import deviation
from tests.dist.graphs import NUM_FEATURES, NUM_NODES, PARTITIONS, graph
from tests.dist.test_fused import TOLERANCE, shards

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


def results(data: Any, call: Callable[[SparseMatrix, Tensor], Any], *more: Tensor) -> list[Tensor]:
    """The result of a function, and the gradients of values, features and parameters."""
    h, val = (x.detach().requires_grad_() for x in (data.x, data.edge_weight))
    out = call(fgs.from_edge_index(data.edge_index, val, NUM_NODES), h)
    grads = torch.autograd.grad(out.sin().sum(), [h, val, *more], allow_unused=True)
    return [fgd.whole(x).detach() for x in (out, *grads) if x is not None]


def on_this_rank() -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    found: dict[str, Any] = {"wrong": {}, "gathers": {}, "refused": {}, "modes": {}}
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

        for name, call in FUNCTIONS.items():
            compare(name, call)
        for name, make in LAYERS.items():
            for channels in (3, NUM_FEATURES + 3):
                torch.manual_seed(0)
                layer = make(NUM_FEATURES, channels)
                compare(f"{name}, {channels}", layer, *layer.parameters())
        a = fgs.from_edge_index(many.edge_index, num_nodes=NUM_NODES)
        assert fgd.is_sharded(a.val) and a.val.dtype == torch.float32
        for name, refused in REFUSED.items():
            try:
                refused(a)
            except NotImplementedError as error:
                found["refused"][f"{name}, {mode}"] = str(error)
        try:
            fgs.from_edge_index(many.edge_index, num_nodes=3)
        except IndexError as error:
            found["outside"] = str(error)
    return found


@pytest.fixture(scope="module")
def found(world_size: int, once_on_ranks: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = once_on_ranks(on_this_rank, world_size)
    return found


def test_functions_and_layers_are_those_of_one_process(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert len(of_rank["wrong"]) == 2 * (len(FUNCTIONS) + 2 * len(LAYERS))
        assert {key: wrong for key, wrong in of_rank["wrong"].items() if wrong} == {}
        gathering = {key.rpartition(", ")[0] for key, some in of_rank["gathers"].items() if some}
        assert gathering <= {*GATHERING}


def test_layers_are_computed_on_the_grid(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        for name in LAYERS:
            assert of_rank["modes"][f"{name}, 3, grid"] == {"grid": 2}


def test_what_needs_all_entries_is_refused(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert set(of_rank["refused"]) == {f"{n}, {mode}" for n in REFUSED for mode in MODES}
        assert all("no rank has all of them" in text for text in of_rank["refused"].values())
        assert "expected 0 <= row < 3" in of_rank["outside"]


MODES = ("halo", "grid")
