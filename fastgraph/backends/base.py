"""What a backend provides.

A kernel receives a :class:`fastgraph.Graph`, contiguous matrices ``[nodes, channels]`` and plain
options, checked by the operator, and returns new tensors. It never sees autograd. The operators and
the signatures of their kernels:

``spmm(graph, x, weight, reduce, transpose) -> out``
    ``reduce`` is ``"sum"``, ``"mean"`` (divide by the aggregating node's degree) or
    ``"mean_adjoint"`` (divide by the gathered node's degree).
``sddmm(graph, grad, x, reduce, transpose) -> [E]``
    For each edge the dot product of the rows of ``grad`` and ``x`` that it joins, scaled as above.
``segment_reduce(graph, x, weight, reduce, transpose, ties) -> (out, record)``
    ``record`` (int32) serves the backward: for ``"split"`` the number of shares, for ``"winner"``
    the edge that won (-1 for none), empty for ``"none"``.
``segment_reduce_backward(graph, grad, x, weight, out, record, transpose, ties) -> grad_x``
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch

Kernel = Callable[..., Any]

FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""The dtypes that operators take."""

OPERATORS = ("spmm", "sddmm", "segment_reduce", "segment_reduce_backward")


@runtime_checkable
class Backend(Protocol):
    """A provider of kernels.

    Attributes:
        name: unique; what ``fastgraph.enable(backend=...)`` takes.
        priority: the highest available one computes an operator. A backend with a negative priority
            is used only on request, because upstream's own code is at least as fast.
    """

    name: str
    priority: int

    def unavailable(self) -> str | None:
        """Why the backend cannot be used on this machine, or ``None`` if it can."""
        ...

    def kernel(self, operator: str, device_type: str, dtype: torch.dtype) -> Kernel | None:
        """The kernel for an operator on a device type and dtype, or ``None`` if there is none."""
        ...
