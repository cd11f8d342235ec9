"""Bytes that ranks send."""

from __future__ import annotations

import pytest
import torch

import fastgraph.dist as fgd
from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.transport import as_bytes
from fastgraph.dist.ranks.world import WORLD
from tests import forks, late_collectives, standin


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


COUNTS = [4, 0, 2]
DTYPES = (torch.float64, torch.bool, torch.int16)
"""Rows are sent as bytes: NCCL knows no int16."""


def _gathered_on_a_device() -> list[object]:
    late_collectives.install()
    found: list[object] = []
    fgd.COUNTS.reset()
    for dtype in DTYPES:
        x = torch.full((3, COUNTS[WORLD.rank]), WORLD.rank + 1, dtype=dtype).to(standin.DEVICE)
        rows = transport.all_gather(x.t(), COUNTS)
        found.append((rows.dtype, standin.on_host(rows).tolist()))
    nothing = transport.all_gather(x.t()[:0], [0, 0, 0])
    kinds = {one.kind for one in late_collectives.ISSUED if one.device == standin.DEVICE}
    return [found, nothing.shape, kinds, fgd.COUNTS.sent["all_gather"]]


def test_parts_of_any_sizes_are_gathered_on_a_device_without_padding() -> None:
    for rank, of_rank in enumerate(forks.on_ranks(_gathered_on_a_device, 3)):
        found, nothing, kinds, sent = of_rank
        for dtype, (found_dtype, rows) in zip(DTYPES, found, strict=True):
            values = torch.repeat_interleave(torch.tensor([1, 2, 3]), torch.tensor(COUNTS))
            assert found_dtype == dtype
            assert rows == values.to(dtype).view(-1, 1).expand(-1, 3).tolist()
        assert nothing == (0, 3)
        assert kinds == {"all_gather"}
        assert sent == 2 * 3 * COUNTS[rank] * sum(dtype.itemsize for dtype in DTYPES)
