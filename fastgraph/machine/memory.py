"""Cache of memory blocks for large results on the CPU, allocated by torch and used again.

The C library returns every large block that is freed, and the system zeroes the pages of the next
one before it hands them out, which can take as long as computing the result. Here the storages of
results are kept, and one that nobody else owns any more becomes that of the next result of its
size. They are torch's own, so that whoever has a result may resize, share or export it; a storage
with which that was done is left to them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch
from torch import Tensor, UntypedStorage

from fastgraph import settings
from fastgraph.machine import native
from fastgraph.machine.forks import lock_across_forks

LARGE = 1 << 23
"""Bytes. Smaller results the C library mostly keeps by itself, so that their pages are there.

Not always, and where results of 2 MiB have the same size at each call a lower bound was faster. But
where sizes change, as those of batches do, nothing is found here that the C library would have had,
and it was slower.
"""

_OWNERS_ARE_COUNTED = getattr(sys, "_is_gil_enabled", lambda: True)()
"""Without its global lock Python leaves some owners out."""


class _Block:
    """A storage, which may be the memory of a result."""

    def __init__(self, num_bytes: int) -> None:
        self.storage = UntypedStorage(num_bytes)
        self.num_bytes = num_bytes
        self._owners_when_idle = self._owners()

    def _owners(self) -> tuple[int, int]:
        """How many owners torch and Python count: tensors, and names of the storage itself.

        The numbers include who asks. What they are when there is nobody else was asked at first.
        """
        return torch._C._storage_Use_Count(self.storage._cdata), sys.getrefcount(self.storage)

    def is_idle(self) -> bool:
        """True if nobody else can read it."""
        return self._owners() == self._owners_when_idle

    def is_as_it_was(self) -> bool:
        """True if it was neither resized nor moved to shared memory."""
        return self.storage.nbytes() == self.num_bytes and not self.storage.is_shared()


class ResultPool:
    """Storages of results, in use and idle, of together at most ``settings.reuse_bytes``."""

    def __init__(self) -> None:
        self._lock = lock_across_forks()
        self._blocks: list[_Block] = []  # the longest unused one first
        self._is_stopped = False

    def take(self, num_bytes: int) -> UntypedStorage | None:
        """A storage of this size that nobody reads; ``None`` if there is no room for one."""
        with self._lock:
            self._blocks = [block for block in self._blocks if block.is_as_it_was()]
            for block in reversed(self._blocks):
                if block.num_bytes == num_bytes and block.is_idle():
                    self._blocks.remove(block)
                    break
            else:
                if not self._make_room(num_bytes):
                    return None
                block = _Block(num_bytes)
            self._blocks.append(block)
            return block.storage

    def forget(self, storage: UntypedStorage) -> None:
        """Leave a storage to those who have it."""
        with self._lock:
            self._blocks = [block for block in self._blocks if block.storage is not storage]

    def trim(self) -> None:
        """Free what is idle until the bound is kept."""
        with self._lock:
            self._make_room(0)

    def clear(self) -> None:
        """Free what is idle, and leave the rest to those who have it."""
        with self._lock:
            self._blocks.clear()

    def stop(self) -> None:
        """Keep nothing any more."""
        self._is_stopped = True
        self.clear()

    def _make_room(self, num_bytes: int) -> bool:
        bound = 0 if self._is_stopped else settings.current().reuse_bytes
        excess = sum(block.num_bytes for block in self._blocks) + num_bytes - bound
        for block in tuple(self._blocks):
            if excess > 0 and block.is_idle():
                self._blocks.remove(block)
                excess -= block.num_bytes
        return excess <= 0


POOL = ResultPool()


def new_rows(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """An empty contiguous tensor on the device of another, and with its dtype unless there is one.

    Large ones on the CPU are in huge pages, if the system has them.
    """
    if dtype is None and like.shape == shape and like.nbytes < LARGE and like.is_contiguous():
        return torch.empty_like(like)  # the usual case, in two thirds of the time
    dtype = dtype or like.dtype
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < LARGE or like.device.type != "cpu" or not native.is_available():
        return like.new_empty(tuple(shape), dtype=dtype)
    storage = POOL.take(num_bytes) if _OWNERS_ARE_COUNTED else None
    if storage is None:
        out = like.new_empty(tuple(shape), dtype=dtype)
    else:
        out = like.new_empty(0, dtype=dtype)
        out.set_(storage, 0, torch.Size(shape))  # type: ignore[call-overload]  # not in the stubs
        # A lazy copy of an older result still reads it.
        if torch._C._is_cow_tensor(out):  # type: ignore[attr-defined]  # not in the stubs
            POOL.forget(storage)
            out = like.new_empty(tuple(shape), dtype=dtype)
    native.library().prefer_huge_pages(out)
    return out


def as_it_is(tensor: Tensor) -> Tensor:
    """A view for a function to keep for its gradient; the tensor itself where none is recorded.

    ``tensor.data = other`` puts other memory behind a tensor, of which torch counts no edit. A view
    has the memory that the forward pass saw, and counts edits in place as the tensor does.
    """
    return tensor.view_as(tensor) if torch.is_grad_enabled() else tensor


def contiguous(x: Tensor) -> Tensor:
    """The tensor, or a copy without gradients in :func:`new_rows` if it is not contiguous."""
    return x if x.is_contiguous() else new_rows(x, x.shape).copy_(x)
