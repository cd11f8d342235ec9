"""The fastest of several kernels, found by measurement once for each graph and width."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from fastgraph import settings
from fastgraph.graphs.graph import Graph, beside
from fastgraph.machine import capture
from fastgraph.registry.backend import Kernel

# Names of kernels by kind of product.
_Fastest = dict[tuple[object, ...], str]


class Rival(Protocol):
    """A kernel of ``spmm`` for some products."""

    def __call__(
        self, graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, transpose: bool
    ) -> Tensor:
        """The product, as for any kernel."""
        ...

    def fits(
        self, graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, transpose: bool
    ) -> bool:
        """Whether this is one of them."""
        ...

    def forget(self, graph: Graph, x: Tensor, transpose: bool) -> None:
        """Free what is kept for products like this."""
        ...


class FastestSpmm:
    """A kernel of ``spmm``, and others that take its place where they are faster.

    With ``settings.measure`` all compute the first product of a graph with features of a width and
    dtype, and the fastest all further products. The others take no part while a CUDA graph is
    captured, whose replays may run beside anything, nor under
    ``torch.use_deterministic_algorithms``: their results differ in the last bits.

    Args:
        kernel: computes unless another one was found to be faster.
        rivals: the others, by name.
        seconds: how long a call takes, once it was warmed up.
    """

    def __init__(
        self,
        kernel: Kernel,
        rivals: Mapping[str, Rival],
        seconds: Callable[[Callable[[], Tensor]], float],
    ) -> None:
        self._kernel, self._rivals, self._seconds = kernel, rivals, seconds

    def __call__(
        self, graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, transpose: bool
    ) -> Tensor:
        """The product, by the fastest."""
        arguments = (graph, x, weight, reduce, transpose)
        kernel = self._fastest(*arguments) if self._may_measure(x) else self._kernel
        out: Tensor = kernel(*arguments)
        return out

    def _may_measure(self, x: Tensor) -> bool:
        return (
            settings.current().measure
            and not torch.are_deterministic_algorithms_enabled()
            and not capture.is_capturing(x)
        )

    def _fastest(
        self, graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, transpose: bool
    ) -> Kernel:
        is_aligned = x.data_ptr() % 16 == 0
        kind = (x.shape[1], x.dtype, is_aligned, weight is not None, reduce, transpose)
        fastest = beside(graph, "fastest", _Fastest)
        if kind not in fastest:
            with torch.cuda.device_of(x):
                fastest[kind] = self._measure(graph, x, weight, reduce, transpose)
        return self._rivals.get(fastest[kind], self._kernel)

    def _measure(
        self, graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, transpose: bool
    ) -> str:
        """The name of the fastest rival, or nothing if none is faster."""
        arguments = (graph, x, weight, reduce, transpose)
        fastest, least = "", self._seconds(functools.partial(self._kernel, *arguments))
        for name, rival in self._rivals.items():
            try:
                if not rival.fits(*arguments):
                    continue
                found = self._seconds(functools.partial(rival, *arguments))
            except torch.OutOfMemoryError:  # it needs more than the kernel, which can do without it
                continue
            if found < least:
                fastest, least = name, found
        for name, rival in self._rivals.items():
            if name != fastest:
                rival.forget(graph, x, transpose)
        return fastest


_REPEATS = 5


def seconds_on_gpu(call: Callable[[], object]) -> float:
    """How long a call keeps the current stream of the current GPU busy; waits for it."""
    call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(_REPEATS):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / (1000 * _REPEATS)
