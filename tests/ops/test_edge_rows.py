"""Rows of edge programs that share a block of edges: each is what it is by itself, in bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastgraph import ops

DEGREES = (1, 0, 2, 3, 0, 7, 15, 16, 1, 17, 0, 33, 2, 2, 40, 1, 4, 5, 0)
"""Short rows of all lengths, rows of a whole block, longer ones, and empty ones between them."""

NODES = 25

ELEMENTWISE = """
x = gathered {wide}
r = row {wide}
n = row {narrow}
e = edge {narrow}
w = edge {wide}
p = parameter {narrow}
t0 = mul n p
t1 = sub e t0
t2 = tanh r
t3 = add x t2
t4 = mul t3 w
t5 = mul t1 t4
t6 = mul r t5
"""

REDUCTIONS = {
    "sums": "sum t5\nsum t6\nmean t4\nsum t1",
    "extrema": "max t4\nmax_ties t4\nmin t5\nmin_ties t5\nmax t1",
    "softmax": "softmax x t1\nsoftmax_max t1\nsoftmax_scale t1\nsoftmax t4 t5",
    "channels": (
        "t7 = fold_max t4 {narrow}\nt8 = first t4 {wide} {narrow} 0\n"
        "t9 = slice r {narrow} {narrow} {last}\nt10 = pad t4 {double} {narrow} {last}\n"
        "t11 = fold_max r {narrow}\nt12 = mul t7 t11\nt13 = atan2 t9 t1\n"
        "t14 = pad t3 {double} 1 0\nsum t12\nmax t8\nsum t13\nsum t10\nmax t10\nsum t14"
    ),
    "terms": (
        "t7 = mul n x\nt8 = mul t1 t7\nt9 = mul e w\nt10 = mul t9 n\nt11 = add t8 t10\n"
        "t12 = mul t6 e\nt13 = add t11 t12\nsum t11\nmean t13\nmax t11\nsum t5\nsum t13"
    ),
    "products": "t7 = product w m {odd}\nsum t7\nmax t7\nedge t7",
}


def program_of(name: str, wide: int, narrow: int) -> str:
    matrix = "m = parameter {size}\n" if name == "products" else ""
    text = ELEMENTWISE.replace("t0 =", f"{matrix}t0 =", 1) + REDUCTIONS[name]
    sizes = {"odd": 5, "size": 5 * wide, "double": 2 * wide, "last": wide // narrow - 1}
    return text.format(wide=wide, narrow=narrow, **sizes)


def results(text: str, degrees: list[int], first: int, wide: int, narrow: int) -> list[Tensor]:
    """The outputs for rows of these degrees, of which the first is one of all rows."""
    generator = torch.Generator().manual_seed(3)
    all_rows, all_edges = len(DEGREES), sum(DEGREES)
    begin, count = sum(DEGREES[:first]), sum(degrees)
    ends = torch.randint(NODES, (all_edges,), generator=generator)[begin : begin + count]
    ptr = torch.tensor([0, *degrees]).cumsum(0)

    def numbers(rows: int, width: int, own: slice) -> Tensor:
        return torch.randn(rows, width, generator=generator)[own]

    rows, edges = slice(first, first + len(degrees)), slice(begin, begin + count)
    operands = {
        "x": numbers(NODES, wide, slice(None)),
        "r": numbers(all_rows, wide, rows),
        "n": numbers(all_rows, narrow, rows),
        "e": numbers(all_edges, narrow, edges),
        "w": numbers(all_edges, wide, edges),
        "p": numbers(1, narrow, slice(None))[0],
        "m": numbers(5, wide, slice(None)).reshape(-1),
    }
    taken = {name: tensor for name, tensor in operands.items() if f"{name} = " in text}
    return list(ops.edge_program(text, taken, ends, ptr=ptr, num_in=NODES))


@pytest.mark.parametrize(
    ("wide", "narrow"), [(40, 1), (64, 8), (64, 16), (3, 3), (96, 2), (33, 11), (64, 64)], ids=str
)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_rows_are_what_they_are_alone(name: str, wide: int, narrow: int) -> None:
    text = program_of(name, wide, narrow)
    together = results(text, list(DEGREES), 0, wide, narrow)
    for row, degree in enumerate(DEGREES):
        begin = sum(DEGREES[:row])
        for whole, alone in zip(together, results(text, [degree], row, wide, narrow), strict=True):
            is_of_edges = whole.shape[0] == sum(DEGREES)
            own = slice(begin, begin + degree) if is_of_edges else slice(row, row + 1)
            assert torch.equal(whole[own], alone), (row, degree)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("of_head", [4, 8, 16, 32, 48, 64, 128, 192])
def test_dot_products_of_whole_vectors_are_those_of_their_edges(of_head: int, heads: int) -> None:
    """Whichever vectors a level of the processor has, and wherever rows begin in a block."""
    generator = torch.Generator().manual_seed(of_head)
    count, width = sum(DEGREES), heads * of_head
    ptr = torch.tensor([0, *DEGREES]).cumsum(0)
    ends = torch.randint(NODES, (count,), generator=generator)
    rows = torch.randn(len(DEGREES), width, generator=generator)
    x = torch.randn(NODES, width, generator=generator)
    text = f"""
        y = row {width}
        x = gathered {width}
        t0 = dot y x {heads}
        t1 = mul t0 x
        edge t0
        sum t1
    """
    dots, sums = ops.edge_program(text, {"y": rows, "x": x}, ends, ptr=ptr, num_in=NODES)
    own, other = rows.double().repeat_interleave(ptr.diff(), 0), x.double()[ends]
    expected = (own * other).view(count, heads, of_head).sum(2)
    weighed = expected.repeat_interleave(of_head, 1) * other
    of_rows = torch.zeros(len(DEGREES), width, dtype=torch.float64)
    of_rows.index_add_(0, torch.arange(len(DEGREES)).repeat_interleave(ptr.diff()), weighed)
    torch.testing.assert_close(dots.double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(sums.double(), of_rows, rtol=1e-5, atol=1e-3)
