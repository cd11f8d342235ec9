"""How much memory this process may have, and tensors whose pages are in files."""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor

_GROUPS = Path("/sys/fs/cgroup")


def usable_memory(groups: Path = _GROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes: those of the machine, or of the control group if it has a lower limit.

    Args:
        groups: where control groups are mounted, of version 1 or 2.
        own: the file with the groups of this process.
    """
    least = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        lines = own.read_text().splitlines()
    except OSError:  # another system than Linux, or a sandbox
        return least
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, name = groups, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = groups / "memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may be that outside of it: then the root is the container's.
        inner = root / path.lstrip("/")
        for folder in (inner, *inner.parents):
            if folder.is_relative_to(root):
                least = min(least, _limit(folder / name, least))
    return least


def _limit(file: Path, otherwise: int) -> int:
    try:
        text = file.read_text().strip()
    except OSError:  # the root has none
        return otherwise
    return int(text) if text.isdecimal() else otherwise


def is_of_file(values: Tensor) -> bool:
    """True if a tensor begins in memory that is mapped from a file."""
    address = values.data_ptr()
    try:
        with Path("/proc/self/maps").open() as lines:
            for line in lines:
                area, _, _, _, inode = line.split(maxsplit=5)[:5]
                begin, end = (int(part, 16) for part in area.split("-"))
                if begin <= address < end:
                    return inode != "0"
    except OSError:  # another system than Linux
        return False
    return False


def is_elsewhere(*values: Tensor) -> bool:
    """True if tensors are in files, and too large to be held in memory with what else there is."""
    size = sum(one.nbytes for one in values)
    return size > usable_memory() // 2 and any(is_of_file(one) for one in values)
