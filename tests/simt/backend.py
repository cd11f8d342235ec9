"""The CUDA kernels as a backend for CPU tensors, which tests register."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

from torch import Tensor

from fastgraph.backends.cuda import CudaBackend
from fastgraph.backends.generated import GeneratedKernels
from fastgraph.plugins.backend import Backend
from fastgraph.plugins.hookspecs import hookimpl
from tests.simt import library


@functools.cache
def emulator() -> library.Emulator:
    """The build that watches every access itself."""
    return library.Emulator(library.build())


def _seconds(call: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class SimtBackend(CudaBackend):
    """The backend for GPUs with the emulator in place of the driver; see ``tests/simt/emulator``.

    Args:
        emulator: gives the build to call.
        generated: kernels of edge programs; without them all are interpreted.
    """

    name = "simt"
    priority = -100  # on request only

    def __init__(
        self,
        emulator: Callable[[], library.Emulator] = emulator,
        generated: GeneratedKernels | None = None,
    ) -> None:
        super().__init__(lambda: emulator().functions, "cpu", _seconds, generated=generated)

    def unavailable(self) -> str | None:
        return library.why_unavailable()

    def below(self, x: Tensor) -> str:
        return "emulator"


@hookimpl
def fastgraph_backends() -> list[Backend]:
    return [SimtBackend()]
