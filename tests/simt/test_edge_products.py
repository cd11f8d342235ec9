"""Products of edges by the CUDA kernel of edge programs, executed by the emulator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastgraph.edge_programs.program import parse
from fastgraph.graphs.graph import Graph
from fastgraph.plugins.backend import FLOATING
from tests.emulated import repeats_but
from tests.graphs import hub_edges
from tests.native.cases import normal
from tests.simt.compared import (
    CASES,
    assert_same_in_every_order,
    graph_of,
    irregular,
    misaligned,
    simt,
)
from tests.simt.test_edge_program import check, compare, operands, tied


def maps(hidden: int, width: int, last: int = 5) -> str:
    """Two maps, of which the second is of values of edges, and sums of outer products."""
    return (
        f"x = gathered {hidden}\ny = row {hidden}\nw = edge 3\na = parameter {hidden * width}\n"
        f"b = parameter {3 * width}\nc = parameter {width * last}\n"
        f"t0 = sub x y\nt1 = product t0 a {width}\nt2 = product w b {width}\nt3 = add t1 t2\n"
        f"t4 = relu t3\nt5 = product t4 c {last}\nt6 = product_t t5 c {width}\n"
        f"t7 = product y a {width}\n"
        "sum t5\nmax t5\nmax_ties t5\nedge t1\ntotal t6\nmean t7\n"
        "outer t0 t4\nouter w t5\nouter y t4\nouter t5 b\nsoftmax t4 t3"
    )


WIDTHS = [(1, 1), (7, 3), (16, 8), (33, 70), (64, 64), (20, 35)]


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_every_width(widths: tuple[int, int], dtype: torch.dtype) -> None:
    check(graph_of("random"), maps(*widths), tied, dtype)


# Rows of "cut" are in pieces as those of "hub" are.
@pytest.mark.parametrize("name", repeats_but({*CASES} - {"hub"}, CASES))
def test_every_graph(name: str) -> None:
    """Empty rows, hubs that are cut, duplicates, and no edges at all."""
    for dtype in (torch.float32, torch.float64):
        check(graph_of(name), maps(12, 9), tied, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_large_programs(dtype: torch.dtype) -> None:
    """Of more results than fit into arguments of a kernel."""
    text = maps(6, 5) + "\nsum t1\nmax t1\nmin t5\nouter t2 t5"
    check(graph_of("cut"), text, tied, dtype)


@pytest.mark.parametrize("width", [300, 700])
def test_programs_that_share_memory_among_fewer_warps(width: int) -> None:
    """And tiles of fewer edges."""
    text = f"x = gathered {width}\na = parameter {3 * width}\nt0 = relu x\nt1 = add x t0\n"
    text += "t2 = add t0 t1\nt3 = product x a 3\nsum t1\nmean t2\nsum t3\nmax t0\nouter t3 t2"
    check(graph_of("random"), text, tied, torch.float32)


def test_values_that_do_not_fit_into_shared_memory() -> None:
    names = [f"x{k}" for k in range(9)]
    lines = [f"{name} = gathered 3001" for name in names]
    lines += ["a = parameter 9003", "t0 = product x0 a 3", "sum t0", "outer t0 t0"]
    check(
        graph_of("random"), "\n".join([*lines, *(f"sum {n}" for n in names)]), tied, torch.float32
    )


def test_a_matrix_that_is_taken_in_other_ways_too() -> None:
    text = "x = gathered 4\na = parameter 20\nt0 = product x a 5\nsum t0\nt1 = relu a\ntotal t1"
    lines = sorted(text.split("\n"), key=lambda line: " = " not in line)
    check(graph_of("random"), "\n".join(lines), tied, torch.float32)


@pytest.mark.parametrize("name", ["random", "cut"])
@pytest.mark.parametrize("infinite", ["features", "matrix"])
def test_infinities_reach_what_they_reach_on_the_cpu(infinite: str, name: str) -> None:
    """Tensor cores alone would make NaN of them."""
    graph, program = graph_of(name), parse(maps(12, 40))
    given = operands(graph, program, normal, torch.float32)
    if infinite == "features":
        given[0] = irregular(*given[0].shape, dtype=torch.float32)
    else:
        given[3][7] = float("inf")
    compare(graph, program, given)


@pytest.mark.parametrize("position", range(6))
def test_memory_that_is_not_aligned(position: int) -> None:
    graph, program = graph_of("random"), parse(maps(32, 16, 8))
    for dtype in (torch.float32, torch.bfloat16):
        given = operands(graph, program, tied, dtype)
        given[position] = misaligned(given[position])
        compare(graph, program, given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_bits_do_not_depend_on_the_order_of_threads(dtype: torch.dtype) -> None:
    graph, program = Graph(hub_edges(9, 400), 9, 9), parse(maps(12, 9))
    given = operands(graph, program, normal, dtype)
    assert_same_in_every_order("edge_program", graph, given, program, False)


def alone_and_together(nodes: int) -> tuple[Graph, Graph]:
    """Each node with an edge to a row of its own, and with one to the same row."""
    numbers = torch.arange(nodes)
    rows = numbers, torch.zeros_like(numbers)
    alone, together = (Graph(torch.stack([numbers, row]), nodes, nodes) for row in rows)
    return alone, together


PRODUCT = "x = gathered {0}\nw = parameter {1}\nt0 = product x w {2}\nedge t0"


def of_edges(graph: Graph, given: list[Tensor], depth: int, width: int) -> Tensor:
    (out,) = simt(
        "edge_program", graph, given, parse(PRODUCT.format(depth, depth * width, width)), False
    )
    found: Tensor = out
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_an_edge_has_the_same_bits_in_every_block(dtype: torch.dtype) -> None:
    """Or the gradient of a maximum would not find where it was attained."""
    given = [normal(70, 40, dtype=dtype), normal(1400, dtype=dtype, seed=1)]
    given[0][3, 5] = float("inf")  # which is no matter for others
    alone, together = (of_edges(graph, given, 40, 35) for graph in alone_and_together(70))
    torch.testing.assert_close(alone, together, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products_have_the_errors_of_float(dtype: torch.dtype) -> None:
    """Though tensor cores take numbers of tf32."""
    depth, width = 100, 40
    given = [normal(70, depth, dtype=dtype), normal(depth * width, dtype=dtype, seed=1)]
    found = of_edges(alone_and_together(70)[0], given, depth, width).double()
    x, w = given[0].double(), given[1].double().view(depth, width)
    rounding = 0.5 * torch.finfo(dtype).eps * (x @ w).abs() if dtype.itemsize < 4 else 0
    limit = rounding + 8 * torch.finfo(torch.float32).eps * (x.abs() @ w.abs())
    assert bool(((found - x @ w).abs() <= limit).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outer_products_have_the_errors_of_float(dtype: torch.dtype) -> None:
    index = hub_edges(9, 400)
    graph = Graph(index, 9, 9)
    program = parse("x = gathered 40\ny = edge 9\nouter x y")
    given = operands(graph, program, normal, dtype)
    (found,) = simt("edge_program", graph, given, program, False)
    x, y = given[0].double()[index[0]], given[1].double()
    exact = (x.t() @ y).flatten()
    rounding = torch.finfo(dtype).eps * exact.abs()
    limit = rounding + 16 * torch.finfo(torch.float32).eps * (x.abs().t() @ y.abs()).flatten()
    assert bool(((found.double() - exact).abs() <= limit).all())
