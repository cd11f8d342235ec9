"""Products of values of edges with matrices, in edge programs, against torch's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastgraph import ops
from fastgraph.edge_programs.gradients import derive
from fastgraph.edge_programs.program import parse
from fastgraph.registry.registry import REGISTRY
from tests.emulated import repeats_but
from tests.graphs import Case, all_cases, hub_edges, quantised, random_edges
from tests.ops.edge_messages import (
    Both,
    Message,
    assert_bits_of_threads,
    close,
    ordinary,
)
from tests.wanted import gradients_of


@pytest.fixture
def backend(backend: str) -> str:
    """Each backend that has the kernel."""
    if REGISTRY.backends[backend].kernel("edge_program", "cpu", torch.float32) is None:
        pytest.skip(f"{backend} has no kernel of edge programs")
    return backend


def two_maps(message: Message, widths: tuple[int, int, int], *, is_transposed: bool) -> Both:
    """The message of EdgeConv: a map of both ends, done before, and another of what is made of it.

    Args:
        message: where the operands go.
        widths: between the maps, of the message, and behind a further map.
        is_transposed: of the matrices.
    """
    hidden, width, last = widths
    ends = [message.operand(place, hidden) for place in ("row", "gathered")]
    x = message.apply("relu", message.apply("add", *ends))
    y = message.product(x, width, is_transposed=is_transposed)
    y = message.apply("tanh", message.apply("add", y, message.operand("parameter", width)))
    return message.product(y, last, is_transposed=not is_transposed)


WIDTHS = ((2, 3, 2), (1, 5, 1), (16, 8, 4), (33, 70, 35), (64, 16, 130), (3, 64, 7))


@pytest.mark.parametrize("is_transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_two_products(widths: tuple[int, int, int], is_transposed: bool, backend: str) -> None:
    """In every width, outputs and gradients of both orders."""
    message = Message(Case("random", random_edges(12, 9, 60), 12, 9), values=ordinary)
    y = two_maps(message, widths, is_transposed=is_transposed)
    for reduction in ("sum", "max", "total"):
        message.reduce(reduction, y)
    assert parse(str(message.program)) == message.program
    message.check(twice=True)


@pytest.mark.parametrize("transpose", [False, True], ids=["forward", "transposed"])
@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_graphs(case: Case, transpose: bool, backend: str) -> None:
    """Empty rows, hubs, duplicates, and ties of the maximum."""
    message = Message(case, transpose)
    y = two_maps(message, (6, 5, 3), is_transposed=True)
    for reduction in ("max", "mean", "edge"):
        message.reduce(reduction, y)
    message.check()


@pytest.mark.parametrize("places", [("row", "edge"), ("gathered", "row"), ("edge", "parameter")])
def test_sums_of_outer_products(places: tuple[str, str], backend: str) -> None:
    for widths in ((1, 1), (3, 40), (35, 2), (8, 8)):
        message = Message(Case("random", random_edges(12, 9, 60), 12, 9), values=ordinary)
        message.outer(*(message.operand(p, w) for p, w in zip(places, widths, strict=True)))
        message.check(twice=True)


def test_a_matrix_of_several_products(backend: str) -> None:
    """Its gradient is the sum of several, that of its element-wise use among them."""
    message = Message(Case("random", random_edges(12, 9, 60), 12, 9), values=ordinary)
    x, w = message.operand("gathered", 4), message.operand("parameter", 16)
    matrix = message.operands["parameter_1"].view(4, 4)
    once = Both(message.builder.product(x.value, w.value, 4), x.tensor @ matrix)
    again = message.builder.product(once.value, w.value, 4, is_transposed=True)
    twice = Both(again, once.tensor @ matrix.t())
    message.reduce("sum", message.apply("mul", message.operand("edge", 1), twice))
    message.reduce("max", message.apply("mul", message.operand("row", 16), w))
    message.check(twice=True)


def test_a_softmax_of_products(backend: str) -> None:
    """Attention whose scores are a map of a difference, as PointTransformerConv's."""
    message = Message(Case("random", random_edges(12, 9, 60), 12, 9), values=ordinary)
    ends = [message.operand(place, 3) for place in ("row", "gathered")]
    y = message.product(message.apply("sub", *ends), 8, is_transposed=True)
    score = message.product(message.apply("relu", y), 8, is_transposed=True)
    message.weigh(message.apply("add", y, message.operand("gathered", 8)), score)
    message.check(twice=True)


