"""The CUDA head_scores, executed by the emulator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastgraph.plugins.backend import FLOATING
from tests.native.cases import assert_close, normal
from tests.simt.compared import (
    WIDTHS,
    assert_same,
    assert_same_in_every_order,
    cpu,
    irregular,
    misaligned,
    simt,
)

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def inputs(
    nodes: int, count: int, heads: int, width: int, dtype: torch.dtype = torch.float32
) -> Inputs:
    """x, att, the gradient of the scores and another part of that of x."""
    return (
        normal(nodes, heads, width, dtype=dtype),
        normal(count, heads, width, dtype=dtype, seed=1),
        normal(count, nodes, heads, dtype=dtype, seed=2),
        normal(nodes, heads, width, dtype=dtype, seed=3),
    )


def results(
    kernels: object, x: Tensor, att: Tensor, grad: Tensor, addend: Tensor
) -> tuple[Tensor, ...]:
    assert callable(kernels)
    backward = kernels("head_scores_backward", x, att, grad)
    with_addend = kernels("head_scores_backward", x, att, grad, addend=addend)
    return kernels("head_scores", x, att), *backward, *with_addend


def check(tensors: Inputs) -> None:
    wide = [tensor.double() for tensor in tensors]
    expected = results(cpu, *wide)
    magnitudes = results(cpu, *(tensor.abs() for tensor in wide))
    for ours, theirs, magnitude in zip(results(simt, *tensors), expected, magnitudes, strict=True):
        assert_close(ours, theirs, magnitude)


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("width", [*WIDTHS, 3, 12, 24])
def test_every_layout(width: int, dtype: torch.dtype) -> None:
    check(inputs(9, 2, 3, width, dtype))
    check(inputs(101, 3, 1, width, dtype))


@pytest.mark.parametrize("position", range(4))
def test_memory_that_is_not_aligned(position: int) -> None:
    x, att, grad, addend = inputs(9, 2, 3, 64)
    given = [x, att, grad, addend]
    given[position] = misaligned(given[position])
    x, att, grad, addend = given
    check((x, att, grad, addend))


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (5, 0, 3, 8), (5, 2, 0, 8), (1, 1, 1, 1)])
def test_every_size_may_be_zero(shape: tuple[int, int, int, int]) -> None:
    check(inputs(*shape))


def test_so_many_heads_that_groups_sum_more_nodes() -> None:
    check(inputs(150, 1, 3000, 2))


@pytest.mark.parametrize("width", [33, 64])
def test_bits_do_not_depend_on_the_order_of_threads(width: int) -> None:
    x, att, grad, _ = inputs(130, 2, 2, width)
    assert_same_in_every_order("head_scores", x, att)
    assert_same_in_every_order("head_scores_backward", x, att, grad)


@pytest.mark.parametrize("width", [5, 8])
def test_infinities_reach_what_they_reach_on_the_cpu(width: int) -> None:
    tensors = inputs(50, 2, 3, width)
    for position, tensor in enumerate(tensors):
        given = list(tensors)
        given[position] = irregular(*tensor.shape, dtype=tensor.dtype)
        for ours, theirs in zip(results(simt, *given), results(cpu, *given), strict=True):
            assert_same(ours.where(~ours.isfinite(), 0), theirs.where(~theirs.isfinite(), 0))
