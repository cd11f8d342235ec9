"""Settings of the C library's allocator: when freed memory goes back to the system."""

from __future__ import annotations

import ctypes
import os

from fastgraph.machine.memory import POOL

_M_MMAP_THRESHOLD = -3  # of <malloc.h>
_SIZE = 2**20
_VARIABLE, _TUNABLE = "MALLOC_MMAP_THRESHOLD_", "glibc.malloc.mmap_threshold"


def return_freed_memory() -> bool:
    """Have blocks from 1 MiB on go back to the system when they are freed, in this process.

    glibc maps blocks above a threshold one by one, but raises the threshold to the size of each
    that is freed, up to 32 MiB (mallopt(3)). What is smaller is cut out of a heap, which shrinks at
    its end only: large tensors of one process go back, while those of a rank, which has a share of
    their rows, stay. So the threshold is fixed. In return, pages of such blocks are new to the
    process each time. Results of kernels are kept for others no more, see
    :mod:`fastgraph.machine.memory`.

    Returns:
        Whether the threshold was fixed: the C library is glibc, and nobody has set the threshold by
        ``MALLOC_MMAP_THRESHOLD_`` or ``GLIBC_TUNABLES``.
    """
    POOL.stop()
    if _VARIABLE in os.environ or _TUNABLE in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, _SIZE))
