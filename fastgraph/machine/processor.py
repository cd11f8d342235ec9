"""The processor, as the operating system describes it."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def cpu_model() -> str:
    """The name of the processor."""
    return cpuinfo("model name") or platform.processor() or platform.machine()


def cpuinfo(key: str) -> str:
    """The value of a key for the first processor; empty where the system gives none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def second_cache() -> int:
    """The bytes of the second cache of a core; 0 where the system does not say."""
    name = "SC_LEVEL2_CACHE_SIZE"
    return max(os.sysconf(name), 0) if name in os.sysconf_names else 0
