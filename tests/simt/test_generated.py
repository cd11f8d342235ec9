"""Kernels generated for edge programs, executed by the emulator: the values of the CPU kernel."""

from __future__ import annotations

import pytest
import torch

from fastgraph.backends.generated import GeneratedKernels
from fastgraph.edge_programs.lowering import lower
from fastgraph.edge_programs.program import Program, parse
from fastgraph.edge_programs.source import cuda_source
from fastgraph.graphs.graph import Graph
from fastgraph.plugins.backend import FLOATING
from tests.native.cases import normal
from tests.simt import library
from tests.simt.backend import SimtBackend, emulator
from tests.simt.compared import CASES, cpu, graph_of, irregular, misaligned, simt
from tests.simt.test_edge_program import REDUCED, Values, limits_of, operands, tied

GENERATED = SimtBackend(
    generated=GeneratedKernels(lambda source, device: library.load_generated(source))
)

CHANNELS = (
    "x = gathered {0}\ny = row {0}\nw = edge 1\nu = edge {0}\np = parameter {0}\n"
    "t0 = sub x y\nt1 = sigmoid t0\nt2 = mul t1 u\nt3 = mul p t2\nt4 = mul w t3\nt5 = mul y t0\n"
    f"{REDUCED}\nsum t4\nmean t2\ntotal t5\nmax y\nsoftmax t0 t1\nsoftmax_max t1\n"
    "softmax_scale t1"
)
"""Nothing is summed over channels."""

HEADS = (
    "x = gathered {0}\ny = row {0}\nw = edge {1}\np = parameter {0}\n"
    "t0 = sub x y\nt1 = dot t0 p {1}\nt2 = fold x {1}\nt3 = mul w t0\nt4 = mul y t3\n"
    "t5 = add t1 w\nt6 = mul t2 t5\nt7 = mul y x\nt8 = fold y {1}\nt9 = mul t8 t7\n"
    f"{REDUCED}\nsum t4\nmean t3\ntotal t6\nedge t6\nmax t5\nmax_ties t5\nsum t9\ntotal y\n"
    "softmax t0 t5\nsoftmax_max t5\nsoftmax_scale t5\nsoftmax t5 t5"
)
"""Values of heads are sums over their channels."""


def generated(graph: Graph, given: list[torch.Tensor], program: Program, seed: int = 0) -> list:
    dtype = given[0].dtype
    assert cuda_source(lower(program, rounds=dtype.itemsize < 4).code, dtype) is not None
    emulator().seed(seed)
    kernel = GENERATED.kernel("edge_program", "cpu", dtype)
    assert kernel is not None
    return kernel(graph, given, program, False)


def check(graph: Graph, text: str, values: Values, dtype: torch.dtype) -> None:
    program = parse(text)
    given = operands(graph, program, values, dtype)
    found = generated(graph, given, program)
    expected = cpu("edge_program", graph, given, program, False)
    for output, ours, theirs in zip(program.outputs, found, expected, strict=True):
        if output.is_record:
            assert torch.equal(ours, theirs), output
        else:
            torch.testing.assert_close(ours, theirs, equal_nan=True, **limits_of(dtype))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("text", [CHANNELS.format(20), HEADS.format(32, 4)], ids=["all", "heads"])
def test_every_graph(text: str, name: str) -> None:
    check(graph_of(name), text, tied, torch.float64)


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("width", [1, 7, 64, 260])
def test_every_layout_of_channels(width: int, dtype: torch.dtype) -> None:
    """Packs of four, two and one; rows that several blocks share."""
    for name in ("random", "cut"):
        check(graph_of(name), CHANNELS.format(width), tied, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("width", "heads"), [(33, 1), (64, 64), (128, 2), (24, 3)])
def test_every_layout_of_heads(width: int, heads: int, dtype: torch.dtype) -> None:
    """A head has all lanes, one, several times as many channels as there are, or some of them."""
    for name in ("random", "cut"):
        check(graph_of(name), HEADS.format(width, heads), tied, dtype)


@pytest.mark.parametrize("width", [3, 16, 17, 33, 64])
def test_sums_over_all_channels_of_values_that_are_nowhere_0(width: int) -> None:
    """Lanes beyond the last channel add nothing, whatever they computed of zeros."""
    text = (
        f"x = gathered {width}\ny = row {width}\nt0 = cos x\nt1 = fold t0 1\nt2 = exp y\n"
        "t3 = dot t0 t2 1\nt4 = fold t2 1\nt5 = mul t1 x\nt6 = mul t3 t4\n"
        "edge t1\nedge t3\nsum t5\nsum t6\nmax t6\nsoftmax x t1\ntotal t3"
    )
    for name in ("random", "cut"):
        check(graph_of(name), text, tied, torch.float64)


@pytest.mark.parametrize("narrow", [2, 3, 16, 20])
def test_all_lanes_have_the_sum_of_fewer_channels(narrow: int) -> None:
    text = (
        f"x = gathered 128\nc = gathered {narrow}\nr = row {narrow}\nt0 = fold x 1\n"
        "t1 = fold c 1\nt2 = dot c r 1\nt3 = fold r 1\nt4 = mul t1 x\nt5 = mul t2 t4\n"
        "t6 = add t3 x\nmax t0\nsum t4\nedge t5\nmax t5\nmax_ties t5\nmean t6\n"
        "softmax x t2"
    )
    for name in ("random", "cut"):
        check(graph_of(name), text, tied, torch.float64)


@pytest.mark.parametrize("text", [CHANNELS.format(8), HEADS.format(8, 2)], ids=["all", "heads"])
def test_infinities_reach_what_they_reach_on_the_cpu(text: str) -> None:
    for name in ("random", "isolated"):
        check(graph_of(name), text, irregular, torch.float32)


@pytest.mark.parametrize(("width", "heads"), [(33, 1), (128, 2), (24, 3)])
def test_values_of_edges_have_the_bits_that_the_interpreter_gives_them(
    width: int, heads: int
) -> None:
    """An extremum is found by one kernel, and may be looked for by the other."""
    text = (
        "x = gathered {0}\ny = row {0}\nt0 = mul x y\nt1 = tanh t0\nt2 = fold t1 {1}\n"
        "t3 = dot x y {1}\nedge t1\nedge t2\nedge t3\nmax t2\nmax_ties t3"
    )
    program = parse(text.format(width, heads))
    graph = graph_of("cut")
    given = operands(graph, program, normal, torch.float32)
    interpreted = simt("edge_program", graph, given, program, False)
    for ours, theirs in zip(generated(graph, given, program), interpreted, strict=True):
        assert torch.equal(ours, theirs)


def test_bits_do_not_depend_on_the_order_of_threads() -> None:
    graph, program = graph_of("hub"), parse(HEADS.format(32, 4))
    given = operands(graph, program, normal, torch.float32)
    first, *others = (generated(graph, given, program, seed) for seed in range(3))
    for other in others:
        for ours, theirs in zip(other, first, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_operands_that_cannot_be_read_as_vectors_are_interpreted() -> None:
    graph, program = graph_of("random"), parse("x = gathered 8\nt0 = exp x\nsum t0\nedge t0")
    (x,) = operands(graph, program, normal, torch.float32)
    aligned, odd = (generated(graph, [given], program) for given in (x, misaligned(x)))
    torch.testing.assert_close(odd, aligned)
    assert torch.equal(odd[1], aligned[1])
