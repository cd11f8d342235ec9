"""Instructions of edge programs on the channels of each head, against torch's operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastgraph import ops
from fastgraph.edge_programs.builder import Builder, Value
from fastgraph.edge_programs.program import parse
from fastgraph.registry.registry import REGISTRY
from tests.graphs import quantised, random_edges

EDGES = random_edges(12, 9, 60)


@pytest.fixture
def backend(backend: str) -> str:
    """Each backend that has the kernel."""
    if REGISTRY.backends[backend].kernel("edge_program", "cpu", torch.float32) is None:
        pytest.skip(f"{backend} has no kernel of edge programs")
    return backend


def heads_of(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(1, (heads, -1))


def first_of(x: Tensor, heads: int) -> Tensor:
    found = heads_of(x, heads) != 0
    return (found & (found.cumsum(-1) == 1)).flatten(1).to(x.dtype)


Both = tuple[Callable[[Builder, Value], Value], Callable[[Tensor], Tensor]]

# Of values of width 12 or 48, in 3 heads of 4 or of 16 channels.
INSTRUCTIONS: dict[str, Both] = {
    "fold_max": (
        lambda b, x: b.fold_max(x, 3),
        lambda x: heads_of(x, 3).amax(-1),
    ),
    "first": (
        lambda b, x: b.first(x, 3) * x,
        lambda x: first_of(x, 3) * x,
    ),
    "slice": (
        lambda b, x: b.slice(x, 9, 3, 1),
        lambda x: heads_of(x, 3)[:, :, 1:4].flatten(1),
    ),
    "pad": (
        lambda b, x: b.pad(x, 2 * x.width, 3, 2),
        lambda x: torch.nn.functional.pad(heads_of(x, 3), (2, x.shape[1] // 3 - 2)).flatten(1),
    ),
    "all": (
        lambda b, x: b.pad(b.slice(x, 6, 3, 0), 24, 3, 5) * b.tile(b.fold_max(x, 3), 24),
        lambda x: (
            torch.nn.functional.pad(heads_of(x, 3)[:, :, :2], (5, 1)).flatten(1)
            * heads_of(x, 3).amax(-1).repeat(1, 8)
        ),
    ),
}


def irregular(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator, dtype=torch.float64)
    where = torch.rand(*shape, generator=generator)
    return values.masked_fill(where < 0.05, float("nan")).masked_fill(where > 0.95, float("inf"))


@pytest.mark.parametrize("width", [12, 48])
@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_values_and_gradients(name: str, width: int, backend: str) -> None:
    build, compute = INSTRUCTIONS[name]
    b = Builder()
    x = quantised(12, width, seed=1).requires_grad_()
    y = torch.randn(9, width, dtype=torch.float64).requires_grad_()
    value = build(b, b.operand("x", "gathered", width) * b.operand("y", "row", width))
    out = ops.edge_program(b.program(("sum", value)), {"x": x, "y": y}, EDGES)[0]
    messages = compute(x[EDGES[0]] * y[EDGES[1]])
    expected = messages.new_zeros(9, messages.shape[1]).index_add(0, EDGES[1], messages)
    torch.testing.assert_close(out, expected)
    weight = torch.randn_like(expected)
    ours, theirs = (
        torch.autograd.grad((o * weight).sum(), [x, y], create_graph=True) for o in (out, expected)
    )
    torch.testing.assert_close(ours, theirs)
    factors = torch.randn_like(x)
    twice = [torch.autograd.grad((grads[0] * factors).sum(), y)[0] for grads in (ours, theirs)]
    torch.testing.assert_close(*twice)


@pytest.mark.parametrize("width", [12, 48])
@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_infinities_and_nan(name: str, width: int, backend: str) -> None:
    build, compute = INSTRUCTIONS[name]
    b = Builder()
    x = irregular(12, width, seed=2)
    program = b.program(("edge", build(b, b.operand("x", "gathered", width))))
    (out,) = ops.edge_program(program, {"x": x}, EDGES, num_out=9)
    torch.testing.assert_close(out, compute(x[EDGES[0]]), equal_nan=True)


DEGREES = (0, 3, 1, 0, 0, 2, 1, 1, 3, 2, 0, 1, 2, 2, 3, 1, 1, 1, 0, 3, 3, 0)
"""Rows that share blocks of edges, and empty ones between them."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("width", [12, 48, 96])
@pytest.mark.parametrize("name", [*INSTRUCTIONS, "atan2"])
def test_short_rows(name: str, width: int, dtype: torch.dtype, backend: str) -> None:
    """Of values of each place: of gathered nodes, rows, edges, the program, and of two places."""
    build, compute = INSTRUCTIONS.get(name, (atan2_of_both, torch_atan2_of_both))
    ptr = torch.tensor([0, *DEGREES]).cumsum(0)
    row = torch.arange(len(DEGREES)).repeat_interleave(torch.tensor(DEGREES))
    col = torch.randint(9, row.shape, generator=torch.Generator().manual_seed(4))
    x, r, e = (quantised(n, width, seed=n).to(dtype) for n in (9, len(DEGREES), len(row)))
    p = quantised(1, width, seed=7).to(dtype)[0]
    b = Builder()
    places = {"x": "gathered", "r": "row", "e": "edge", "p": "parameter"}
    taken = {name: b.operand(name, place, width) for name, place in places.items()}
    values = [*taken.values(), taken["x"] * taken["r"]]
    both = [x[col], r[row], e, p.expand_as(e), x[col] * r[row]]
    outputs = [(how, build(b, value)) for value in values for how in ("sum", "max", "edge")]
    given = {"x": x, "r": r, "e": e, "p": p}
    found = ops.edge_program(b.program(*outputs), given, col, ptr=ptr, num_in=9)
    for number, messages in enumerate(map(compute, both)):
        zeros = messages.new_zeros(len(DEGREES), messages.shape[1])
        index = row[:, None].expand_as(messages)
        largest = zeros.scatter_reduce(0, index, messages, "amax", include_self=False)
        expected = [zeros.index_add(0, row, messages), largest, messages]
        torch.testing.assert_close(list(found[3 * number : 3 * number + 3]), expected)


def atan2_of_both(b: Builder, x: Value) -> Value:
    """Of half of the channels and the others, and as wide as these."""
    half = x.width // 2
    return b.apply("atan2", b.slice(x, half, 1, 0), b.slice(x, half, 1, half))


def torch_atan2_of_both(x: Tensor) -> Tensor:
    return torch.atan2(*x.chunk(2, dim=1))


def test_text() -> None:
    text = (
        "x = gathered 12\nt0 = slice x 6 3 1\nt1 = pad t0 24 3 2\nt2 = first t1 24 3 0\n"
        "t3 = fold_max x 3\nt4 = detach t3\nsum t2\nsum t4"
    )
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    "line",
    [
        "slice x 6 5 0",  # heads that do not divide
        "slice x 9 3 2",  # beyond the end
        "slice x 6 3 -1",
        "slice x 0 3 0",
        "pad x 12 4 1",
        "pad x 15 3 2",
        "first x 12 5 0",
        "first x 12 3 1",
        "first x 6 3 0",
        "fold_max x 5",
        "detach x x",
    ],
)
def test_what_is_wrong(line: str) -> None:
    with pytest.raises(ValueError, match="t0"):
        parse(f"x = gathered 12\nt0 = {line}\nsum t0")
