"""Resident memory of this process, as the Linux kernel counts it. Imports no torch."""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path
from typing import Literal

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def resident(field: Literal["VmRSS", "VmHWM"] = "VmRSS") -> int | None:
    """Bytes resident now (``VmRSS``) or at most (``VmHWM``); ``None`` where nobody counts them."""
    if not _STATUS.exists():
        return None
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None


def restart_peak() -> bool:
    """Let ``VmHWM`` start again from what is resident now; whether this system allows that."""
    try:
        _CLEAR.write_text("5")
    except OSError:  # not on every system, nor in every container
        return False
    return True


def release_freed() -> None:
    """Give memory that is free but still held back to the system."""
    gc.collect()
    memory = sys.modules.get("fastgraph.machine.memory")  # importing it would import torch
    if memory is not None:
        memory.POOL.clear()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc only
        libc.malloc_trim(0)
