"""Edge programs as kernels take them: how many instructions are left for each edge."""

from __future__ import annotations

import pytest
import torch

from fastgraph import ops
from fastgraph.backends import reference
from fastgraph.edge_programs.gradients import derive
from fastgraph.edge_programs.lowering import OPERATIONS, lower
from fastgraph.edge_programs.program import Program, parse
from fastgraph.graphs.graph import Graph
from tests.graphs import random_edges


def operations(program: Program, *, by_terms: bool = False) -> list[str]:
    """Of a lowered program, in order."""
    code = lower(program, rounds=False, by_terms=by_terms).code
    return [OPERATIONS[row[0]] for row in code.instructions.tolist()]


WEIGHTED = """
q = row 8
x = gathered 8
y = gathered 8
r = row 1
t0 = dot q x 2
t1 = mul t0 r
t2 = mul t1 y
t3 = dot q y 1
t4 = mul x t3
t5 = mul t4 r
t6 = add t2 t5
sum t6
"""


def reductions(text: str, *, by_terms: bool = True) -> list[list[int]]:
    """The values, factors and factors of rows of a lowered program, and what they are for."""
    code = lower(parse(text), rounds=False, by_terms=by_terms).code
    return [row[1:5] for row in code.reductions.tolist()]


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_products_with_a_number_for_each_edge_are_summed_one_by_one(reduction: str) -> None:
    text = WEIGHTED.replace("sum", reduction)
    (first, second), (whole,) = reductions(text), reductions(text, by_terms=False)
    assert [first[0], second[0]] == [2, 1]
    assert first[3] == second[3] == whole[3] == 0
    assert first[2] == second[2] >= 0  # what the rows have scales both
    assert operations(parse(text), by_terms=True) == ["dot", "dot", "spread"]


def test_what_scales_some_products_only_is_a_factor_of_these() -> None:
    first, second = reductions(WEIGHTED.replace("mul t4 r", "mul t4 y"))
    assert first[2] == second[2] == -1


@pytest.mark.parametrize("reduction", ["max", "total", "edge"])
def test_other_reductions_take_the_sum_of_products(reduction: str) -> None:
    assert len(reductions(WEIGHTED.replace("sum", reduction))) == 1


@pytest.mark.parametrize("term", ["mul x y", "mul r x", "neg t4", "sub t4 y"])
def test_a_sum_with_other_terms_is_computed_for_each_edge(term: str) -> None:
    text = WEIGHTED.replace("t5 = mul t4 r", f"t5 = {term}")
    assert len(reductions(text)) == 1


GATED = "k = row 8\nq = gathered 8\nv = gathered 8\nt0 = add k q\nt1 = {} t0\nt2 = mul t1 v\nsum t2"


@pytest.mark.parametrize("operation", ["sigmoid", "relu", "neg", "tanh", "sqrt"])
def test_a_function_takes_a_sum(operation: str) -> None:
    assert operations(parse(GATED.format(operation))) == [operation]


def test_a_sum_that_is_needed_besides_is_kept() -> None:
    assert operations(parse(GATED.format("sigmoid") + "\nsum t0")) == ["add", "sigmoid"]


def test_a_sum_of_rows_is_computed_once_for_each() -> None:
    text = "k = row 8\nx = gathered 8\nt0 = add k k\nt1 = exp t0\nt2 = add t1 x\nmax t2"
    assert operations(parse(text)) == ["add", "exp", "add"]


def test_the_gradient_of_relu_is_one_instruction() -> None:
    program = parse("x = gathered 8\nb = row 8\nt0 = add x b\nt1 = relu t0\nsum t1")
    passes = derive(program, frozenset("xb"), frozenset({0})).passes
    assert [operations(made.program) for made in passes] == [["add", "gate"]] * 2


def test_the_slope_of_leaky_relu_is_one_instruction() -> None:
    text = (
        "x = gathered 8\nb = row 8\nc = constant 0.25\nt0 = add x b\nt1 = leaky_relu t0 c\nsum t1"
    )
    program = parse(text)
    passes = derive(program, frozenset("xb"), frozenset({0})).passes
    own = [[o for o in operations(made.program) if o != "spread"] for made in passes]
    assert own == [["add", "slope"]] * 2


def test_another_choice_is_no_gradient_of_relu() -> None:
    text = "x = gathered 8\nc0 = constant 0.0\nc1 = constant 1.0\n{}\nsum t1"
    for lines in (
        "m = le x c1\nt1 = where m c0 x",
        "m = lt x c0\nt1 = where m c0 x",
        "m = le x c0\nt1 = where m c1 x",
        "m = le c0 x\nt1 = where m c0 x",
    ):
        program = parse(text.format(lines.replace("m =", "t0 =").replace(" m ", " t0 ")))
        assert operations(program)[-1] == "where"


def test_the_gradient_of_relu_at_special_values() -> None:
    """That of a NaN passes, that of a zero does not."""
    x = torch.tensor([[0.0], [-0.0], [torch.nan], [1.0], [-1.0], [torch.inf]], requires_grad=True)
    program = "x = gathered 1\nt0 = relu x\nsum t0"
    loops = torch.arange(6).repeat(2, 1)
    (out,) = ops.edge_program(program, {"x": x}, loops)
    (ours,) = torch.autograd.grad(out, x, torch.full_like(out, 3.0))
    (theirs,) = torch.autograd.grad(x.relu(), x, torch.full_like(out, 3.0))
    assert torch.equal(ours, theirs)


def test_functions_of_sums_in_every_width() -> None:
    for width in (1, 3, 16, 31, 32, 33, 130):
        k, q = torch.randn(9, width), torch.randn(12, width)
        index = random_edges(12, 9, 70)
        program = f"k = row {width}\nq = gathered {width}\nt0 = add k q\nt1 = sigmoid t0\nsum t1"
        (ours,) = ops.edge_program(program, {"k": k, "q": q}, index)
        messages = (k[index[1]] + q[index[0]]).double().sigmoid()
        exact = torch.zeros(9, width, dtype=torch.float64).index_add(0, index[1], messages)
        torch.testing.assert_close(ours.double(), exact, rtol=2e-6, atol=1e-7)


def test_an_output_that_is_asked_for_twice_is_there_twice() -> None:
    """Extrema and softmaxes, of which one reduction writes several outputs, with their records."""
    asked = ("max x", "max_ties x", "softmax x w", "softmax_max w", "softmax_scale w", "sum x")
    text = "x = gathered 6\nw = edge 2\n" + "\n".join((*asked, *asked, "max_ties x"))
    program, index = parse(text), random_edges(9, 9, 50)
    operands = [torch.randn(9, 6), torch.randn(50, 2)]
    arguments = (operands, index, None, text, 9, 9, False)
    found = torch.ops.fastgraph.edge_program(*arguments)
    expected = reference.edge_program(Graph(index, 9, 9), operands, program, False)
    for output, ours, theirs in zip(program.outputs, found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, msg=lambda text, o=output: f"{o}: {text}")
