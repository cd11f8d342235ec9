"""Which gradients a step computes, and whether it meets a graph that it knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from measure.routing import ordering_after
from measure.turns import Beside, Effort, Side, far_ahead, measure

MODES = ("all", "x", "parameters", "first", "inference")
"""Gradients of everything; of ``x`` or of parameters alone, of a graph that has both; of the
parameters of a first layer, whose ``x`` has none; none."""

INDICES = ("reused", "fresh")
"""The graph is that of the step before, or one that was made for this step."""


class Case(Protocol):
    """A layer on a graph."""

    module: nn.Module
    x: Tensor

    def fresh(self) -> Any:
        """The graph, as if it were seen for the first time."""
        ...

    def forward(self, x: Tensor, graph: Any) -> Tensor:
        """The output of the layer."""
        ...


class Steps:
    """Steps of a case in one mode.

    Args:
        case: what is computed.
        mode: one of :data:`MODES`.
        is_fresh: whether each step has a graph of its own.
    """

    def __init__(self, case: Case, mode: str, *, is_fresh: bool) -> None:
        self._case, self._mode, self._is_fresh = case, mode, is_fresh
        self._parameters = [p for p in case.module.parameters() if p.requires_grad]
        needs_x = mode in ("all", "x", "parameters")
        self._x = case.x.detach().clone().requires_grad_(needs_x)
        self._graph = case.fresh()
        self._grad: Tensor | None = None

    @property
    def is_empty(self) -> bool:
        """True if this mode asks for the gradients of parameters, and there are none."""
        return self._mode in ("parameters", "first") and not self._parameters

    def prepare(self) -> None:
        """Leave no gradient of the step before, and make the next graph if it is to be fresh."""
        self._case.module.zero_grad(set_to_none=True)
        self._x.grad = None
        if self._is_fresh:
            self._graph = self._case.fresh()

    def step(self) -> None:
        """One step."""
        if self._mode == "inference":
            with torch.no_grad():
                self._case.forward(self._x, self._graph)
            return
        out = self._case.forward(self._x, self._graph)
        if self._grad is None:
            self._grad = torch.randn_like(out)
        if self._mode in ("all", "first"):
            out.backward(self._grad)
        else:
            wanted = [self._x] if self._mode == "x" else self._parameters
            torch.autograd.grad(out, wanted, self._grad, allow_unused=True)


def beside(
    case: Case,
    mode: str,
    indices: Sequence[str],
    effort: Effort,
    upstream: Callable[[], AbstractContextManager[object]],
) -> dict[str, Beside] | None:
    """Upstream's steps beside ours, which is enabled; ``None`` where the mode asks for nothing.

    Upstream is measured on the same kind of graph as ours, even if it keeps nothing of any: where a
    step takes 200 us, the memory of a new graph is up to 9 % of it. Of a step of a second it is
    nothing: see :data:`measure.turns.LONG`.

    Args:
        case: what is computed.
        mode: one of :data:`MODES`.
        indices: some of :data:`INDICES`.
        effort: how long.
        upstream: puts upstream's own code in place.
    """
    if Steps(case, mode, is_fresh=False).is_empty:
        return None
    found: dict[str, Beside] = {}
    seconds = None
    for index in indices:
        is_fresh = index == "fresh"
        ours = Steps(case, mode, is_fresh=is_fresh)
        # Rows of a graph are put in order once, after some uses.
        with nullcontext() if is_fresh else ordering_after(0):
            ours.step()
            ours.step()
        plain = Steps(case, mode, is_fresh=is_fresh)
        sides = Side(plain.step, plain.prepare, upstream), Side(ours.step, ours.prepare)
        if seconds is None:
            seconds = sides[0].turn(1, warm_up=False)[0]
        found[index] = far_ahead(seconds, sides[1]) or measure(*sides, effort)
    return found
