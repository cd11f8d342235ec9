"""The fastest of several kernels, found by measurement once for each graph and width."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fastgraph import settings
from fastgraph.graphs.graph import Graph, beside
from fastgraph.machine import capture
from fastgraph.plugins.backend import Kernel
from fastgraph.tune import choices

ROWS = "rows"
"""The kernel that has no rival's name: that of rows."""

# Names of kernels by kind of call.
_Known = dict[tuple[object, ...], str]


class Rival(Protocol):
    """A kernel for some calls of an operator."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """The results, as of any kernel."""
        ...

    def fits(self, *arguments: Any, **keywords: Any) -> bool:
        """True if this kernel takes the call."""
        ...

    def forget(self, graph: Graph, x: Tensor, transpose: bool) -> None:
        """Free what is kept for calls that gather features like these."""
        ...


class Timed(NamedTuple):
    """The times of a call by each kernel.

    Attributes:
        device: everything below a kernel, as text.
        graph: of the call.
        kind: of the call: operator, width, dtype and options.
        seconds: by the names of kernels that are for it.
    """

    device: str
    graph: Graph
    kind: str
    seconds: dict[str, float]

    @property
    def fastest(self) -> str:
        """The name of the kernel."""
        return min(self.seconds, key=lambda name: self.seconds[name])


_recording: list[Timed] | None = None


@contextlib.contextmanager
def recorded() -> Iterator[list[Timed]]:
    """Within, nothing that is kept is used, and what is timed goes into the list."""
    global _recording
    before, _recording = _recording, []
    try:
        yield _recording
    finally:
        _recording = before


def keep(timed: Sequence[Timed]) -> None:
    """Keep what was fastest, for further runs (:mod:`fastgraph.tune.choices`)."""
    for device in dict.fromkeys(one.device for one in timed):
        found: dict[str, dict[str, str]] = {}
        for one in timed:
            if one.device == device:
                found.setdefault(choices.identity_of(one.graph), {})[one.kind] = one.fastest
        choices.KERNELS.keep(device, found)


class _Fastest:
    """A kernel, and others that take its place where they are faster.

    With ``settings.measure`` all make the first call of a kind on a graph, and the fastest all
    further ones. Where ``python -m fastgraph tune`` has kept which one that is
    (:mod:`fastgraph.tune.choices`), it makes the first one, too. The others take no part
    while a CUDA graph is captured, whose replays may run beside anything, nor under
    ``torch.use_deterministic_algorithms``: their results differ in the last bits.

    Args:
        kernel: computes unless another one was found to be faster.
        rivals: the others, by name.
        seconds: how long a call takes, once it was warmed up.
        device: everything below kernels on the device of a tensor, as text.
    """

    def __init__(
        self,
        kernel: Kernel,
        rivals: Mapping[str, Rival],
        seconds: Callable[[Callable[[], Any]], float],
        device: Callable[[Tensor], str],
    ) -> None:
        self._kernel, self._rivals = kernel, rivals
        self._seconds, self._device = seconds, device

    def _may_measure(self, x: Tensor) -> bool:
        return (
            settings.current().measure
            and not torch.are_deterministic_algorithms_enabled()
            and not capture.is_capturing(x)
        )

    def _choose(
        self,
        graph: Graph,
        x: Tensor,
        transpose: bool,
        kind: tuple[object, ...],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> Kernel:
        known, kind = beside(graph, "fastest", _Known), (*kind, transpose)
        if kind not in known:
            with torch.cuda.device_of(x):
                device, words = self._device(x), " ".join(map(str, kind))
                kept = {} if _recording is not None else choices.KERNELS.of(device, graph)
                chosen = kept.get(words)
                if chosen is None or not self._is_for(chosen, arguments, keywords):
                    seconds = self._measured(arguments, keywords)
                    timed = Timed(device, graph, words, seconds)
                    if _recording is not None:
                        _recording.append(timed)
                    chosen = timed.fastest
                known[kind] = chosen
            for name, rival in self._rivals.items():
                if name != known[kind]:
                    rival.forget(graph, x, transpose)
        return self._rivals.get(known[kind], self._kernel)

    def _is_for(self, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
        """True if the kernel of this name takes the call."""
        if name == ROWS:
            return True
        return name in self._rivals and self._rivals[name].fits(*arguments, **keywords)

    def _measured(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, float]:
        """Seconds of all that may make a call, by name."""
        seconds = {ROWS: self._seconds(partial(self._kernel, *arguments, **keywords))}
        for name, rival in self._rivals.items():
            try:
                if self._is_for(name, arguments, keywords):
                    seconds[name] = self._seconds(partial(rival, *arguments, **keywords))
            except torch.OutOfMemoryError:  # it needs more than the kernel, which can do without it
                continue
        return seconds


class FastestSpmm(_Fastest):
    """A kernel of ``spmm`` and its rivals."""

    def __call__(
        self, graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, transpose: bool
    ) -> Tensor:
        """The product, by the fastest."""
        kernel = self._kernel
        arguments = (graph, x, weight, reduce, transpose)
        if self._may_measure(x):
            kind = ("spmm", x.shape[1], x.dtype, _is_aligned(x), weight is not None, reduce)
            kernel = self._choose(graph, x, transpose, kind, arguments, {})
        out: Tensor = kernel(*arguments)
        return out


class FastestAttention(_Fastest):
    """A kernel of ``attention`` and its rivals."""

    def __call__(
        self, graph: Graph, *arguments: Any, addend: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The results of ``attention``, by the fastest kernel."""
        kernel = self._kernel
        query, key, value, edge, transpose, _, dropout, _, weights = arguments
        if self._may_measure(key):
            options = (edge is not None, dropout > 0, weights, addend is not None)
            tensors = (query, key, value) if addend is None else (query, key, value, addend)
            are_aligned = all(map(_is_aligned, tensors))
            kind = ("attention", *key.shape[1:], key.dtype, are_aligned, *options)
            call = (graph, *arguments)
            kernel = self._choose(graph, key, transpose, kind, call, {"addend": addend})
        found: tuple[Tensor, Tensor, Tensor] = kernel(graph, *arguments, addend=addend)
        return found


def _is_aligned(x: Tensor) -> bool:
    return x.data_ptr() % 16 == 0


_REPEATS = 5
_LONGEST_HEAD_START = 0.02
_CYCLES_PER_SECOND = 2e9
"""Of any GPU about: one with another clock sleeps longer or shorter."""


def head_start(seconds: float) -> None:
    """Let the current stream sleep for as long as the host needs to queue what is to be timed.

    Or else a GPU that is done sooner than the next kernel comes would wait, and its waiting would
    be timed. For 20 ms at most: what takes the host longer keeps the GPU busy for longer, too.

    Args:
        seconds: of the host.
    """
    torch.cuda._sleep(int(min(seconds, _LONGEST_HEAD_START) * _CYCLES_PER_SECOND))


def seconds_on_gpu(call: Callable[[], object]) -> float:
    """Seconds for which a call keeps the current stream of the current GPU busy; waits for it."""
    call()  # which may still prepare something
    begin = time.perf_counter()
    call()
    to_queue = time.perf_counter() - begin
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    head_start(_REPEATS * to_queue)
    start.record()
    for _ in range(_REPEATS):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / (1000 * _REPEATS)
