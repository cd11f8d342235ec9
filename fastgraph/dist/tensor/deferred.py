"""Comparisons of what is on a device, for which the host never waits.

The device computes 63 bits of each tensor, after what has computed the tensor. They are copied to
the host while the device goes on, and read when another step was taken.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from fastgraph.dist.ranks.own_device import Later
from fastgraph.dist.tensor.memo import flat

_ELEMENTS_AT_ONCE = 2**22
"""Of which the digest makes numbers of 8 bytes at a time."""

_GOLDEN = -7046029254386353131
"""The odd number next to 2^64 by the golden ratio, which spreads positions over all bits."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element."""


class Compared(NamedTuple):
    """A replicated tensor on a device.

    Attributes:
        x: itself, held until it is compared.
        name: in the program.
        line: of the program where it met sharded tensors.
    """

    x: Tensor
    name: str
    line: str


class Deferred:
    """The tensors of one step whose digests have not been compared yet; alike on all ranks."""

    def __init__(self) -> None:
        self._tensors: list[Compared] = []
        self._digests: list[Tensor] = []
        self._sent: Later | None = None

    def add(self, x: Tensor, name: str, line: str) -> None:
        """Have the device compute the digest of what a tensor holds now."""
        self._tensors.append(Compared(x, name, line))
        self._digests.append(digest_there(x))

    def send(self) -> None:
        """Have the digests go to the host, at the end of the step."""
        if self._digests:
            self._sent = Later(torch.stack(self._digests))
            self._digests.clear()

    def read(self) -> list[tuple[int, Compared]]:
        """The digests that have gone to the host, once; none where none have."""
        if self._sent is None:
            return []
        digests, self._sent = self._sent.read().tolist(), None
        found = list(zip(digests, self._tensors, strict=True))
        self._tensors = []
        return found


def digest_there(x: Tensor) -> Tensor:
    """63 bits of a tensor, int64 of no dimension on its device; of a sparse one those of its kind.

    A sum of its elements' bits, each times an odd number by its position, modulo 2^64: no order of
    summation changes it.
    """
    total = x.new_full((), kind_of(x), dtype=torch.int64)
    if x.layout != torch.strided or not x.numel():
        return total
    whole = flat(x).contiguous().view(-1)
    words = whole.view(_WORDS[whole.element_size()])
    for start in range(0, len(words), _ELEMENTS_AT_ONCE):
        part = words[start : start + _ELEMENTS_AT_ONCE].long()
        places = torch.arange(start, start + len(part), device=x.device)
        total += (part * (places.mul_(_GOLDEN) | 1)).sum()
    return total.bitwise_and_(2**63 - 1)


def kind_of(x: Tensor) -> int:
    """32 bits of its shape, dtype and layout."""
    return zlib.crc32(repr((list(x.shape), x.dtype, x.layout)).encode())
