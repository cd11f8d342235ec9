"""Comparisons of what is on a device, for which the host never waits.

The device computes 64 bits of each tensor, after what has computed the tensor. They are copied to
the host while the device goes on, and read when another step was taken.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastgraph.dist.ranks.own_device import Later
from fastgraph.dist.tensor.contents import digest_there


class Compared(NamedTuple):
    """A replicated tensor on a device.

    Attributes:
        x: what it held when it met sharded tensors, a copy if rounding may differ; kept until it is
            compared.
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
        # An optimizer may have changed it, or the program, when its digest is read.
        kept = x.clone() if x.is_floating_point() else x
        self._tensors.append(Compared(kept, name, line))
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
