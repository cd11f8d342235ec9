"""Which layers draw other random numbers than upstream. Imports no torch."""

from __future__ import annotations

from typing import Any


def drops_attention(layer: Any) -> bool:
    """Whether a layer is an attention layer whose dropout is active.

    Our kernels draw the mask from a random stream of their own, so two runs with the same seed
    differ by design.
    """
    attributes = vars(layer)  # a property of the user's may do anything
    rate = attributes.get("dropout")
    return (
        layer.training
        and "heads" in attributes
        and isinstance(rate, (int, float))
        and not isinstance(rate, bool)
        and rate > 0
    )
