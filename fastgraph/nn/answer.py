"""Answers to questions about graphs, which may stay open."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

Verdict = Literal["yes", "no", "undecided"]


@dataclass(frozen=True)
class Answer:
    """Yes, no or undecided, with the reason and nodes by which it can be checked.

    Attributes:
        verdict: "yes", "no" or "undecided".
        reason: in words.
        witness: nodes that show it, int64; ``None`` where all pairs of nodes were looked at, and
            where it is undecided. The function that answers says which nodes these are.
    """

    verdict: Verdict
    reason: str
    witness: Tensor | None = field(default=None, compare=False)

    def __bool__(self) -> bool:
        """Refused, as ``undecided`` is neither true nor false.

        Raises:
            TypeError: always.
        """
        raise TypeError("an Answer may be undecided: compare its verdict with 'yes' or 'no'")

    def __str__(self) -> str:
        return f"{self.verdict}: {self.reason}"
