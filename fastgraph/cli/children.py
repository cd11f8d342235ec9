"""Python processes that a program under the runner starts.

Those that are forked are enabled already. Others start a fresh interpreter: what they need is put
into the environment, which most launchers hand on, and which reaches grandchildren and programs
started by a shell, too. Python imports ``startup/sitecustomize.py`` from there.

Processes of multiprocessing are told in another way as well, whatever their environment is, because
they are to be as this one is at that moment.

All of them wait for PyG or DGL: most use neither, and torch may be imported by fastgraph's own
modules, in the midst of which it cannot be enabled.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wrapt import register_post_import_hook

from fastgraph.dgl import fix_import
from fastgraph.settings import Settings
from fastgraph.upstream import PACKAGES

STARTUP = str(Path(__file__).absolute().parent / "startup")
"""The directory that python processes are to find on ``PYTHONPATH``."""


class _Inheritance:
    """The decision to enable this process, or not, as soon as PyG or DGL is imported.

    Attributes:
        decided: whether somebody has said so, or that it is not.
    """

    def __init__(self) -> None:
        self.decided = False
        self._pending = False

    def decide(self, enabled: bool) -> None:
        """Enable now if PyG or DGL is here, else when one comes; or disable."""
        self.decided = True
        self._pending = enabled
        if enabled:
            fix_import()  # an import that fails calls nobody back
            # Calls back at once if it is imported already.
            for package in PACKAGES:
                register_post_import_hook(self._enable, package)
        elif _routing() is not None:  # it was imported before a server forked this process
            _routing().disable()

    def _enable(self, _: Any) -> None:
        import fastgraph

        if self._pending and not fastgraph.is_enabled():  # else with the program's own arguments
            fastgraph.enable()
        self._pending = False

    def is_enabled(self) -> bool:
        """True if routes are in place, or will be once PyG or DGL is imported."""
        return self._pending or (_routing() is not None and _routing().is_enabled())


def _routing() -> Any:
    """The module that knows, or ``None`` where it was not needed yet: it imports torch."""
    return sys.modules.get("fastgraph.enabling")


_INHERITANCE = _Inheritance()


def enable_in_children(variables: Mapping[str, str]) -> None:
    """Have processes started from now on, and theirs, enable fastgraph with PyG or DGL.

    Args:
        variables: environment variables with the arguments of ``fastgraph.enable()``.
    """
    _INHERITANCE.decided = True
    os.environ.update(variables)
    path = os.environ.get("PYTHONPATH", "")
    if STARTUP not in path.split(os.pathsep):
        os.environ["PYTHONPATH"] = f"{STARTUP}{os.pathsep}{path}" if path else STARTUP
    _tell_spawned()


def enable_with_upstream() -> None:
    """Called in a process that inherits the environment, before it imports PyG or DGL.

    Does nothing under ``FASTGRAPH=0``, or where multiprocessing has brought another decision.
    """
    if Settings.from_environment().enabled is not False and not _INHERITANCE.decided:
        _prepare(True)


@functools.cache  # once
def _tell_spawned() -> None:
    """Tell processes of multiprocessing's spawn and forkserver whether they are to be enabled."""
    from multiprocessing import spawn

    upstream = spawn.get_preparation_data

    @functools.wraps(upstream)
    def get_preparation_data(name: str) -> dict[str, Any]:
        data = upstream(name)
        # A child loads this before it imports the program, and ignores keys it does not know.
        data["fastgraph"] = _Preparation(_INHERITANCE.is_enabled())
        return data

    spawn.get_preparation_data = get_preparation_data


class _Preparation:
    """Loading it, as the child does, calls :func:`_prepare`."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled

    def __reduce__(self) -> tuple[Any, ...]:
        return _prepare, (self._enabled,)


def _prepare(enabled: bool) -> None:
    _INHERITANCE.decide(enabled)
    _tell_spawned()
