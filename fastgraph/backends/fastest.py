"""The faster of several kernels, found by measurement once for each graph and width."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fastgraph import settings
from fastgraph.backends.base import Kernel
from fastgraph.graph import Graph


class FastestSpmm:
    """Kernels of ``spmm``, the first of which computes unless ``settings.measure`` is set.

    Then all of them compute the first product of a graph with features of a width and dtype, and
    the fastest one all further products. Nothing is measured while a CUDA graph is captured, nor
    under ``torch.use_deterministic_algorithms``: results of two kernels differ in their last bits.

    Args:
        kernels: at least one.
        seconds: how long a call takes, once it was warmed up.
    """

    def __init__(
        self, kernels: Sequence[Kernel], seconds: Callable[[Callable[[], Tensor]], float]
    ) -> None:
        self._kernels, self._seconds = kernels, seconds

    def __call__(
        self, graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, transpose: bool
    ) -> Tensor:
        kernel = self._kernels[0]
        if settings.current().measure and not torch.are_deterministic_algorithms_enabled():
            key = (self, x.shape[1], x.dtype, weight is not None, reduce, transpose)
            known = graph.fastest.get(key)
            if known is None and not _is_capturing(x):
                with torch.cuda.device_of(x):
                    known = self._measured(graph, x, weight, reduce, transpose)
                graph.fastest[key] = known
            kernel = kernel if known is None else known
        out: Tensor = kernel(graph, x, weight, reduce, transpose)
        return out

    def _measured(self, *arguments: object) -> Kernel:
        def seconds(kernel: Kernel) -> float:
            return self._seconds(lambda: kernel(*arguments))

        return min(self._kernels, key=seconds)


def _is_capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


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