def test_one_pass_for_gradients_of_gathered_nodes_and_matrices() -> None:
    message = Message(Case("random", random_edges(12, 9, 60), 12, 9), values=ordinary)
    x = message.apply("sub", message.operand("gathered", 4), message.operand("row", 4))
    message.reduce("max", message.product(x, 5))
    out, leaves = torch.cat(message.run()), message.used
    _, called = gradients_of(out, list(leaves.values()))
    assert called.passes["edge_program"] == 2
    _, called = gradients_of(out, [leaves["gathered_0"], leaves["parameter_2"]])
    assert called.passes["edge_program"] == 1


def test_nothing_of_matrices_is_stored_for_edges() -> None:
    text = "x = gathered 4\nw = parameter 20\nt0 = relu x\nt1 = product x w 5\nsum t1"
    derived = derive(parse(text), frozenset("xw"), frozenset({0}))
    reductions = {o.reduction for made in derived.passes for o in made.program.outputs}
    assert reductions == {"sum", "outer"}
    assert all(
        program.width(value) <= 5
        for program in (made.program for made in derived.passes)
        for value in range(len(program.operands), program.num_values)
    )


@pytest.mark.parametrize(
    "dtype",
    repeats_but([torch.float16], [torch.float32, torch.bfloat16, torch.float16]),
    ids=str,
)
def test_narrower_dtypes(dtype: torch.dtype, backend: str) -> None:
    message = Message(Case("random", random_edges(30, 20, 300), 30, 20), values=ordinary)
    message.reduce("sum", two_maps(message, (24, 33, 16), is_transposed=True))
    narrow = {n: t.detach().to(dtype).requires_grad_() for n, t in message.used.items()}
    wide = {n: t.detach().double().requires_grad_() for n, t in narrow.items()}
    rounding = torch.finfo(dtype).eps
    (ours,), (exact,) = message.run(**narrow), message.run(**wide)
    # Sums of some thousand products.
    close([ours.double()], [exact], rtol=8 * rounding, atol=100 * rounding)
    factor = torch.randn_like(exact)
    grads = [
        torch.autograd.grad(out, list(given.values()), factor.to(out.dtype))
        for out, given in ((ours, narrow), (exact, wide))
    ]
    for found, expected in zip(*grads, strict=True):
        scale = float(expected.abs().max())
        close([found.double()], [expected], rtol=16 * rounding, atol=16 * rounding * scale)


@pytest.mark.parametrize("values", [ordinary, quantised], ids=["random", "ties"])
@pytest.mark.parametrize("threads", [2, 3])
def test_bits_for_any_number_of_threads(
    threads: int, values: Callable[..., Tensor], restore_threads: None
) -> None:
    message = Message(Case("hub", hub_edges(400, 50_000), 400, 400), values=values)
    y = two_maps(message, (20, 33, 16), is_transposed=True)
    for reduction in ("sum", "max"):
        message.reduce(reduction, y)
    assert_bits_of_threads(message, threads)


def test_an_edge_has_the_same_bits_in_every_block() -> None:
    """Or the gradient of a maximum would not find where it was attained."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(70, 40, generator=generator)
    w = torch.randn(40, 35, generator=generator)
    text = "x = gathered 40\nw = parameter 1400\nt0 = product x w 35\nedge t0"
    all_nodes = torch.arange(70)
    alone = torch.stack([all_nodes, all_nodes])
    together = torch.stack([all_nodes, torch.zeros_like(all_nodes)])
    found = [ops.edge_program(text, {"x": x, "w": w}, e)[0] for e in (alone, together)]
    assert torch.equal(*found)


X = "x = gathered 6\nw = parameter 12\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (X + "t0 = product x w 3\nsum t0", "a matrix of 6 times 3 numbers, got 12"),
        (X + "t0 = product x 2\nsum t0", "2 arguments, got 1"),
        (X + "t0 = product w x 2\nsum t0", "a matrix that is a parameter"),
        (X + "t0 = relu w\nt1 = product x t0 2\nsum t1", "a matrix that is a parameter"),
        (X + "outer x", "outer must have two values"),
        (X + "outer x y", "'y' is no value"),
    ],
)
def test_wrong_programs_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)
