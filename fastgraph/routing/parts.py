"""Calls that are counted as a whole, by what became of the reductions in them.

A pooling layer or an aggregation computes with functions that have routes of their own. What these
decide is reported to the call in which they run, and counted under its name.
"""

from __future__ import annotations

from fastgraph.plugins.refusal import Refusal
from fastgraph.routing.sizes import TOO_SMALL
from fastgraph.routing.status import THREAD, count_refused, count_routed, count_too_small


class Parts:
    """A call that is under way, within ``with``, and counted when it ends.

    Args:
        name: under which it is counted.
        reason: why it runs upstream's code, where nothing in it has a route.

    Attributes:
        routed: true if a reduction in it runs an operator.
        refusal: why one of them runs upstream's code, if one does: the first that is of no size.
    """

    def __init__(self, name: str, reason: str) -> None:
        self._name, self._reason = name, reason
        self.routed = False
        self.refusal: Refusal | None = None

    def __enter__(self) -> None:
        THREAD.counted.append(self)

    def __exit__(self, *_: object) -> None:
        THREAD.counted.pop()
        if self.refusal is not None and not (self.routed and self.refusal is TOO_SMALL):
            _count_left(self._name, self.refusal)
        elif self.routed:
            count_routed(self._name)
        else:
            count_refused(self._name, self._reason)


def report(name: str, refusal: Refusal | None) -> None:
    """Count a reduction, or report it to the call that it is a part of.

    Args:
        name: of the function, under which it counts where it is no part.
        refusal: why it runs upstream's code; ``None`` if it does not.
    """
    under_way = THREAD.counted
    parts = under_way[-1] if under_way else None
    if not isinstance(parts, Parts):
        count_routed(name) if refusal is None else _count_left(name, refusal)
    elif refusal is None:
        parts.routed = True
    elif parts.refusal is None or parts.refusal is TOO_SMALL:
        parts.refusal = refusal


def _count_left(name: str, refusal: Refusal) -> None:
    if refusal is TOO_SMALL:
        count_too_small(name)
    else:
        count_refused(name, refusal.reason)
