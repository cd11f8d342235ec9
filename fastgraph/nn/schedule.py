"""Turns of attention: when it is of all pairs, and when along edges."""

from __future__ import annotations

import math
from typing import Any

from fastgraph.layers.arguments import check_choices, check_integers, check_numbers

ROUNDING = 1e-14
"""Of a period, relative: some operations in double precision, each of 1e-16."""


class Schedule:
    """Which layers or steps attend to all pairs of nodes: the first and every ``period``-th.

    By layer each forward pass has a layer that attends to all pairs, whatever the model's depth. By
    step all layers do in one training step of ``period``, and :meth:`step` counts steps, after the
    optimiser's, as a scheduler of learning rates does: not the forward pass, which checkpointing
    computes twice. No model has the count in its ``state_dict``: checkpoints need
    :meth:`state_dict` besides.

    Args:
        by: "step" or "layer".
        period: at least 1, which is attention of all pairs always; ``None`` for never.
        evaluation: the pattern where a model is not in training mode: "dense", "sparse", or by
            layer "same", the default there. By step it has to be said.

    Raises:
        ValueError: an argument is none of these.
    """

    def __init__(self, by: str, period: int | None, evaluation: str | None = None) -> None:
        check_choices(by=(by, ("step", "layer")))
        check_integers(or_none=True, period=period)
        if evaluation is None and by == "layer":
            evaluation = "same"
        allowed = ("dense", "sparse", "same") if by == "layer" else ("dense", "sparse")
        if evaluation not in allowed:
            raise ValueError(
                f"evaluation: expected one of {list(allowed)} for turns by {by}, got {evaluation!r}"
            )
        self.by, self.period, self.evaluation = by, period, evaluation
        self._count(0)

    def step(self) -> None:
        """Go on to the next training step."""
        self._count(self.steps + 1)

    def _count(self, steps: int) -> None:
        self.steps = steps
        # Compiled code depends on this, and not on the count.
        self._is_dense_step = self._is_turn(steps)

    def _is_turn(self, number: int) -> bool:
        return self.period is not None and number % self.period == 0

    def is_dense(self, layer: int, training: bool) -> bool:
        """True if a layer attends to all pairs in this step.

        Args:
            layer: its number in the model.
            training: whether it is in training mode.
        """
        if not training and self.evaluation != "same":
            return self.evaluation == "dense"
        return self._is_turn(layer) if self.by == "layer" else self._is_dense_step

    def state_dict(self) -> dict[str, Any]:
        """The number of steps, as checkpoints have it."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the step that a checkpoint was made at.

        Raises:
            ValueError: that is no number of steps.
        """
        steps = state.get("steps")
        if type(steps) is not int or steps < 0:
            raise ValueError(f"steps: expected an integer of at least 0, got {steps!r}")
        self._count(steps)

    def __repr__(self) -> str:
        return f"Schedule(by={self.by!r}, period={self.period}, evaluation={self.evaluation!r})"


def period_of_share(share: float, dense: float, sparse: float) -> int:
    """The shortest period in which dense turns take at most a share of the time of attention.

    To rounding, so that a share of 0.1 is a tenth. It is the share of turns by step; by layer it
    is that of a model whose layers are a multiple of the period, as each forward pass begins with
    a dense one.

    Args:
        share: above 0, at most 1.
        dense: the cost of a dense turn, in any unit: seconds measured on one rank and sent to all,
            or numbers of pairs and entries.
        sparse: the cost of a sparse turn, in the same.

    Raises:
        ValueError: a number is out of its range.
    """
    check_numbers("a number above 0 and at most 1", lambda part: 0 < part <= 1, share=share)
    is_cost = "a number above 0", lambda cost: 0 < cost < math.inf
    check_numbers(*is_cost, dense=dense, sparse=sparse)
    exact = 1 + dense * (1 - share) / (sparse * share)
    nearest = round(exact)
    return nearest if abs(exact - nearest) <= ROUNDING * exact else math.ceil(exact)
