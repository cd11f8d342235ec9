"""Routes: each replaces a method of a layer by a call of fused operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fastgraph.plugins.patching import Patches


@dataclass(frozen=True)
class Route:
    """A replacement of upstream code by operators.

    Attributes:
        name: what is routed, for messages.
        module: the upstream module after whose import the route is installed. It is never imported
            on the route's behalf.
        install: applies the route by replacing attributes through the given patches, and by nothing
            else, so that ``fastgraph.disable()`` restores the very same objects.
    """

    name: str
    module: str
    install: Callable[[Patches], None]
