"""The CUDA kernels of attention, executed by the emulator, beside the reference in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgraph.backends.reference import ReferenceBackend
from fastgraph.graphs.graph import Graph
from fastgraph.plugins.backend import FLOATING
from tests.native.cases import normal, unit_roundoff
from tests.simt.compared import (
    CASES,
    assert_same,
    assert_same_in_every_order,
    cpu,
    graph_of,
    misaligned,
    simt,
)

OPERATORS = ("gatv2", "gat", "attention")
WIDTHS = (0, 1, 7, 8, 16, 33, 64, 128, 130, 256, 300, 512, 520, 1100)
"""Every layout of packs and lanes, whole, with a rest, and in parts."""

Inputs = list[Tensor | None]


def inputs_of(
    operator: str,
    graph: Graph,
    heads: int,
    width: int,
    dtype: torch.dtype,
    edge_dim: int = 0,
    transpose: bool = False,
) -> Inputs:
    """The tensors that an operator takes; the last are of the edges, ``None`` without features."""
    src, dst = (graph.num_dst, graph.num_src) if transpose else (graph.num_src, graph.num_dst)
    edges, factor = graph.num_edges, 1 / max(width, 1) ** 0.5
    shapes: list[tuple[int, ...]] = {
        "gatv2": [
            *((src, heads, width), (dst, heads, width), (1, heads, width)),
            *((edges, edge_dim), (heads, edge_dim, width)),
        ],
        "gat": [(src, heads, width), (src, heads), (dst, heads), (edges, heads)],
        "attention": [
            *((dst, heads, width + edge_dim), (src, heads, width), (src, heads, width)),
            (edges, edge_dim),
        ],
    }[operator]
    tensors = [normal(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]
    if operator == "gatv2":
        tensors[2] = tensors[2] * factor
    return [t if i < 3 or edge_dim else None for i, t in enumerate(tensors)]


def option_of(operator: str, inputs: Inputs) -> float:
    """The negative slope, or the factor of the scores."""
    if operator not in ("attention", "biased_attention"):
        return 0.2
    assert inputs[0] is not None
    return 1 / max(inputs[0].shape[-1], 1) ** 0.5


def widened(tensors: Any) -> list[Any]:
    return [t.double() if t is not None and t.is_floating_point() else t for t in tensors]


def reference(operator: str, *arguments: Any) -> Any:
    return ReferenceBackend().kernel(operator, "cpu", torch.float64)(*arguments)


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Equal up to the rounding of a result, and of the sums beside which it may be small."""
    accumulated = 1e-12 if dtype == torch.float64 else 1e-5
    scale = float(expected.square().mean().sqrt()) if expected.numel() else 0.0
    rtol, atol = unit_roundoff(actual.dtype) + accumulated, accumulated * (scale + 0.05)
    if unit_roundoff(dtype) > 1e-4 and actual.dtype == dtype:
        atol = max(atol, 1e-7)  # half of the smallest float16
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=atol)


def gradients_of(out: Tensor, stats: Tensor, alpha: Tensor) -> list[Tensor]:
    """Some gradients of the output, of the weights, and of logarithms of sums of exponentials."""
    results = (out, alpha, stats[..., 0])
    return [normal(*t.shape, dtype=t.dtype, seed=8 + i) for i, t in enumerate(results)]


