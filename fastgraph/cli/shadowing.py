"""Modules of the program that have the name of one that was loaded before the program starts."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder

# Ours, which the program uses, and what python has loaded itself before it looks at any path.
_KEPT = ("__main__", "fastgraph", "encodings")


def forget_shadowed(entry: str) -> None:
    """Have the program import its own modules, where we have loaded others of the same name.

    Who has imported one already keeps it.

    Args:
        entry: the first on the program's path, a directory or an archive; empty for the working
            directory.
    """
    shadowed = {name for name in sys.modules if "." not in name and _is_shadowed(name, entry)}
    for name in list(sys.modules):
        if name.partition(".")[0] in shadowed:
            del sys.modules[name]


def _is_shadowed(name: str, entry: str) -> bool:
    # What is frozen or built in comes before any path.
    loaded = getattr(sys.modules[name], "__file__", None)
    frozen = getattr(getattr(sys.modules[name], "__spec__", None), "origin", None) == "frozen"
    if name in _KEPT or loaded is None or frozen:
        return False
    found = PathFinder.find_spec(name, [entry])
    # A directory without __init__.py comes after modules of the whole path.
    if found is None or found.origin is None or found.loader is None:
        return False
    return not (os.path.exists(found.origin) and os.path.samefile(found.origin, loaded))
