"""Asking, without side effects, whether a module would be accelerated."""

from __future__ import annotations

import copy
from typing import Any

import torch

from fastgraph.routing import state, status


def is_accelerated(module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[bool, list[str]]:
    """Whether all message passing in ``module(*args, **kwargs)`` runs through fastgraph.

    The module is copied and run once on these inputs, so its buffers, its hooks' effects on itself
    and torch's random state are as before; the counters of ``fastgraph.status()`` do not move.

    Returns:
        ``(accelerated, reasons)``: true if something was routed and nothing fell back; the reasons
        name each layer that fell back, or say that no layer with a route was met.
    """
    if not state.is_enabled():
        return False, ["fastgraph is not enabled"]
    with torch.random.fork_rng(devices=[]), status.recording() as seen:
        copy.deepcopy(module)(*args, **kwargs)
    reasons = [f"{row.layer}: {reason}" for row in seen.rows for reason in row.reasons]
    if not seen.rows:
        reasons.append(f"{type(module).__name__} runs no layer that fastgraph knows")
    return not reasons, reasons
