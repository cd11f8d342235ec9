"""The switch that puts routes in place, one for the whole process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from wrapt import register_post_import_hook

from fastgraph.machine.forks import lock_across_forks
from fastgraph.plugins.hookspecs import plugin_manager
from fastgraph.plugins.patching import Patches


class Switch:
    """The state of fastgraph, enabled or not, and the patches in place while it is enabled."""

    def __init__(self) -> None:
        self.active = False
        self._patches = Patches()
        self._installed: set[str] = set()
        self._awaited: set[str] = set()
        self._imported: set[str] = set()
        self._lock = lock_across_forks()

    def turn(self, active: bool) -> None:
        """Install all routes whose upstream is imported, now or later, or restore upstream."""
        with self._lock:
            if active != self.active:
                _reset_dynamo()
            self.active = active
            if active:
                self._install()
            else:
                self._restore()

    @contextmanager
    def upstream(self) -> Iterator[None]:
        """Put upstream's own code back for a moment, to measure it beside ours."""
        with self._lock:
            self._restore()
            try:
                yield
            finally:
                if self.active:
                    self._install()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """:meth:`upstream`, at a hundredth of the time.

        Classes of layers that are used in the block for the first time keep upstream's own code.
        """
        with self._lock, self._patches.suspended():
            yield

    def _install(self) -> None:
        for routes in plugin_manager().hook.fastgraph_routes():
            for route in routes:
                if route.module not in self._awaited:
                    self._awaited.add(route.module)
                    # Calls back at once if the module is imported already.
                    register_post_import_hook(self._after_import, route.module)
                if route.module in self._imported and route.name not in self._installed:
                    self._installed.add(route.name)
                    route.install(self._patches)

    def _after_import(self, module: ModuleType) -> None:
        with self._lock:
            self._imported.add(module.__name__)
            if self.active:
                self._install()

    def _restore(self) -> None:
        self._patches.restore()
        self._installed.clear()


def _reset_dynamo() -> None:
    # Dynamo does not guard on class attributes, so code compiled before a switch would stay.
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


SWITCH = Switch()
