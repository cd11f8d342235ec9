"""Running a call through upstream and through fastgraph, and comparing what comes out.

``modules`` compares one call of a module, and ``checking`` every call of a layer while a program
runs. Neither is imported before it is needed.
"""

from __future__ import annotations

import importlib
import sys

from fastgraph import settings
from fastgraph.plugins.hookspecs import hookimpl

_CHECKING = "fastgraph.comparison.checking"


@hookimpl
def fastgraph_switched(active: bool) -> None:
    """Watch all calls under the setting ``compare``."""
    if active and settings.current().compare:
        importlib.import_module(_CHECKING).WATCH.start()
    elif _CHECKING in sys.modules:
        sys.modules[_CHECKING].WATCH.stop()
