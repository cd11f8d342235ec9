"""The content of tensors in a few bits, by which it is told whether it is what it was."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from fastgraph.dist.ranks.own_device import Later
from fastgraph.graphs.splitmix64 import GOLDEN, mixed
from fastgraph.graphs.witness import StaleGraphError

_ELEMENTS_AT_ONCE = 2**22
"""Of which the digest makes numbers of 8 bytes at a time."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element."""


def flat(tensor: Tensor) -> Tensor:
    """A tensor of one or two dimensions with all elements, as checksums are taken of these."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor if 1 <= tensor.dim() <= 2 else tensor.reshape(-1)


def kind_of(x: Tensor) -> int:
    """32 bits of its shape, dtype and layout."""
    return zlib.crc32(repr((list(x.shape), x.dtype, x.layout)).encode())


def digest_there(x: Tensor) -> Tensor:
    """64 bits of a tensor, int64 of no dimension on its device; of a sparse one those of its kind.

    A sum of its elements' bits, each mixed with its position so that every bit of both changes half
    of the 64, modulo 2^64: no order of summation changes it. A sum of products alone would have
    equal ones for whole families: bits 0 and 6 of a mask weigh as much as 2 and 4, and a sign is
    the top bit, which a product leaves where it is. Tensors of one shape and dtype that
    differ have equal ones by chance alone, once in 2^64; nobody is kept from searching for a pair.
    """
    total = x.new_full((), kind_of(x), dtype=torch.int64)
    if x.layout != torch.strided or not x.numel():
        return total
    whole = flat(x).contiguous().view(-1)
    words = whole.view(_WORDS[whole.element_size()])
    for start in range(0, len(words), _ELEMENTS_AT_ONCE):
        part = words[start : start + _ELEMENTS_AT_ONCE]
        places = torch.arange(start, start + len(part), device=x.device)
        total += mixed(places.mul_(GOLDEN).bitwise_xor_(part.long())).sum()
    return total


class IndexOnDevice:
    """A fingerprint of an index or mask on a device, for which the host does not wait.

    The device compares, and the host says yes. Where that was wrong, a later question raises, as
    soon as the device has told: torch counts all edits of an index but those through ``.data`` and
    by other libraries. One comparison is on its way at a time: what is asked meanwhile is not
    compared, and what only the last one finds is never told.

    Args:
        tensor: of integers or booleans.
    """

    nbytes = 0
    bits = None

    def __init__(self, tensor: Tensor) -> None:
        self._expected = digest_there(tensor)
        self._changed: Later | None = None
        self._is_stale = False

    def confirms(self, tensors: Sequence[Tensor]) -> bool:
        """Always, for now; not any more when it has raised.

        Raises:
            StaleGraphError: not so, as is known by now.
        """
        if self._is_stale:
            return False
        if self._changed is not None and self._changed.is_there():
            if bool(self._changed.read()):
                self._is_stale = True
                raise StaleGraphError(
                    "a replicated index or mask on a device was changed where torch does not "
                    "count it (through .data, by another library, ...) after rows were selected "
                    "by it; what was selected since then is by its values before. Edit it by an "
                    "operation of torch, or make another one"
                )
            self._changed = None
        if self._changed is None:
            (tensor,) = tensors
            self._changed = Later(digest_there(tensor) != self._expected)
        return True
