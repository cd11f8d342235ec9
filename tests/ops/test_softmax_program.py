"""Sums weighted by the softmax of scores, in edge programs, against PyG's softmax."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from fastgraph import ops
from fastgraph.edge_programs.program import parse
from fastgraph.registry.registry import REGISTRY
from tests.graphs import Case, all_cases, hub_edges, quantised, random_edges
from tests.ops.edge_messages import Message, assert_bits_of_threads, close, ordinary
from tests.wanted import gradients_of


@pytest.fixture
def backend(backend: str) -> str:
    """Each backend that has the kernel."""
    if REGISTRY.backends[backend].kernel("edge_program", "cpu", torch.float32) is None:
        pytest.skip(f"{backend} has no kernel of edge programs")
    return backend


def by_channels(message: Message, width: int, heads: int = 1) -> None:
    """As ``GENConv``: a score for each channel, with temperatures that are learnt."""
    x = message.apply("relu", message.operand("gathered", width))
    message.weigh(x, message.apply("mul", x, message.operand("parameter", heads)))


def by_heads(message: Message, width: int, heads: int) -> None:
    """As ``GATv2Conv``: a score for each head, of both ends, beside a bias of edges."""
    x, y = message.operand("gathered", width), message.operand("row", width)
    mixed = message.apply("leaky_relu", message.apply("add", x, y), 0.25)
    att = message.operand("parameter", width)
    product = (mixed.tensor * att.tensor).unflatten(1, (heads, -1)).sum(-1)
    score = type(x)(message.builder.dot(mixed.value, att.value, heads), product)
    message.weigh(x, message.apply("add", score, message.operand("edge", heads)))


@pytest.mark.parametrize("transpose", [False, True], ids=["forward", "transposed"])
@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_graphs(case: Case, transpose: bool, backend: str) -> None:
    message = Message(case, transpose)
    by_channels(message, 40)
    message.check()
    message = Message(case, transpose)
    by_heads(message, 66, 2)
    message.check()


@pytest.mark.parametrize(("width", "heads"), [(1, 1), (12, 4), (40, 1), (70, 35), (5, 5), (33, 33)])
def test_widths(width: int, heads: int, backend: str) -> None:
    """Gradients of gradients, too."""
    for by in (by_heads, by_channels):
        message = Message(Case("random", random_edges(9, 12, 60), 9, 12))
        by(message, width, heads)
        message.check(twice=True)


@pytest.mark.parametrize("seed", range(12))
def test_several_outputs(seed: int, backend: str) -> None:
    """Softmaxes of the same and of other scores, beside other reductions."""
    rng = random.Random(seed)
    case = rng.choice(all_cases())
    message = Message(case, bool(rng.getrandbits(1)), rng.choice([quantised, ordinary]))
    wide = rng.choice([6, 36, 72])
    x, r = message.operand("gathered", wide), message.operand("row", wide)
    narrow = message.operand("edge", rng.choice([1, 2, 3]))
    mixed = message.apply("tanh", message.apply("sub", x, r))
    for score in (narrow, mixed, narrow):
        message.weigh(rng.choice([x, mixed]), score)
    message.reduce(rng.choice(["sum", "mean", "max"]), mixed)
    message.weigh(message.apply("mul", x, narrow), message.apply("mul", narrow, 0.5))
    assert parse(str(message.program)) == message.program
    message.check(twice=True)


def weighted(values: Tensor, scores: Tensor, index: Tensor, rows: int) -> Tensor:
    """A program of values and scores of edges."""
    width, heads = values.shape[1], scores.shape[1]
    text = f"x = edge {width}\ns = edge {heads}\nsoftmax x s"
    (out,) = ops.edge_program(text, {"x": values, "s": scores}, index, num_in=rows, num_out=rows)
    return out


def expected(values: Tensor, scores: Tensor, index: Tensor, rows: int) -> Tensor:
    out = values.new_zeros(rows, values.shape[1])
    for row in range(rows):
        own = index[1] == row
        if own.any():
            weight = scores[own].softmax(0).repeat_interleave(values.shape[1] // scores.shape[1], 1)
            out[row] = (weight * values[own]).sum(0)
    return out


@pytest.mark.parametrize("heads", [1, 8, 48])
def test_large_and_infinite_scores(heads: int, backend: str) -> None:
    """Scores that grow from block to block, that exponentials overflow for, and masks of -inf."""
    index = random_edges(6, 6, 400)
    values = torch.randn(400, 48, dtype=torch.float64)
    scores = 2000 * torch.randn(400, heads, dtype=torch.float64)
    rising = torch.arange(400.0, dtype=torch.float64).unsqueeze(1) * 3 + scores / 1000
    masked = torch.randn(400, heads, dtype=torch.float64)
    masked[torch.rand(400) < 0.7] = -torch.inf
    for given in (scores, rising, -rising, masked):
        close([weighted(values, given, index, 6)], [expected(values, given, index, 6)])
    masked[index[1] == 2] = -torch.inf  # of all: nothing to share among
    ours, theirs = (f(values, masked, index, 6) for f in (weighted, expected))
    torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=1e-9, atol=1e-9)
    masked[index[1] == 3, 0] = torch.nan
    ours, theirs = (f(values, masked, index, 6) for f in (weighted, expected))
    torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("threads", [2, 3])
def test_bits_for_any_number_of_threads(threads: int, restore_threads: None) -> None:
    message = Message(Case("hub", hub_edges(400, 50_000), 400, 400), values=ordinary)
    by_channels(message, 40)
    by_heads(message, 40, 4)
    assert_bits_of_threads(message, threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_narrower_dtypes(dtype: torch.dtype, backend: str) -> None:
    message = Message(Case("random", random_edges(30, 20, 300), 30, 20), values=ordinary)
    by_channels(message, 36)
    by_heads(message, 40, 4)
    narrow = {n: t.detach().to(dtype).requires_grad_() for n, t in message.used.items()}
    wide = {n: t.detach().double().requires_grad_() for n, t in narrow.items()}
    ours, exact = message.run(**narrow), message.run(**wide)
    rounding = torch.finfo(dtype).eps
    close([o.double() for o in ours], exact, rtol=8 * rounding, atol=8 * rounding)
    factors = [torch.randn_like(o) for o in ours]
    grads = [
        torch.autograd.grad(out, list(given.values()), [f.to(out[0].dtype) for f in factors])
        for out, given in ((ours, narrow), (exact, wide))
    ]
    # Sums of a few hundred terms that cancel.
    close([g.double() for g in grads[0]], grads[1], rtol=32 * rounding, atol=200 * rounding)


def test_a_hub_of_half_precision_has_a_finite_scale() -> None:
    """The sum of 100,000 exponentials is beyond float16; what is kept is 1 over it."""
    count = 100_000
    x = torch.ones(count, 1, dtype=torch.float16, requires_grad=True)
    index = torch.stack([torch.arange(count), torch.zeros(count, dtype=torch.int64)])
    text = "x = gathered 1\ns = edge 1\nsoftmax x s"
    scores = torch.zeros(count, 1, dtype=torch.float16)
    (out,) = ops.edge_program(text, {"x": x, "s": scores}, index, num_out=1)
    assert out.item() == 1
    (grad,) = torch.autograd.grad(out, x, torch.full_like(out, 4096.0))
    torch.testing.assert_close(grad.double().sum().item(), 4096.0, rtol=0.01, atol=0)


def test_gradients_that_nobody_wants_are_not_computed() -> None:
    message = Message(Case("random", random_edges(12, 9, 60), 12, 9), values=ordinary)
    by_heads(message, 40, 4)
    out = torch.cat(message.run())
    every, called = gradients_of(out, list(message.used.values()))
    assert called.passes["edge_program"] == 2
    for (name, leaf), whole in zip(message.used.items(), every, strict=True):
        (alone,), called = gradients_of(out, [leaf])
        assert called.passes == {"edge_program": 1}, name
        assert alone is not None and whole is not None
        assert torch.equal(alone, whole), name


def test_records_are_kept_once_for_each_score() -> None:
    message = Message(Case("random", random_edges(12, 9, 60), 12, 9), values=ordinary)
    score = message.operand("edge", 1)
    for _ in range(2):
        message.weigh(message.operand("gathered", 8), score)
    with torch.no_grad():
        assert len(message.run()) == 2
    text = str(message.program) + "\nsoftmax_max edge_0\nsoftmax_scale edge_0"
    operands = [message.operands[name] for name in parse(text).names]
    index = message.case.edge_index
    out = torch.ops.fastgraph.edge_program(operands, index, None, text, 12, 9, False)
    largest, scale = out[2:]
    assert not largest.requires_grad and scale.requires_grad
    weight = (score.tensor - largest[index[1]]).exp() * scale[index[1]]
    totals = torch.zeros(9, 1, dtype=weight.dtype).index_add(0, index[1], weight)
    close([totals], [(torch.bincount(index[1], minlength=9) > 0).double().unsqueeze(1)])


def test_no_records_no_gradient() -> None:
    operands = [torch.randn(5, 6, requires_grad=True)]
    arguments = (operands, random_edges(5, 5, 20), None, "x = gathered 6\nsoftmax x x", 5, 5, False)
    with pytest.raises(RuntimeError, match="the program has no softmax_max of the scores"):
        torch.ops.fastgraph.edge_program.default(*arguments)


def test_opcheck() -> None:
    x, s = torch.randn(5, 6, requires_grad=True), torch.randn(20, 2, requires_grad=True)
    text = "x = gathered 6\ns = edge 2\nsoftmax x s\nsoftmax_max s\nsoftmax_scale s"
    arguments = ([x, s], random_edges(5, 5, 20), None, text, 5, 5, False)
    torch.library.opcheck(torch.ops.fastgraph.edge_program.default, arguments)


def test_batched_gradients() -> None:
    message = Message(Case("random", random_edges(12, 9, 60), 12, 9), values=ordinary)
    by_heads(message, 40, 4)
    out, leaves = message.run()[0], list(message.used.values())
    grads = torch.randn(3, *out.shape, dtype=out.dtype)
    together = torch.autograd.grad(out, leaves, grads, retain_graph=True, is_grads_batched=True)
    each = [torch.autograd.grad(out, leaves, grad, retain_graph=True) for grad in grads]
    close(together, [torch.stack(parts) for parts in zip(*each, strict=True)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = gathered 6\nsoftmax x", "softmax must have scores"),
        ("x = gathered 6\ns = edge 4\nsoftmax x s", "scores of a divisor of width 6, got 4"),
        ("x = gathered 6\ns = edge 6\nsum x s", "expected `NAME"),
        ("x = gathered 6\nsoftmax x y", "'y' is no value"),
        ("softmax = gathered 6\nsum softmax", "must not be a keyword"),
    ],
)
def test_wrong_programs_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)
