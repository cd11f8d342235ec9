"""Functions of users on features of half types, judged in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgraph
from tests.dgl.user_functions import APPLY, CHANNELS, UPDATE, Functions, reason_of, square_graph

import dgl.function as fn  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore:The input graph for the user-defined")

HALVES = [torch.bfloat16, torch.float16]

FUNCTIONS = {
    "sums": ("gated", "summed"),
    "attention": ("scored", "attended"),
    "features of nodes": ("gated", "with_data"),
    "features of edges": ("gated", None),
    "a number of each edge": ("one_number", None),
}


def results(layer: Any, given: list[Tensor]) -> list[Tensor]:
    """The results of the functions, and all gradients."""
    leaves = [tensor.clone().requires_grad_() for tensor in given]
    outs = layer(square_graph(), *leaves)
    weights = [torch.linspace(0, 1, out.numel(), dtype=torch.float64) for out in outs]
    loss: Any = sum(
        (out * weight.view(out.shape).to(out.dtype)).sum()
        for out, weight in zip(outs, weights, strict=True)
    )
    grads = torch.autograd.grad(loss, [*leaves, *layer.parameters()], allow_unused=True)
    return [*outs, *(grad for grad in grads if grad is not None)]


def features(dtype: torch.dtype) -> list[Tensor]:
    shapes = (20, CHANNELS), (20, CHANNELS), (120, CHANNELS)
    return [torch.rand(shape).sub(0.4).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_errors_are_upstreams(name: str, dtype: torch.dtype) -> None:
    layer, given = Functions(*FUNCTIONS[name]).to(dtype), features(dtype)
    exact = results(copy.deepcopy(layer).double(), [tensor.double() for tensor in given])
    upstream = results(layer, given)
    fastgraph.status().reset()
    with fastgraph.enabled(min_edges=0):
        ours = results(layer, given)
    row = fastgraph.status().row(APPLY if FUNCTIONS[name][1] is None else UPDATE)
    assert (row.programs, dict(row.reasons)) == (1, {})
    for a, b, truth in zip(ours, upstream, exact, strict=True):
        assert a.dtype == b.dtype == dtype
        error, own_error = (float((x - truth).abs().max().detach()) for x in (a, b))
        # Either may happen to round a value to its neighbour.
        assert error <= own_error + torch.finfo(dtype).eps * (1 + float(truth.abs().max().detach()))


@pytest.mark.parametrize("dtype", HALVES)
def test_what_half_types_would_round_is_left_to_upstream(dtype: torch.dtype) -> None:
    """Numbers of edges, and places of edges by which one of equal extrema wins."""
    given = features(dtype)

    def result(message: str, reduce: Any) -> Tensor:
        torch.manual_seed(2)
        layer = Functions(message, reduce).to(dtype)
        return torch.cat([out.flatten() for out in layer(square_graph(), *given)])

    assert "in-degree" in reason_of(lambda: result("gated", "combined"))
    given = [tensor.requires_grad_() for tensor in given]
    assert "an extremum of a half type" in reason_of(lambda: result("tied", "extrema"))


def test_sums_of_dgl() -> None:
    """In float16, too, in which DGL computes none on the CPU."""
    for dtype in HALVES:
        layer, given = Functions("gated", fn.mean("m", "out")).to(dtype), features(dtype)
        (exact,) = copy.deepcopy(layer).double()(square_graph(), *(t.double() for t in given))
        with fastgraph.enabled(min_edges=0):
            (out,) = layer(square_graph(), *given)
        assert fastgraph.status().row(UPDATE).programs == 1
        torch.testing.assert_close(out, exact.to(dtype), rtol=0.01, atol=0.01)
        fastgraph.status().reset()
