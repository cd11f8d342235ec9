"""Enabling and disabling fastgraph in the whole process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fastgraph import settings
from fastgraph.graphs.memo import AGGREGATION, MEMO
from fastgraph.graphs.repeats import REPEATS
from fastgraph.machine.memory import POOL
from fastgraph.plugins.backend import VerifiedBackend
from fastgraph.plugins.hookspecs import plugin_manager
from fastgraph.registry.registry import REGISTRY, Failures
from fastgraph.routing.decisions import show_decisions
from fastgraph.routing.switch import SWITCH
from fastgraph.tested import warn_where_untested


def _verify(backend: VerifiedBackend) -> Failures:
    from fastgraph.verification import verdicts  # most processes never need what it imports

    return verdicts.failures(backend)


REGISTRY.verify_with(_verify)


def enable(
    *,
    backend: str | None = None,
    strict: bool | None = None,
    min_edges: int | None = None,
    cache_bytes: int | None = None,
    measure: bool | None = None,
    prefetch: bool | None = None,
    compare: bool | None = None,
    verbose: bool | None = None,
) -> None:
    """Route layers of PyG and DGL through fastgraph in the whole process. Idempotent.

    Works before or after they are imported, on live modules and subclasses. With ``FASTGRAPH=0`` in
    the environment it does nothing. Arguments left out take their ``FASTGRAPH_*`` variable.

    Args:
        backend: name of the backend to use for everything; default: the best for each operator.
        strict: raise ``RouteRefusedError`` where a layer that has a route cannot take it.
        min_edges: leave graphs with fewer edges to upstream; default: those on the CPU that gain
            nothing, as was measured for each kind of operator.
        cache_bytes: memory for sorted graphs on each device, of which the least recently used go
            first.
        measure: on a GPU, time our kernel of sums and means and cuSPARSE's algorithms at the first
            product of each graph and width, and take the fastest; last bits may then differ from
            run to run.
        prefetch: have a thread make the next batch of PyG's neighbour loaders while the program
            computes on the last one; default: no.
        compare: run every call of a routed layer both ways and raise ``DivergenceError`` where our
            error exceeds upstream's own; several times as slow as upstream.
        verbose: say on standard error, once each, which layer takes which route, or why none.

    Raises:
        ValueError: an unknown or unavailable backend, or a value out of range.
    """
    given = {
        "backend": backend,
        "strict": strict,
        "min_edges": min_edges,
        "cache_bytes": cache_bytes,
        "measure": measure,
        "prefetch": prefetch,
        "compare": compare,
        "verbose": verbose,
    }
    chosen = settings.Settings.from_environment()
    if chosen.enabled is False:
        return
    chosen = chosen.replace(**{k: v for k, v in given.items() if v is not None})
    REGISTRY.select(chosen.backend)
    settings.set_current(chosen)
    MEMO.trim()
    REPEATS.trim()
    POOL.trim()
    _turn(True)


def disable() -> None:
    """Restore upstream's own code, object for object, in the whole process. Idempotent."""
    _turn(False)
    POOL.clear()


@contextmanager
def enabled(
    *,
    backend: str | None = None,
    strict: bool | None = None,
    min_edges: int | None = None,
    cache_bytes: int | None = None,
    measure: bool | None = None,
    prefetch: bool | None = None,
    compare: bool | None = None,
    verbose: bool | None = None,
) -> Iterator[None]:
    """:func:`enable` within a ``with`` block; the state before it comes back, however nested.

    Args:
        backend: as for :func:`enable`.
        strict: as for :func:`enable`.
        min_edges: as for :func:`enable`.
        cache_bytes: as for :func:`enable`.
        measure: as for :func:`enable`.
        prefetch: as for :func:`enable`.
        compare: as for :func:`enable`.
        verbose: as for :func:`enable`.

    Yields:
        Nothing.

    Raises:
        ValueError: an unknown or unavailable backend, or a value out of range.
    """
    active, chosen, selected = SWITCH.active, settings.current(), REGISTRY.selected
    enable(
        backend=backend,
        strict=strict,
        min_edges=min_edges,
        cache_bytes=cache_bytes,
        measure=measure,
        prefetch=prefetch,
        compare=compare,
        verbose=verbose,
    )
    try:
        yield
    finally:
        settings.set_current(chosen)
        REGISTRY.select(selected)
        _turn(active)


def _turn(active: bool) -> None:
    SWITCH.turn(active)
    show_decisions(active and settings.current().verbose)
    if active:
        warn_where_untested()
    if not active:
        MEMO.forget_named(AGGREGATION)
    plugin_manager().hook.fastgraph_switched(active=active)


def is_enabled() -> bool:
    """True if layers are routed: between :func:`enable` and :func:`disable`."""
    return SWITCH.active
