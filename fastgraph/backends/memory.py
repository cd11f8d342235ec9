"""Memory for large results on the CPU, which is used again when they are freed.

The C library returns every large block that is freed, and the system zeroes the pages of the next
one before it hands them out: for a result of 100 MB this takes about as long as computing it. Here
blocks wait for the next result of their size instead. A tensor holds its block through its storage
alone, so the block is free when torch frees the storage, in whichever thread that is.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from fastgraph import settings

# Smaller blocks the C library keeps by itself. It would keep those of up to 32 MiB, but returns
# what lies at the end of its heap: backward passes with results of 31 MiB took twice as long.
_SMALLEST = 1 << 23


class BlockPool:
    """Blocks of private memory, at most ``settings.reuse_bytes`` of which wait to be used again.

    Blocks are rounded up to one of eight sizes between two powers of two, so that results of
    mini-batches, whose sizes vary a little, can share them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[mmap.mmap] = []  # the longest unused one first
        # Blocks come back in the middle of anything, even of a method of this class, so nothing
        # may be waited for then.
        self._returned: deque[mmap.mmap] = deque()

    def take(self, num_bytes: int) -> memoryview:
        """A view of a block of at least ``num_bytes``, which comes back when the view is freed."""
        size = _block_size(num_bytes)
        with self._lock:
            self._collect()
            block = next((b for b in reversed(self._idle) if len(b) == size), None)
            if block is not None:
                self._idle.remove(block)
        if block is None:
            block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):  # a kernel without huge pages
                block.madvise(mmap.MADV_HUGEPAGE)
        view = memoryview(block)
        weakref.finalize(view, self._give_back, block).atexit = False
        return view

    def clear(self) -> None:
        """Return the waiting blocks to the system."""
        with self._lock:
            self._collect()
            self._idle.clear()

    @property
    def idle_bytes(self) -> int:
        """How much memory waits."""
        with self._lock:
            self._collect()
            return sum(map(len, self._idle))

    def _give_back(self, block: mmap.mmap) -> None:
        self._returned.append(block)
        if self._lock.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._lock.release()

    def _collect(self) -> None:
        while self._returned:
            self._idle.append(self._returned.popleft())
        excess = sum(map(len, self._idle)) - settings.current().reuse_bytes
        while excess > 0:
            excess -= len(self._idle.pop(0))


def _block_size(num_bytes: int) -> int:
    step = max(1 << max(num_bytes.bit_length() - 4, 0), mmap.PAGESIZE)
    return -(-num_bytes // step) * step


POOL = BlockPool()


def is_large(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> bool:
    """Whether :func:`empty` would take a tensor from the pool."""
    itemsize = (like.dtype if dtype is None else dtype).itemsize
    return like.device.type == "cpu" and math.prod(shape) * itemsize >= _SMALLEST


def empty(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised contiguous tensor on the device of ``like``, by default of its dtype."""
    dtype = like.dtype if dtype is None else dtype
    if not is_large(like, shape, dtype):
        return like.new_empty(shape, dtype=dtype)
    numel = math.prod(shape)
    block = torch.frombuffer(POOL.take(numel * dtype.itemsize), dtype=dtype, count=numel)
    # Not a view, which autograd would refuse to change in place, nor made from a storage object of
    # Python's, which would count as a second owner: gradients are added up in place for one owner.
    fresh = like.new_empty(0, dtype=dtype)
    fresh.set_(block.view(torch.Size(shape)))  # type: ignore[call-overload]  # missing in the stubs
    return fresh
