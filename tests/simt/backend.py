"""The CUDA kernels as a backend for CPU tensors, which tests register."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from fastgraph.backends.base import FLOATING, Backend, Kernel
from fastgraph.backends.kernels import native_kernels
from fastgraph.hookspecs import hookimpl
from tests.simt import library


@functools.cache
def emulator() -> library.Emulator:
    """The build that watches every access itself."""
    return library.Emulator(library.build("checked"))


class SimtBackend:
    """CUDA kernels executed on the CPU; see ``tests/simt/emulator``.

    Args:
        emulator: gives the build to call.
    """

    name = "simt"
    priority = -100  # on request only

    def __init__(self, emulator: Callable[[], library.Emulator] = emulator) -> None:
        self._kernels = native_kernels(lambda: emulator().functions)

    def unavailable(self) -> str | None:
        return library.why_unavailable()

    def kernel(self, operator: str, device_type: str, dtype: torch.dtype) -> Kernel | None:
        if device_type != "cpu" or dtype not in FLOATING:
            return None
        return self._kernels.get(operator)


@hookimpl
def fastgraph_backends() -> list[Backend]:
    return [SimtBackend()]
