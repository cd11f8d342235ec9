"""Layers whose dropout draws other random numbers than upstream's. Imports no torch."""

from __future__ import annotations

from typing import Any


def drops_attention(layer: Any) -> bool:
    """True if a layer is an attention layer whose dropout is active.

    Our kernels draw the mask from a random stream of their own, so two runs with the same seed
    differ by design.
    """
    owner, name = _rate(layer)
    rate = vars(owner).get(name)
    return (
        owner.training
        and isinstance(rate, (int, float))
        and not isinstance(rate, bool)
        and rate > 0
    )


def drop_no_attention(layer: Any) -> None:
    """Set the rate of a layer of which :func:`drops_attention` is true to zero."""
    owner, name = _rate(layer)
    vars(owner)[name] = 0.0


def _rate(layer: Any) -> tuple[Any, str]:
    """The module that holds the rate, and under which name; a name that is missing for others."""
    attributes = vars(layer)  # a property of the user's may do anything
    attention = attributes["_modules"].get("attn")
    if attention is not None:  # GPSConv, whose own rate is that of features
        return (attention, "dropout") if "dropout" in vars(attention) else (layer, "")
    if "heads" in attributes:  # PyG
        return layer, "dropout"
    if "_num_heads" in attributes:  # DGL
        dropout = attributes["_modules"].get("attn_drop")
        if dropout is not None:
            return dropout, "p"
    return layer, ""
