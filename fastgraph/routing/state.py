"""Enabling and disabling: one switch for the whole process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from wrapt import register_post_import_hook

from fastgraph import settings
from fastgraph.backends.registry import REGISTRY
from fastgraph.memo import MEMO
from fastgraph.routing.patching import Patches


class Switch:
    """Whether fastgraph is enabled, and the replacements that are in place while it is."""

    def __init__(self) -> None:
        self.active = False
        self._patches = Patches()
        self._installed: set[str] = set()
        self._awaited: set[str] = set()
        self._imported: set[str] = set()
        self._lock = threading.RLock()

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

    def _install(self) -> None:
        from fastgraph.hookspecs import plugin_manager

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


def enable(
    *,
    backend: str | None = None,
    strict: bool | None = None,
    min_edges: int | None = None,
    cache_bytes: int | None = None,
    measure: bool | None = None,
    compare: bool | None = None,
) -> None:
    """Route PyG's layers through fastgraph in the whole process. Idempotent.

    Works before or after PyG is imported, on live modules and subclasses. With ``FASTGRAPH=0`` in
    the environment it does nothing. Arguments left out take their ``FASTGRAPH_*`` variable.

    Args:
        backend: name of the backend to use for everything; default: the best for each operator.
        strict: raise ``RouteRefusedError`` where a layer that has a route cannot take it.
        min_edges: leave graphs with fewer edges to upstream.
        cache_bytes: memory for sorted graphs on each device, of which the least recently used go
            first.
        measure: on a GPU, time our kernel of sums and means and cuSPARSE's algorithms at the first
            product of each graph and width, and take the fastest; last bits may then differ from
            run to run.
        compare: run every call of a routed layer both ways and raise ``DivergenceError`` where our
            error exceeds upstream's own; several times as slow as upstream.

    Raises:
        ValueError: an unknown or unavailable backend, or a value out of range.
    """
    given = {
        "backend": backend,
        "strict": strict,
        "min_edges": min_edges,
        "cache_bytes": cache_bytes,
        "measure": measure,
        "compare": compare,
    }
    chosen = settings.Settings.from_environment()
    if chosen.enabled is False:
        return
    chosen = chosen.replace(**{k: v for k, v in given.items() if v is not None})
    REGISTRY.select(chosen.backend)
    settings.set_current(chosen)
    MEMO.trim()
    SWITCH.turn(True)
    _watch(chosen.compare)


def disable() -> None:
    """Restore upstream's own code, object for object, in the whole process. Idempotent."""
    SWITCH.turn(False)
    _watch(False)


@contextmanager
def enabled(
    *,
    backend: str | None = None,
    strict: bool | None = None,
    min_edges: int | None = None,
    cache_bytes: int | None = None,
    measure: bool | None = None,
    compare: bool | None = None,
) -> Iterator[None]:
    """:func:`enable` within a ``with`` block; the state before it comes back, however nested."""
    active, chosen, selected = SWITCH.active, settings.current(), REGISTRY.selected
    enable(
        backend=backend,
        strict=strict,
        min_edges=min_edges,
        cache_bytes=cache_bytes,
        measure=measure,
        compare=compare,
    )
    try:
        yield
    finally:
        settings.set_current(chosen)
        REGISTRY.select(selected)
        SWITCH.turn(active)
        _watch(active and chosen.compare)


def _watch(active: bool) -> None:
    if active:
        from fastgraph.comparison.checking import WATCH

        WATCH.start()
    elif "fastgraph.comparison.checking" in sys.modules:
        sys.modules["fastgraph.comparison.checking"].WATCH.stop()


def is_enabled() -> bool:
    """Whether routes are in place."""
    return SWITCH.active
