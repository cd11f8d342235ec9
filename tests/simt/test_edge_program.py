"""The CUDA kernel of edge programs, executed by the emulator: the values of the CPU kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastgraph.edge_programs.operations import ELEMENTWISE
from fastgraph.edge_programs.program import Program, parse
from fastgraph.graphs.graph import Graph
from fastgraph.plugins.backend import FLOATING, accumulator
from tests.native.cases import features, normal, unit_roundoff
from tests.simt.compared import (
    CASES,
    assert_same_in_every_order,
    cpu,
    graph_of,
    irregular,
    misaligned,
    simt,
)

Values = Callable[..., Tensor]

REDUCED = "\n".join(
    f"{reduction} t0"
    for reduction in ("sum", "mean", "max", "max_ties", "min", "min_ties", "edge", "total")
)
SOFTMAX = "softmax t0 w\nsoftmax_max w\nsoftmax_scale w\nsoftmax t0 t0\nsoftmax y y"
SEVERAL = (
    "x = gathered {0}\ny = row {0}\nw = edge {1}\np = parameter {0}\n"
    "t0 = sub x y\nt1 = dot t0 p {1}\nt2 = fold x {1}\nt3 = mul w t0\nt4 = mul y t3\n"
    "t5 = add t1 w\nt6 = mul t2 t5\nt7 = mul y x\nt8 = mul p t7\n"
    "t9 = sum_tiles x {1}\nt10 = mul t9 w\nt11 = tile t10 {0}\nt12 = mul t11 y\n"
)
"""Values in all places; factors of rows, of heads and of channels."""
ALL = (
    f"{SEVERAL}{REDUCED}\n{SOFTMAX}\nsum t4\nmean t3\ntotal t6\nsum t8\nedge t6\nmax y\nsum y\n"
    "total y\nsoftmax_max t5\nsum t12\nedge t10"
)


def operands(graph: Graph, program: Program, values: Values, dtype: torch.dtype) -> list[Tensor]:
    """Of a graph that is not transposed."""
    rows = {"row": graph.num_dst, "gathered": graph.num_src, "edge": graph.num_edges}
    return [
        values(rows.get(operand.place, 1), operand.width, dtype=dtype, seed=seed).view(
            (-1,) if operand.place == "parameter" else (rows[operand.place], operand.width)
        )
        for seed, operand in enumerate(program.operands)
    ]


def tied(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return features(*shape, dtype, seed)


def limits_of(dtype: torch.dtype) -> dict[str, float]:
    """Rows have up to 301 edges here, whose sums the CPU has in another order."""
    limit = 8 * unit_roundoff(dtype) + 301 * unit_roundoff(accumulator(dtype))
    return {"rtol": limit, "atol": 4 * limit}


def check(graph: Graph, text: str, values: Values, dtype: torch.dtype) -> None:
    program = parse(text)
    compare(graph, program, operands(graph, program, values, dtype))


def compare(graph: Graph, program: Program, given: list[Tensor]) -> None:
    limits = limits_of(given[0].dtype)
    found = simt("edge_program", graph, given, program, False)
    expected = cpu("edge_program", graph, given, program, False)
    for output, ours, theirs in zip(program.outputs, found, expected, strict=True):
        if output.is_record:
            assert torch.equal(ours, theirs), output
        else:
            torch.testing.assert_close(ours, theirs, equal_nan=True, **limits)


@pytest.mark.parametrize("name", CASES)
def test_every_graph(name: str) -> None:
    check(graph_of(name), ALL.format(20, 4), tied, torch.float64)


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize(
    ("width", "heads"), [(1, 1), (7, 1), (33, 11), (64, 64), (130, 2), (200, 1), (96, 3)]
)
def test_every_layout(width: int, heads: int, dtype: torch.dtype) -> None:
    for name in ("random", "cut"):
        check(graph_of(name), ALL.format(width, heads), tied, dtype)


def test_widths_that_have_nothing_to_do_with_each_other() -> None:
    text = "x = gathered 6\ny = row 4\nw = edge 35\nsum x\nmax y\nmean w\nt0 = mul x x\ntotal t0"
    for name in ("random", "cut"):
        check(graph_of(name), text, normal, torch.float32)


@pytest.mark.parametrize("text", ["y = row 5\nsum y\nmean y\nmax y", "w = edge 3\nsum w\ntotal w"])
def test_nothing_is_gathered(text: str) -> None:
    for name in ("random", "cut", "no_edges"):
        check(graph_of(name), text, normal, torch.float32)


def of_operation(name: str) -> str:
    constants = {"leaky_relu": [0.25], "elu": [1.5], "clamp": [-0.5, 1.0]}.get(name, [])
    taken = ["x", "y", "w"][: ELEMENTWISE[name].arity - len(constants)]
    places = {"x": "gathered", "y": "row", "w": "edge"}
    lines = [f"{operand} = {places[operand]} 6" for operand in taken]
    lines += [f"t{k} = constant {constant}" for k, constant in enumerate(constants)]
    taken += [f"t{k}" for k in range(len(constants))]
    count = len(constants)
    return "\n".join([*lines, f"t{count} = {name} {' '.join(taken)}", f"edge t{count}"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_operation(name: str, dtype: torch.dtype) -> None:
    """On infinite values and NaN, too."""
    for values in (tied, normal, irregular):
        check(graph_of("random"), of_operation(name), values, dtype)


def test_functions_of_sums_gradients_and_slopes() -> None:
    """Several instructions that lowering makes one of."""
    text = (
        "x = gathered 6\ny = row 6\nt0 = add x y\nt1 = sigmoid t0\nsum t1\n"
        "t2 = constant 0.0\nt3 = le x t2\nt4 = where t3 t2 y\nsum t4\n"
        "t5 = constant 1.0\nt6 = constant 0.25\nt7 = lt t2 x\nt8 = where t7 t5 t6\nsum t8"
    )
    lines = text.split("\n")
    lines.sort(key=lambda line: " = " not in line)  # outputs stand behind values
    check(graph_of("random"), "\n".join(lines), irregular, torch.float32)


@pytest.mark.parametrize("dtype", FLOATING)
def test_values_are_rounded_where_the_program_says(dtype: torch.dtype) -> None:
    text = "x = gathered 9\ny = row 9\nt0 = mul x y\nt1 = round t0\nt2 = sub t1 t0\nmax t1\nedge t2"
    check(graph_of("cut"), text, normal, dtype)


@pytest.mark.parametrize("name", ["random", "isolated", "cut"])
def test_infinities_reach_what_they_reach_on_the_cpu(name: str) -> None:
    check(graph_of(name), ALL.format(8, 2), irregular, torch.float32)


@pytest.mark.parametrize("width", [33, 64])
def test_bits_do_not_depend_on_the_order_of_threads(width: int) -> None:
    graph, program = graph_of("hub"), parse(ALL.format(width, 1))
    given = operands(graph, program, normal, torch.float32)
    assert_same_in_every_order("edge_program", graph, given, program, False)


@pytest.mark.parametrize("position", range(4))
def test_memory_that_is_not_aligned(position: int) -> None:
    graph, program = graph_of("cut"), parse(ALL.format(64, 4))
    given = operands(graph, program, tied, torch.float32)
    given[position] = misaligned(given[position])
    compare(graph, program, given)


def chain(length: int, width: int) -> str:
    """So many instructions, and the sums of some of them."""
    lines = [f"x = gathered {width}", f"y = row {width}", "t0 = add x y"]
    for k in range(1, length):
        lines.append(f"t{k} = {'maximum' if k % 2 else 'sub'} t{k - 1} {'xy'[k % 3 == 0]}")
    return "\n".join([*lines, *(f"max t{k}" for k in range(0, length, max(length // 5, 1)))])


# Each has more of one thing than fits into arguments of a kernel, or into shared memory.
LARGE = {
    "instructions": f"{chain(90, 12)}\ntotal t89\nsoftmax x t3",
    "results": "x = gathered 5\n" + "\n".join(["sum x", "mean x", "max x", "total x"] * 4),
    "operands": "\n".join(
        [f"x{k} = gathered 3" for k in range(40)]
        + ["t0 = add x0 x1", *(f"t{k} = add t{k - 1} x{k + 1}" for k in range(1, 39)), "sum t38"]
    ),
    "channels": f"{chain(3, 3001)}\nsum t2\nedge t2",
}


@pytest.mark.parametrize("name", ["random", "cut"])
@pytest.mark.parametrize("text", LARGE.values(), ids=LARGE)
def test_large_programs(text: str, name: str) -> None:
    for dtype in (torch.float32, torch.float64):
        check(graph_of(name), text, tied, dtype)


def test_programs_that_share_memory_among_fewer_warps() -> None:
    for width in (600, 1500):
        check(graph_of("random"), chain(3, width), normal, torch.float32)


def test_programs_without_an_end_are_refused() -> None:
    """Whose values of one edge have more than 2^31 elements."""
    graph = Graph(torch.zeros(2, 0, dtype=torch.int64), 0, 0)
    names = [f"x{k}" for k in range(70)]
    lines = [f"{name} = gathered {2**24}" for name in names] + [f"sum {name}" for name in names]
    program = parse("\n".join(lines))
    with pytest.raises(RuntimeError):
        simt("edge_program", graph, [torch.empty(0, 2**24)] * 70, program, False)


@pytest.mark.parametrize("widths", [(12, 3, 6), (48, 3, 9), (6, 6, 6), (132, 2, 20)])
def test_channels_of_heads(widths: tuple[int, int, int]) -> None:
    """The largest and the first of them, and parts; on infinite values and NaN, too."""
    width, heads, part = widths
    text = (
        f"x = gathered {width}\ny = row {width}\np = parameter {width}\nt0 = mul x y\n"
        f"t1 = fold_max t0 {heads}\nt2 = first x {width} {heads} 0\n"
        f"t3 = slice t0 {part} {heads} {(width - part) // heads}\n"
        f"t4 = pad t3 {2 * part} {heads} {part // heads}\nt5 = fold_max p {heads}\n"
        f"t6 = slice y {part} {heads} 0\nt7 = mul t1 t5\n"
        "sum t2\nmax t3\nedge t4\nedge t7\nsum t6\nedge t1"
    )
    for values in (tied, normal, irregular):
        for name in ("random", "cut"):
            check(graph_of(name), text, values, torch.float32)
