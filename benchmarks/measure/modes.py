"""Which gradients a step computes, and whether it meets a graph that it knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from measure.routing import ordering_after
from measure.turns import Beside, Effort, Side, measure_all

MODES = ("all", "x", "parameters", "first", "inference")
"""Gradients of everything; of ``x`` or of parameters alone, of a graph that has both; of the
parameters of a first layer, whose ``x`` has none; none."""

INDICES = ("reused", "fresh")
"""The graph is that of the step before, or one that was made for this step."""


class Case(Protocol):
    """A layer on a graph.

    Attributes:
        upstream_keeps_graphs: true if upstream remembers what it has made of a graph.
    """

    module: nn.Module
    x: Tensor
    upstream_keeps_graphs: bool

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

    Where upstream keeps nothing of a graph, one measurement of it serves all kinds of graphs.

    Args:
        case: what is computed.
        mode: one of :data:`MODES`.
        indices: some of :data:`INDICES`.
        effort: how long.
        upstream: puts upstream's own code in place.
    """
    if Steps(case, mode, is_fresh=False).is_empty:
        return None
    if case.upstream_keeps_graphs and len(indices) > 1:
        found = [beside(case, mode, [index], effort, upstream) for index in indices]
        return {index: row for rows in found if rows for index, row in rows.items()}
    ours = {index: Steps(case, mode, is_fresh=index == "fresh") for index in indices}
    for index, steps in ours.items():
        # Rows of a graph are put in order once, after some uses.
        with nullcontext() if index == "fresh" else ordering_after(0):
            steps.step()
            steps.step()
    plain = Steps(case, mode, is_fresh=case.upstream_keeps_graphs and "fresh" in indices)
    rows = measure_all(
        Side(plain.step, plain.prepare, upstream),
        [Side(steps.step, steps.prepare) for steps in ours.values()],
        effort,
    )
    return dict(zip(ours, rows, strict=True))
