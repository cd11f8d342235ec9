"""The modules of the benchmarks, which are no package that could be installed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "benchmarks"


def measure(name: str) -> Any:
    """A module of ``benchmarks/measure``."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(f"measure.{name}")
