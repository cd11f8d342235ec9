"""fastgraph: fused message passing for PyTorch Geometric and DGL.

Put ``import fastgraph; fastgraph.enable()`` at the top of a training script, or run it with
``python -m fastgraph train.py``.
"""

from __future__ import annotations

import sys

from fastgraph import interpreter as _interpreter

# Before any other import: what lies in the working directory is the program's, not ours.
_module = _interpreter.module_to_run(sys.orig_argv) or ""
if _module.partition(".")[0] == "fastgraph":
    _interpreter.FIRST_ENTRY.remove()

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from fastgraph import settings as _settings

if TYPE_CHECKING:
    from fastgraph.comparison.checking import DivergenceError
    from fastgraph.comparison.modules import compare
    from fastgraph.comparison.result import Comparison
    from fastgraph.enabling import disable, enable, enabled, is_enabled
    from fastgraph.graphs.graph import Graph
    from fastgraph.inspection import explain, is_accelerated
    from fastgraph.profiling.installing import profile
    from fastgraph.profiling.profile import Profile
    from fastgraph.reordering import Reordered, reorder
    from fastgraph.routing.status import FallbackWarning, RouteRefusedError, Status

__all__ = [
    "Comparison",
    "DivergenceError",
    "FallbackWarning",
    "Graph",
    "Profile",
    "Reordered",
    "RouteRefusedError",
    "Status",
    "clear_cache",
    "compare",
    "disable",
    "enable",
    "enabled",
    "explain",
    "is_accelerated",
    "is_enabled",
    "profile",
    "reorder",
    "status",
]

try:
    __version__ = version("fastgraph")
except PackageNotFoundError:  # running from a source tree that was not installed
    __version__ = "0+unknown"

# Everything that needs torch is loaded on first use, so that `python -m fastgraph info` can report
# a missing or broken torch.
_LAZY = {
    "Comparison": "fastgraph.comparison.result",
    "DivergenceError": "fastgraph.comparison.checking",
    "FallbackWarning": "fastgraph.routing.status",
    "Graph": "fastgraph.graphs.graph",
    "Profile": "fastgraph.profiling.profile",
    "Reordered": "fastgraph.reordering",
    "RouteRefusedError": "fastgraph.routing.status",
    "Status": "fastgraph.routing.status",
    "compare": "fastgraph.comparison.modules",
    "disable": "fastgraph.enabling",
    "enable": "fastgraph.enabling",
    "enabled": "fastgraph.enabling",
    "explain": "fastgraph.inspection",
    "is_accelerated": "fastgraph.inspection",
    "is_enabled": "fastgraph.enabling",
    "profile": "fastgraph.profiling.installing",
    "reorder": "fastgraph.reordering",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'fastgraph' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def status() -> Status:
    """Calls seen since the process started: by layer, how many were routed, and why others not.

    Returns:
        The counters of this process, which go on counting; printed, they are a table.
    """
    from fastgraph.routing.status import STATUS

    return STATUS


def clear_cache() -> None:
    """Free all sorted graphs, and the memory of results that is kept for later ones.

    Graphs are sorted anew when they are needed. CUDA graphs that were captured before must not be
    replayed any more.
    """
    from fastgraph.graphs.memo import MEMO
    from fastgraph.graphs.repeats import REPEATS
    from fastgraph.machine.memory import POOL

    MEMO.clear()
    REPEATS.clear()
    POOL.clear()


def load_ipython_extension(_: object) -> None:
    """Enable, for ``%load_ext fastgraph`` in a notebook."""
    importlib.import_module("fastgraph.enabling").enable()


def unload_ipython_extension(_: object) -> None:
    """Disable, for ``%unload_ext fastgraph``."""
    importlib.import_module("fastgraph.enabling").disable()


# `python -m fastgraph` enables by itself, and reports an invalid variable itself.
if _module != "fastgraph" and _settings.Settings.from_environment().enabled:
    importlib.import_module("fastgraph.enabling").enable()
