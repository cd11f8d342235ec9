"""Bytes that ranks send."""

from __future__ import annotations

import pytest
import torch

from fastgraph.dist.ranks.transport import as_bytes


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((2, 3), (3, 1)),
        ((1, 1), (5, 2)),
        ((3, 1), (1, 2)),
        ((0, 4), (60, 2)),
        ((1, 2, 1), (9, 1, 2)),
    ],
)
def test_contiguous_tensors_of_any_strides(shape: list[int], strides: list[int]) -> None:
    x = torch.empty_strided(shape, strides, dtype=torch.float64)
    x.copy_(torch.randn(shape, dtype=torch.float64))
    assert x.is_contiguous()
    found = as_bytes(x)
    assert found.shape == (len(x), 8 * x.shape[1:].numel())
    assert found.numel() == 0 or found.data_ptr() == x.data_ptr()
    assert found.flatten().tolist() == list(x.clone().numpy().tobytes())
