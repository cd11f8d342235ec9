"""The faster of two kernels, found by measurement once for each graph and width."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fastgraph import capture, settings
from fastgraph.backends.base import Kernel
from fastgraph.graph import Graph


class FastestSpmm:
    """A kernel of ``spmm``, and one that takes its place where it is faster.

    With ``settings.measure`` both compute the first product of a graph with features of a width and
    dtype, and the faster one all further products. Nothing is measured while a CUDA graph is
    captured, nor under ``torch.use_deterministic_algorithms``: their results differ in the last
    bits.

    Args:
        kernel: computes unless the other one was found to be faster.
        other: computes products that ``fits`` accepts.
        fits: a function of the graph, the features and ``transpose``.
        seconds: how long a call takes, once it was warmed up.
    """

    def __init__(
        self,
        kernel: Kernel,
        other: Kernel,
        fits: Callable[[Graph, Tensor, bool], bool],
        seconds: Callable[[Callable[[], Tensor]], float],
    ) -> None:
        self._kernel, self._other, self._fits, self._seconds = kernel, other, fits, seconds

    def __call__(
        self, graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, transpose: bool
    ) -> Tensor:
        kernel = self._kernel
        if settings.current().measure and not torch.are_deterministic_algorithms_enabled():
            key = (x.shape[1], x.dtype, weight is not None, reduce, transpose)
            if key not in graph.other_is_faster and not capture.is_capturing(x):
                with torch.cuda.device_of(x):
                    faster = self._other_is_faster(graph, x, weight, reduce, transpose)
                graph.other_is_faster[key] = faster
            kernel = self._other if graph.other_is_faster.get(key) else kernel
        out: Tensor = kernel(graph, x, weight, reduce, transpose)
        return out

    def _other_is_faster(
        self, graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, transpose: bool
    ) -> bool:
        if not self._fits(graph, x, transpose):
            return False
        arguments = (graph, x, weight, reduce, transpose)
        least = self._seconds(lambda: self._kernel(*arguments))
        try:
            found = self._seconds(lambda: self._other(*arguments))
        except torch.OutOfMemoryError:  # it needs more than the kernel that could do without it
            found = math.inf
        return found < least


_REPEATS = 5


def seconds_on_gpu(call: Callable[[], Tensor]) -> float:
    """How long a call keeps the current stream of the current GPU busy; waits for it."""
    call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(_REPEATS):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / (1000 * _REPEATS)
