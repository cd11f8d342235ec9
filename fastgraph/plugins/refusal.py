"""The reason why a call is left to upstream: the answer of a plan in place of a computation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Refusal:
    """A decision, made before anything is computed, that a call runs upstream's own code.

    Conditions answer with one, or with ``None`` where they hold; plans with one or with what
    computes. It is not frozen, which would double the time that it takes to make one, but never
    changed.

    Attributes:
        reason: as it stands in ``fastgraph.status()``, where calls are counted by it.
    """

    reason: str

    def __str__(self) -> str:
        return self.reason
