"""Results so large that the CPU kernels write them past the caches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastgraph import ops

HEADS, CHANNELS = 4, 16
LARGE = 1 << 24  # bytes; kLarge of csrc/include/fastgraph/result.h


def _gat(x: Tensor, att: Tensor, index: Tensor) -> Tensor:
    src, dst = ops.head_scores(x, att).unbind(0)
    return ops.gat(x, src, dst, index)[0]


OPERATORS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "spmm": lambda x, att, index: ops.spmm(x, index),
    "segment_reduce": lambda x, att, index: ops.segment_reduce(x, index),
    "segment_reduce winner": lambda x, att, index: ops.segment_reduce(x, index, ties="winner"),
    "gatv2": lambda x, att, index: ops.gatv2(x, x, att[:1], index)[0],
    "gat": _gat,
    "attention": lambda x, att, index: ops.attention(x, x, x, index)[0],
}


TOLERANCES = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.float64: {"rtol": 1e-12, "atol": 1e-13},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_they_equal_the_same_heads_computed_apart(name: str, dtype: torch.dtype) -> None:
    nodes = LARGE // (HEADS * CHANNELS * dtype.itemsize) + 1
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(nodes, (2, 2 * nodes), generator=generator)
    index[1, :5000] = 7  # a row that is cut into pieces
    x, grad = (torch.randn(nodes, HEADS, CHANNELS, generator=generator).to(dtype) for _ in "xg")
    att = torch.randn(2, HEADS, CHANNELS, generator=generator).to(dtype)

    def run(heads: slice) -> tuple[Tensor, Tensor]:
        own = x[:, heads].clone().requires_grad_()
        out = OPERATORS[name](own, att[:, heads].contiguous(), index)
        return out.detach(), torch.autograd.grad(out, own, grad[:, heads].contiguous())[0]

    whole = run(slice(None))
    assert whole[0].nbytes >= LARGE
    halves = zip(run(slice(HEADS // 2)), run(slice(HEADS // 2, None)), strict=True)
    for ours, parts in zip(whole, halves, strict=True):
        # Heads that are computed apart stand in other lanes, whose sums are rounded otherwise.
        torch.testing.assert_close(ours, torch.cat(parts, dim=1), **TOLERANCES[dtype])
