"""Identities that hold for every graph, on random ones."""

from __future__ import annotations

import hypothesis.strategies as st
import torch
from hypothesis import given, settings
from torch import Tensor

from fastgraph import ops
from fastgraph.registry.registry import REGISTRY
from tests.graphs import random_edges


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, int]:
    """Features, edges, weights and the number of destinations of a small bipartite graph."""
    num_src, num_dst = draw(st.integers(1, 30)), draw(st.integers(1, 30))
    num_edges, width = draw(st.integers(0, 200)), draw(st.integers(0, 70))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_src, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(num_edges, generator=generator, dtype=torch.float64)
    return x, random_edges(num_src, num_dst, num_edges, seed), weight, num_dst


@settings(max_examples=60, deadline=None)
@given(problems())
def test_spmm_is_a_matrix_product_and_its_transpose_the_adjoint(
    problem: tuple[Tensor, Tensor, Tensor, int],
) -> None:
    x, edges, weight, num_dst = problem
    matrix = torch.zeros(num_dst, x.shape[0], dtype=torch.float64)
    matrix.index_put_((edges[1], edges[0]), weight, accumulate=True)
    y = torch.randn(num_dst, x.shape[1], dtype=torch.float64)
    torch.testing.assert_close(ops.spmm(x, edges, weight, num_out=num_dst), matrix @ x)
    adjoint = ops.spmm(y, edges, weight, num_out=x.shape[0], transpose=True)
    torch.testing.assert_close(adjoint, matrix.t() @ y)


@settings(max_examples=60, deadline=None)
@given(problems(), st.sampled_from(["max", "min"]), st.sampled_from(["split", "winner"]))
def test_backends_agree_and_gradients_are_conserved(
    problem: tuple[Tensor, Tensor, Tensor, int], reduce: str, ties: str
) -> None:
    x, edges, _, num_dst = problem
    x = x.round().requires_grad_()  # many ties
    results = []
    for backend in ("cpu", "reference"):
        REGISTRY.select(backend)
        out = ops.segment_reduce(x, edges, num_out=num_dst, reduce=reduce, ties=ties)
        (grad,) = torch.autograd.grad(out.sum(), x)
        results.append((out.detach(), grad))
    REGISTRY.select(None)
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=0)
    if ties == "split":
        torch.testing.assert_close(results[0][1], results[1][1])
    # What a node hands down is its own gradient, less the share of the initial zero.
    degree = torch.bincount(edges[1], minlength=num_dst).unsqueeze(-1)
    attained = (x.detach()[edges[0]] == out.detach()[edges[1]]).double()
    shares = torch.zeros_like(out).index_add(0, edges[1], attained)
    kept = shares / (shares + (out == 0)) if ties == "split" else torch.ones_like(out)
    expected = torch.where(degree > 0, kept, 0.0).sum()
    for _, grad in results:
        torch.testing.assert_close(grad.sum(), expected.detach())


@settings(max_examples=30, deadline=None)
@given(problems())
def test_the_order_of_edges_does_not_matter(
    problem: tuple[Tensor, Tensor, Tensor, int],
) -> None:
    x, edges, weight, num_dst = problem
    order = torch.randperm(edges.shape[1])
    shuffled = edges[:, order].contiguous()
    torch.testing.assert_close(
        ops.spmm(x, shuffled, weight[order], num_out=num_dst, reduce="mean"),
        ops.spmm(x, edges, weight, num_out=num_dst, reduce="mean"),
    )
    torch.testing.assert_close(
        ops.segment_reduce(x, shuffled, num_out=num_dst),
        ops.segment_reduce(x, edges, num_out=num_dst),
        rtol=0,
        atol=0,
    )
