"""The checksum by which edits are noticed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

SIZES = [0, 1, 2, 15, 16, 17, 31, 1023, 1024, 1025, 2048, 9000, 70_001]
DTYPES = [torch.int64, torch.int32, torch.float32, torch.float64, torch.bfloat16, torch.bool]


def _numbers(size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.randint(0, 2 if dtype == torch.bool else 100, (size,), generator=generator).to(
        dtype
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_strides_and_alignment_make_no_difference(lib: Any, size: int, dtype: torch.dtype) -> None:
    plain = _numbers(size, dtype)
    expected = lib.checksum(plain)
    assert lib.checksum(plain.clone()) == expected
    shifted = torch.cat([plain[:1], plain])[1:]  # one element off in memory
    spread = torch.stack([plain, ~plain if dtype == torch.bool else plain + 1], dim=1)[:, 0]
    assert lib.checksum(shifted) == lib.checksum(spread) == expected
    matrix = torch.stack([plain, plain.flip(0)])
    wide = torch.cat([matrix, matrix[:, :1]], dim=1)[:, :size]
    turned = matrix.t().contiguous().t()
    found = {lib.checksum(m) for m in (matrix, wide, turned)}
    assert len(found) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 17, 1025, 9000])
def test_every_element_counts(lib: Any, size: int, dtype: torch.dtype) -> None:
    numbers = _numbers(size, dtype)
    found = {lib.checksum(numbers)}
    places = range(size) if size < 2000 else range(0, size, 7)
    for place in places:
        edited = numbers.clone()
        edited[place] = ~edited[place] if dtype == torch.bool else edited[place] + 1
        found.add(lib.checksum(edited))
    assert len(found) == len(places) + 1


def test_every_bit_counts(lib: Any) -> None:
    numbers = torch.zeros(3000, dtype=torch.int64)
    found = {lib.checksum(numbers)}
    for place in (0, 1, 15, 1023, 1024, 2999):
        for bit in range(64):
            numbers[place] = 1 << bit if bit < 63 else -(1 << 63)
            found.add(lib.checksum(numbers))
            numbers[place] = 0
    assert len(found) == 6 * 64 + 1


def test_lengths_and_shapes_count(lib: Any) -> None:
    zeros = [torch.zeros(size, dtype=torch.int64) for size in (0, 1, 2, 16, 17, 1024, 1025)]
    matrices = [torch.zeros(2, size, dtype=torch.int64) for size in (0, 1, 8, 16)]
    assert len({lib.checksum(t) for t in (*zeros, *matrices)}) == len(zeros) + len(matrices)


def test_edits_that_make_up_for_each_other(lib: Any) -> None:
    """Sums, sums of prefixes and second differences stay the same under some of these."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 50, (2, 300), generator=generator)
    found, edits = {lib.checksum(numbers)}, 0
    for row in range(2):
        for place in range(290):
            for places, changes in (
                ((0, 1), (1, -1)),
                ((0, 1, 2), (1, -2, 1)),
                ((0, 1, 2, 3), (1, -3, 3, -1)),
                ((0, 4), (1, -1)),
                ((0, 4, 8), (1, -2, 1)),
            ):
                edited = numbers.clone()
                for step, change in zip(places, changes, strict=True):
                    edited[row, place + step] += change
                found.add(lib.checksum(edited))
                edits += 1
    for first in range(0, 300, 3):  # edges that change places
        for second in range(first + 1, 300, 7):
            edited = numbers.clone()
            edited[:, [first, second]] = numbers[:, [second, first]]
            if not torch.equal(edited, numbers):
                found.add(lib.checksum(edited))
                edits += 1
    found.add(lib.checksum(numbers.flip(0)))
    found.add(lib.checksum(numbers.flip(1)))
    assert edits > 4000 and len(found) == edits + 3


def test_threads_make_no_difference(lib: Any) -> None:
    numbers = torch.randint(0, 1000, (2, 300_000))
    torch.set_num_threads(1)
    expected = lib.checksum(numbers)
    torch.set_num_threads(4)
    assert {lib.checksum(numbers) for _ in range(20)} == {expected}


@pytest.mark.parametrize(
    ("tensor", "error", "text"),
    [
        (torch.zeros(2, 2, 2), ValueError, r"1 or 2 dimensions, got shape \[2, 2, 2\]"),
        (torch.zeros(()), ValueError, r"1 or 2 dimensions, got shape \[\]"),
        (torch.zeros(3, dtype=torch.complex128), TypeError, "1, 2, 4 or 8 bytes, got complex128"),
    ],
)
def test_bad_input(lib: Any, tensor: Tensor, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        lib.checksum(tensor)
