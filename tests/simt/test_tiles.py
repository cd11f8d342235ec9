"""Sums on tiles by emulated tensor cores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgraph.backends import reference
from fastgraph.backends.tiles import TilesSpmm
from fastgraph.graphs.graph import Graph
from fastgraph.tune.gpus import SHEETS
from fastgraph.tune.tiles import DTYPES
from tests.graphs import Case, random_edges
from tests.native.cases import normal
from tests.simt.backend import emulator
from tests.simt.compared import CASES, assert_same, graph_of, irregular, misaligned

pytestmark = pytest.mark.usefixtures("tf32_allowed")

H200 = SHEETS[0]
TILES = TilesSpmm(lambda: emulator().functions, lambda x: H200)

# A window is cut that has more than 32 blocks, and has an edge four times.
_TWICE = torch.tensor([[5] * 4, [2] * 4])
CUT = Case("cut", torch.cat([random_edges(600, 20, 2000), _TWICE], 1), 600, 20)


def check(graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, transpose: bool) -> None:
    """The result, with the factors of tf32 and sums of float32."""
    emulator().seed(0)
    found = TILES(graph, x, weight, reduce, transpose)
    wide = [None if t is None else rounded(t).double() for t in (x, weight)]
    exact = reference.spmm(graph, *wide, reduce, transpose)
    size = reference.spmm(graph, *(None if t is None else t.abs() for t in wide), reduce, transpose)
    allowed = torch.finfo(x.dtype).eps * exact.abs() + 2.0**-20 * size
    error = (found.double() - exact).abs()
    assert bool((error <= allowed).all()), f"off by {float((error / allowed).nan_to_num().max())}"


def rounded(x: Tensor) -> Tensor:
    """To the nearest numbers of tf32, ties away from zero."""
    if x.dtype != torch.float32:
        return x
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*CASES, "cut by windows"])
def test_every_graph(name: str, dtype: torch.dtype) -> None:
    graph = graph_of(name) if name in CASES else Graph(CUT.edge_index, CUT.num_src, CUT.num_dst)
    weight = normal(graph.num_edges, dtype=dtype, seed=1)
    check(graph, normal(graph.num_src, 24, dtype=dtype), weight, "sum", False)
    check(graph, normal(graph.num_dst, 24, dtype=dtype), None, "mean", True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [0, 8, 64, 72, 136])
def test_every_width(width: int, dtype: torch.dtype) -> None:
    for edges, nodes in ((random_edges(40, 40, 200), 40), (CUT.edge_index, 600)):
        graph = Graph(edges, nodes, nodes)
        weight = normal(graph.num_edges, dtype=dtype, seed=1)
        check(graph, normal(nodes, width, dtype=dtype), weight, "mean", False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_reach_the_neighbours_alone(dtype: torch.dtype) -> None:
    for edges, nodes in ((random_edges(40, 40, 200), 40), (CUT.edge_index, 600)):
        graph = Graph(edges, nodes, nodes)
        x = irregular(nodes, 16, dtype=dtype)
        for weight in (None, irregular(graph.num_edges, dtype=dtype, seed=1)):
            found = TILES(graph, x, weight, "sum", False)
            expected = reference.spmm(graph, x, weight, "sum", False)
            assert_same(found.where(~found.isfinite(), 0), expected.where(~expected.isfinite(), 0))


def test_what_is_too_large_for_tf32_is_added_up_in_float32() -> None:
    graph = Graph(torch.tensor([[0], [0]]), 1, 1)
    x = torch.full((1, 8), torch.finfo(torch.float32).max)
    assert torch.equal(TILES(graph, x, None, "sum", False), x)


def test_bits_do_not_depend_on_the_order_of_threads() -> None:
    graph = Graph(CUT.edge_index, CUT.num_src, CUT.num_dst)
    x = normal(graph.num_src, 72, dtype=torch.float32)
    weight = normal(graph.num_edges, dtype=torch.float32, seed=1)
    found = []
    for seed in range(3):
        emulator().seed(seed)
        found.append(TILES(graph, x, weight, "sum", False))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def cliques() -> Graph:
    node = torch.arange(64).repeat_interleave(16)
    return Graph(torch.stack([node // 16 * 16 + torch.arange(16).repeat(64), node]), 64, 64)


def test_tiles_are_for_full_blocks_and_for_what_was_found_right() -> None:
    graph, x = cliques(), normal(64, 64, dtype=torch.float32)
    assert TILES.why_not(graph, x, None, "sum", False) is None
    refused: list[tuple[tuple[Any, ...], str]] = [
        ((graph_of("random"), normal(12, 64, dtype=torch.float32), None, "sum"), "are too few"),
        ((graph, x.double(), None, "sum"), "must be float32 or bfloat16"),
        ((graph, x, None, "mean_adjoint"), "must have one factor"),
        ((graph, x, torch.ones(graph.num_edges, 2), "sum"), "must have one factor"),
        ((graph, x[:, :7].contiguous(), None, "sum"), "whole packs of 16 bytes"),
        ((graph, misaligned(x), None, "sum"), "whole packs of 16 bytes"),
    ]
    for arguments, message in refused:
        why_not = TILES.why_not(*arguments, False)
        assert why_not is not None and message in why_not
        assert not TILES.fits(*arguments, False)
    unknown = TilesSpmm(lambda: emulator().functions)
    assert unknown.why_not(graph, x, None, "sum", False) == "the model does not know this GPU"


class Faulty:
    """The library, one of whose functions changes what it has written."""

    def __init__(self, function: str, change: Callable[..., None]) -> None:
        self._function, self._change = function, change

    def __getattr__(self, name: str) -> Any:
        function = getattr(emulator().functions, name)
        if name != self._function:
            return function

        def faulty(*arguments: Any) -> None:
            function(*arguments)
            self._change(*arguments)

        return faulty


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_device_that_is_wrong_is_found(dtype: torch.dtype) -> None:
    def change(*arguments: Any) -> None:
        arguments[-1][3, 1] += 0.5

    faulty = TilesSpmm(lambda: Faulty("spmm_tiles", change), lambda x: H200)
    why_not = faulty.why_not(cliques(), normal(64, 64, dtype=dtype), None, "sum", False)
    assert why_not is not None and "times what is allowed" in why_not


@pytest.fixture
def arguments() -> dict[str, Any]:
    """Of a native call on a graph of 20 rows and 3 edges."""
    graph = Graph(torch.tensor([[0, 1, 0], [0, 0, 19]]), 2, 20)
    prepared = TILES._prepare(graph, False)
    operands = {"weight": None, "row_scale": None, "x": torch.ones(2, 8), "out": torch.empty(20, 8)}
    return prepared._asdict() | operands


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("col", torch.zeros(8, dtype=torch.int32), r"col must have shape \[16\], got \[8\]"),
        ("bits", torch.zeros(2, 3, dtype=torch.int64), r"bits must have shape \[2, 2\]"),
        ("first", torch.zeros(2, dtype=torch.int64), r"first must have shape \[3\]"),
        ("edge_id", torch.zeros(3), "edge_id must be int32"),
        ("num_windows", 3, "num_windows must be that of 20 rows of out, got 3"),
        ("num_cut", 3, "tasks must list 2 rows"),
        ("tasks", torch.zeros(1, 4, dtype=torch.int32), "tasks must list 2 rows"),
        ("weight", torch.zeros(2), r"weight must have shape \[3\]"),
        ("row_scale", torch.zeros(2), r"row_scale must have shape \[20\]"),
        ("x", torch.zeros(2, 8, dtype=torch.float16), "x must be float32 or bfloat16, got float16"),
        ("x", torch.zeros(2, 7), r"out must have shape \[20, 7\]"),
        ("out", torch.zeros(20, 16)[:, ::2], "out must be contiguous"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: dict[str, Any], name: str, value: Any, message: str
) -> None:
    spmm_tiles = emulator().functions.spmm_tiles
    spmm_tiles(*arguments.values())
    assert arguments["out"][:, 0].tolist() == [2, *[0] * 18, 1]
    with pytest.raises((TypeError, ValueError), match=message):
        spmm_tiles(*{**arguments, name: value}.values())


def test_rows_of_broken_packs_are_refused(arguments: dict[str, Any]) -> None:
    arguments |= {"x": torch.ones(2, 7), "out": torch.empty(20, 7)}
    with pytest.raises(ValueError, match="x must have rows of whole packs of 16 bytes"):
        emulator().functions.spmm_tiles(*arguments.values())