def check(
    operator: str,
    graph: Graph,
    inputs: Inputs,
    transpose: bool = False,
    dropout: float = 0.0,
    seed: int = 0,
    given: Callable[[Tensor], Tensor] = Tensor.contiguous,
) -> None:
    """Output, stats, weights and the gradients of all tensors; ``given`` moves what else they take.

    That is what is added to the output, and the gradients of all results.
    """
    options = (transpose, option_of(operator, inputs), dropout, seed)
    dtype = inputs[0].dtype  # type: ignore[union-attr]
    out, stats, alpha = simt(operator, graph, *inputs, *options, True)
    expected = reference(operator, graph, *widened(inputs), *options, True)
    for a, b in zip((out, stats, alpha), expected, strict=True):
        assert_close(a, b, dtype)
    addend = given(normal(*out.shape, dtype=dtype, seed=10))
    out, *_ = simt(operator, graph, *inputs, *options, False, addend=addend)
    assert_close(out, expected[0] + addend.double(), dtype)
    grads = [given(grad) for grad in gradients_of(out, stats, alpha)]
    backward = f"{operator}_backward"
    gradients = simt(backward, graph, *grads, *inputs, stats, *options)
    wide = [*widened(grads), *widened(inputs), stats.double()]
    for a, b in zip(gradients, reference(backward, graph, *wide, *options), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_close(a, b, dtype)


@pytest.mark.parametrize("transpose", [False, True], ids=["forward", "transposed"])
@pytest.mark.parametrize("edge_dim", [0, 3])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_graph(operator: str, name: str, edge_dim: int, transpose: bool) -> None:
    graph = graph_of(name)
    inputs = inputs_of(operator, graph, 2, 12, torch.float32, edge_dim, transpose)
    check(operator, graph, inputs, transpose)


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_layout(operator: str, width: int, dtype: torch.dtype) -> None:
    graph = graph_of("random")
    heads = 1 if width > 256 else 2
    for edge_dim in (0, 3, 8):
        check(operator, graph, inputs_of(operator, graph, heads, width, dtype, edge_dim))


@pytest.mark.parametrize("name", ["random", "isolated", "hub"])
@pytest.mark.parametrize(("heads", "width"), [(4, 64), (8, 36), (2, 128), (6, 68)])
def test_heads_of_a_node_in_one_warp(heads: int, width: int, name: str) -> None:
    """As the features of these graphs fit into the cache of the emulator."""
    graph = graph_of(name)
    check("gatv2", graph, inputs_of("gatv2", graph, heads, width, torch.float32), dropout=0.3)


@pytest.mark.parametrize(("heads", "width"), [(4, 64), (2, 128)])
def test_bits_do_not_depend_on_the_cache(heads: int, width: int) -> None:
    """Heads go by themselves where it has no room for features that no edge leads to."""
    edges = CASES["random"].edge_index
    large, small = Graph(edges, 1000, 12), Graph(edges, 12, 12)
    inputs = inputs_of("gatv2", large, heads, width, torch.float32)
    first = [t if t is None or len(t) < 1000 else t[:12].contiguous() for t in inputs]
    options = (False, 0.2, 0.3, 5, True)
    together = simt("gatv2", small, *first, *options)
    apart = simt("gatv2", large, *inputs, *options)
    assert all(map(torch.equal, together, apart))


@pytest.mark.parametrize("operator", OPERATORS)
def test_memory_that_is_not_aligned(operator: str) -> None:
    graph = graph_of("random")
    inputs = inputs_of(operator, graph, 2, 64, torch.float32, edge_dim=4)
    check(operator, graph, inputs, given=misaligned)
    for position, tensor in enumerate(inputs):
        assert tensor is not None
        moved = [*inputs[:position], misaligned(tensor), *inputs[position + 1 :]]
        check(operator, graph, moved)


@pytest.mark.parametrize("offset", [8, 4])
@pytest.mark.parametrize("operator", OPERATORS)
def test_short_values_in_packs_of_half_the_size_of_their_sums(operator: str, offset: int) -> None:
    """Packs of 16 bytes begin where those of 32, of float32 for as many sums, may not."""
    graph = graph_of("cut")

    def moved(tensor: Tensor) -> Tensor:
        rest = tensor.new_zeros(offset)
        return torch.cat([rest, tensor.flatten()])[offset:].view(tensor.shape)

    inputs = inputs_of(operator, graph, 2, 64, torch.bfloat16)
    check(operator, graph, [None if t is None else moved(t) for t in inputs], given=moved)


# Of the row of a hub come more pieces than of those of "cut", whatever their dtype.
LONG_ROWS = [
    pytest.param(name, dtype, marks=pytest.mark.repeats if marked else ())
    for name in ("cut", "hub")
    for dtype in FLOATING
    for marked in [name == "hub" and dtype != torch.float32]
]


@pytest.mark.parametrize("edge_dim", [0, 3])
@pytest.mark.parametrize(("name", "dtype"), LONG_ROWS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_long_rows(operator: str, name: str, dtype: torch.dtype, edge_dim: int) -> None:
    """Both passes meet them, each in one of the directions."""
    graph = graph_of(name)
    for transpose in (False, True):
        inputs = inputs_of(operator, graph, 2, 40, dtype, edge_dim, transpose)
        check(operator, graph, inputs, transpose, dropout=0.3, seed=7)


@pytest.mark.parametrize("width", [1, 600])
@pytest.mark.parametrize("operator", OPERATORS)
def test_long_rows_of_single_values_and_of_parts(operator: str, width: int) -> None:
    graph = graph_of("cut")
    for transpose in (False, True):
        inputs = inputs_of(operator, graph, 1, width, torch.float32, 2, transpose)
        check(operator, graph, inputs, transpose)


@pytest.mark.parametrize("edge_dim", [1, 2, 4, 16, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("operator", ["gatv2", "attention"])
def test_every_number_of_edge_features(operator: str, dtype: torch.dtype, edge_dim: int) -> None:
    graph = graph_of("random")
    for width in (5, 16, 128):
        check(operator, graph, inputs_of(operator, graph, 3, width, dtype, edge_dim))


@pytest.mark.parametrize("dropout", [0.4, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("operator", OPERATORS)
def test_dropout(operator: str, dtype: torch.dtype, dropout: float) -> None:
    graph = graph_of("random")
    inputs = inputs_of(operator, graph, 3, 24, dtype, 2)
    check(operator, graph, inputs, dropout=dropout, seed=0x1234_5678_9ABC_DEF1)


@pytest.mark.parametrize("name", ["random", "cut"])
@pytest.mark.parametrize(("width", "edge_dims"), [(7, (0, 3)), (64, (4, 0))])
@pytest.mark.parametrize("operator", OPERATORS)
def test_bits_do_not_depend_on_the_order_of_threads(
    operator: str, width: int, edge_dims: tuple[int, int], name: str
) -> None:
    graph = graph_of(name)
    for transpose, edge_dim in zip((False, True), edge_dims, strict=True):
        inputs = inputs_of(operator, graph, 2, width, torch.float32, edge_dim, transpose)
        options = (transpose, option_of(operator, inputs), 0.3, 5)
        assert_same_in_every_order(operator, graph, *inputs, *options, True)
        out, stats, alpha = simt(operator, graph, *inputs, *options, True)
        grads = gradients_of(out, stats, alpha)
        assert_same_in_every_order(f"{operator}_backward", graph, *grads, *inputs, stats, *options)


def saturated(operator: str) -> tuple[Graph, Inputs]:
    """Scores that leave all weight to the last source, without two edges that share it."""
    edges = torch.cartesian_prod(torch.arange(9), torch.arange(5)).t().contiguous()
    steps = 1000 * torch.arange(9.0).view(-1, 1, 1)
    ones = torch.ones(5, 2, 12)
    value = normal(9, 2, 12, dtype=torch.float32)
    inputs: dict[str, Inputs] = {
        "gatv2": [steps + value, ones, ones[:1], None, None],
        "gat": [value, steps[:, 0].repeat(1, 2), ones[:, :, 0].contiguous(), None],
        "attention": [ones, (steps + value) / 12, value, None],
    }
    return Graph(edges, 9, 5), inputs[operator]


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("operator", OPERATORS)
def test_gradients_of_scores_vanish_where_one_edge_has_all_weight(
    operator: str, dropout: float
) -> None:
    graph, inputs = saturated(operator)
    options = (False, 0.2, dropout, 3)
    out, stats, alpha = simt(operator, graph, *inputs, *options, True)
    assert int((alpha != 0).sum()) <= 10
    grads = [*gradients_of(out, stats, alpha)[:2], None]  # the scores have one of their own
    gradients = simt(f"{operator}_backward", graph, *grads, *inputs, stats, *options)
    for position in {"gatv2": (1, 2), "gat": (1, 2), "attention": (0, 1)}[operator]:
        assert torch.count_nonzero(gradients[position]) == 0


def with_immense_products_of_light_edges(operator: str) -> tuple[Graph, Inputs]:
    """The first half of the sources has next to no weight and 1e12 in a channel of its values."""
    edges = torch.cartesian_prod(torch.arange(40), torch.arange(5)).t().contiguous()
    is_light = (torch.arange(40) < 20).float().view(-1, 1)
    score = normal(40, 2, dtype=torch.float32) - 200 * is_light  # times the option
    value, key = (normal(40, 2, 12, dtype=torch.float32, seed=seed) for seed in (1, 2))
    dst = normal(5, 2, 12, dtype=torch.float32, seed=3)
    att = torch.full((1, 2, 12), 0.1)
    value[:, :, 1] += 1e12 * is_light
    if operator == "gatv2":
        value[:, :, 0], att[:, :, 0], att[:, :, 1] = score, 1, 0
    key[:, :, 0], dst[:, :, 0] = score, 1
    inputs: dict[str, Inputs] = {
        "gatv2": [value, dst, att, None, None],
        "gat": [value, score, dst[:, :, 1].contiguous(), None],
        "attention": [dst, key, value, None],
    }
    return Graph(edges, 40, 5), inputs[operator]


@pytest.mark.parametrize("operator", OPERATORS)
def test_gradients_of_scores_forget_products_that_had_no_weight(operator: str) -> None:
    graph, inputs = with_immense_products_of_light_edges(operator)
    options = (False, 0.2, 0.0, 0)
    out, stats, _ = simt(operator, graph, *inputs, *options, False)
    grad = normal(*out.shape, dtype=out.dtype, seed=4)
    backward = f"{operator}_backward"
    found = simt(backward, graph, grad, None, None, *inputs, stats, *options)
    wide = (graph, grad.double(), None, None, *widened(inputs), stats.double())
    expected = reference(backward, *wide, *options)
    position = {"gatv2": 1, "gat": 2, "attention": 0}[operator]
    assert_close(found[position], expected[position], torch.float32)


def with_most_weight_in_one_piece(operator: str, offset: float) -> tuple[Graph, Inputs]:
    """Rows that are cut, values ``offset`` from 0, and nearly all weight on the first source."""
    edges = torch.cartesian_prod(torch.arange(3), torch.arange(700)).t().flip(0).contiguous()
    score = torch.full((700, 2), -14.0)
    score[5] = 0.0
    value, key = (normal(700, 2, 12, dtype=torch.float32, seed=seed) for seed in (1, 2))
    dst = normal(3, 2, 12, dtype=torch.float32, seed=3)
    att = torch.full((1, 2, 12), 0.01)
    value += offset
    if operator == "gatv2":
        value[:, :, 0], dst[:, :, 0], att[:, :, 0] = score + 100, 0, 1
    key[:, :, 0], dst[:, :, 0] = score, 1
    inputs: dict[str, Inputs] = {
        "gatv2": [value, dst, att, None, None],
        "gat": [value, score, dst[:, :, 1].abs(), None],
        "attention": [dst, key, value, None],
    }
    return Graph(edges, 700, 3), inputs[operator]


@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("operator", OPERATORS)
def test_pieces_of_which_one_has_most_weight(operator: str, offset: float) -> None:
    """Gradients of scores are as far off as those of torch's operations in float32, times a few."""
    graph, inputs = with_most_weight_in_one_piece(operator, offset)
    options = (False, 0.2 if operator == "gatv2" else 1.0, 0.0, 0)
    out, stats, _ = simt(operator, graph, *inputs, *options, False)
    grad = normal(*out.shape, dtype=out.dtype, seed=4)
    backward = f"{operator}_backward"
    given = (grad, None, None, *inputs, stats)
    found = simt(backward, graph, *given, *options)
    narrow = reference(backward, graph, *given, *options)
    expected = reference(backward, graph, *widened(given), *options)
    for position in {"gatv2": (1, 2), "gat": (1, 2), "attention": (0, 1)}[operator]:
        exact = expected[position]
        error, allowed = ((t[position] - exact).abs().max() for t in (found, narrow))
        assert error <= 4 * allowed + 1e-6 * exact.abs().max()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["random", "isolated", "cut"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_infinities_reach_what_they_reach_on_the_cpu(operator: str, name: str, bad: float) -> None:
    graph = graph_of(name)
    for position in range(4):
        inputs = inputs_of(operator, graph, 2, 8, torch.float32, 3)
        inputs[position].view(-1)[0] = bad  # type: ignore[union-attr]
        given = (graph, *inputs, False, 0.2, 0.0, 0, True)
        found, expected = simt(operator, *given), cpu(operator, *given)
        for a, b in zip(found, expected, strict=True):
            assert_same(a.where(~a.isfinite(), 0), b.where(~b.isfinite(), 0))


@pytest.mark.parametrize("edge_dim", [0, 3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["random", "cut"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_infinite_gradients_reach_what_they_reach_on_the_cpu(
    operator: str, name: str, bad: float, edge_dim: int
) -> None:
    graph = graph_of(name)
    for transpose in (False, True):
        inputs = inputs_of(operator, graph, 2, 8, torch.float32, edge_dim, transpose)
        options = (transpose, 0.2, 0.3, 5)
        out, stats, alpha = cpu(operator, graph, *inputs, *options, True)
        grad, grad_alpha = (normal(*t.shape, dtype=t.dtype) for t in (out, alpha))
        grad.view(-1)[3] = bad
        given = (graph, grad, grad_alpha, None, *inputs, stats, *options)
        backward = f"{operator}_backward"
        for a, b in zip(simt(backward, *given), cpu(backward, *given), strict=True):
            assert (a is None) == (b is None)
            if a is None:
                continue
            assert_same(a.where(~a.isfinite(), 0), b.where(~b.isfinite(), 0))


@pytest.mark.parametrize("width", [1, 4, 8])
def test_infinite_features_of_edges_meet_no_channels_that_are_not_there(width: int) -> None:
    """Of a score that falls to -infinity, and of gradients that do, nothing becomes NaN."""
    graph = graph_of("random")
    shapes = [(12, 1, width), (12, 1, width), (1, 1, width), (40, 1), (1, 1, width)]
    inputs = [normal(*shape, dtype=torch.float32).abs() for shape in shapes]
    options = (False, 0.2, 0.0, 0)
    inputs[2] *= -1
    inputs[3][5] = float("inf")
    given = (graph, *inputs, *options, True)
    for a, b in zip(simt("gatv2", *given), cpu("gatv2", *given), strict=True):
        assert b.isfinite().all()
        torch.testing.assert_close(a, b)
    inputs[3][5] = 1
    out, stats, alpha = cpu("gatv2", *given)
    grad_alpha = torch.zeros_like(alpha)
    grad_alpha[5] = float("inf")
    given = (graph, torch.zeros_like(out), grad_alpha, None, *inputs, stats, *options)
    found, expected = simt("gatv2_backward", *given), cpu("gatv2_backward", *given)
    assert expected[3].isinf().any()
    for a, b in zip(found, expected, strict=True):
        assert_same(a.where(~a.isfinite(), 0), b.where(~b.isfinite(), 0))


def test_more_heads_than_a_grid_takes() -> None:
    graph = graph_of("one_edge")
    inputs = inputs_of("gat", graph, 65_540, 1, torch.float32)
    found = simt("gat", graph, *inputs, False, 0.2, 0.0, 0, False)
    expected = cpu("gat", graph, *inputs, False, 0.2, 0.0, 0, False)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
