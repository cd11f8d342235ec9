"""Facts of the machine on which figures were measured."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import cpuinfo
import psutil
import torch

_PACKAGES = ("torch", "torch_geometric", "torch_scatter", "dgl", "fastgraph", "numpy")
_CACHE_FILES = ("level", "type", "size")


def machine_facts(threads: int) -> dict[str, str]:
    """Hardware, system and versions, as text."""
    cpu = cpuinfo.get_cpu_info()
    cores = psutil.cpu_count(logical=False) or "?"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "CPU": f"{cpu.get('brand_raw', platform.processor())} ({_family(cpu)})",
        "cores": f"{cores} ({psutil.cpu_count()} logical), load {os.getloadavg()[0]:.1f} at start",
        "caches": _caches(),
        "vector level": torch.backends.cpu.get_cpu_capability(),
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "compiler": _first_line("g++", "--version"),
        "python": platform.python_version(),
        **{package: _version(package) for package in _PACKAGES},
        "commit": _first_line("git", "describe", "--always", "--dirty"),
        "threads": str(threads),
    }


def limit_memory(share: float = 0.8) -> None:
    """Let this process have so much of the memory that is free now.

    What needs more ends in an error of its own, not in that of other programs.
    """
    used = psutil.Process().memory_info().data
    limit = used + int(share * psutil.virtual_memory().available)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _family(cpu: dict[str, object]) -> str:
    return " ".join(f"{key} {cpu[key]}" for key in ("family", "model", "stepping") if key in cpu)


def _caches() -> str:
    """Sizes as the kernel reports them for the first core; py-cpuinfo gets L3 wrong on some."""
    found = []
    for cache in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((cache / name).read_text().strip() for name in _CACHE_FILES)
        if kind != "Instruction":
            found.append(f"L{level} {size}")
    return ", ".join(found) or "unknown"


def _version(package: str) -> str:
    if package == "fastgraph":
        import fastgraph

        return fastgraph.__version__
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _first_line(*command: str) -> str:
    folder = os.path.dirname(__file__)
    try:
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "unknown"
    return result.stdout.splitlines()[0].strip()
