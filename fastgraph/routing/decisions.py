"""A line on standard error for each new decision: a layer and its route, or the reason against one.

This is ``python -m fastgraph -v``, and the setting ``verbose``.
"""

from __future__ import annotations

import sys

from fastgraph.routing.observing import ignore, observe
from fastgraph.routing.status import warned

_said: set[tuple[str, str]] = set()


def show_decisions(shown: bool) -> None:
    """Begin, or end, to say what is decided. Idempotent; nothing is ever said twice."""
    ignore(_say)
    if shown:
        observe(_say)


def _say(layer: str, found: str, is_route: bool) -> None:
    if (layer, found) in _said:
        return
    _said.add((layer, found))
    if not is_route:
        warned(found)
    if sys.stderr is not None and not sys.stderr.closed:
        what = f"runs by an {found}" if is_route else f"runs upstream's own code: {found}"
        print(f"fastgraph: {layer} {' '.join(what.split())}", file=sys.stderr)
