"""Cache of the fastest kernels of calls on a GPU, timed by ``python -m fastgraph tune``.

Kernels differ in the last bits, so a choice is used where the setting ``measure`` is on, in place
of a measurement there: runs that follow it have the same bits. Choices are kept by the kind of GPU,
its driver and the build of the kernels, the graph, and the kind of call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fastgraph.graphs.graph import Graph
from fastgraph.machine import cache
from fastgraph.tune.choices import identity_of

ROWS = "rows"
"""The kernel that has no rival's name: that of rows."""

_KIND = "kernels-1"
"""With another number where entries come to mean something else."""

_Choices = dict[str, dict[str, str]]
"""Names of kernels by graph and kind of call."""


class Timed(NamedTuple):
    """The times of a call by each kernel.

    Attributes:
        device: everything below a kernel, as text.
        graph: of the call.
        kind: of the call: operator, width, dtype and options.
        seconds: by the names of kernels that are for it.
    """

    device: str
    graph: Graph
    kind: str
    seconds: dict[str, float]

    @property
    def fastest(self) -> str:
        """The name of the kernel."""
        return min(self.seconds, key=lambda name: self.seconds[name])


class KeptKernels:
    """Choices in the cache directory, read at the first question for a device."""

    def __init__(self) -> None:
        self._known: dict[str, _Choices] = {}

    def fastest(self, device: str, graph: Graph, kind: str) -> str | None:
        """The name of the kernel that was chosen, or ``None`` where nothing is known."""
        if device not in self._known:
            self._known[device] = _read(device)
        known = self._known[device]
        return known.get(identity_of(graph), {}).get(kind) if known else None

    def keep(self, timed: Sequence[Timed]) -> None:
        """Keep what was fastest, beside what is known of other calls."""
        for device in dict.fromkeys(one.device for one in timed):
            with cache.locked(_KIND, device):
                known = self._known[device] = _read(device)
                for one in timed:
                    if one.device == device:
                        known.setdefault(identity_of(one.graph), {})[one.kind] = one.fastest
                cache.write(_KIND, device, known)


def _read(device: str) -> _Choices:
    kept: Any = cache.read(_KIND, device)
    try:
        return {
            str(graph): {str(kind): str(name) for kind, name in chosen.items()}
            for graph, chosen in (kept or {}).items()
        }
    except AttributeError:
        return {}


KEPT = KeptKernels()

_recording: list[Timed] | None = None


@contextlib.contextmanager
def recorded() -> Iterator[list[Timed]]:
    """Within, nothing that is kept is used, and what is timed goes into the list."""
    global _recording
    before, _recording = _recording, []
    try:
        yield _recording
    finally:
        _recording = before


def known(device: str, graph: Graph, kind: str) -> str | None:
    """The chosen kernel; ``None`` if there is none, or while kernels are measured."""
    return None if _recording is not None else KEPT.fastest(device, graph, kind)


def record(timed: Timed) -> None:
    """Tell who wants to know."""
    if _recording is not None:
        _recording.append(timed)
