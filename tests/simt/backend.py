"""The CUDA kernels as a backend for CPU tensors, which tests register."""

from __future__ import annotations

import functools

import torch

from fastgraph.backends.base import FLOATING, Backend, Kernel
from fastgraph.backends.kernels import native_kernels
from fastgraph.hookspecs import hookimpl
from tests.simt import library


@functools.cache
def emulator() -> library.Emulator:
    """The build that watches every access itself."""
    return library.Emulator(library.build("checked"))


_KERNELS = native_kernels(lambda: emulator().functions)


class SimtBackend:
    """CUDA kernels executed on the CPU; see ``tests/simt/emulator``."""

    name = "simt"
    priority = -100  # on request only

    def unavailable(self) -> str | None:
        return library.why_unavailable()

    def kernel(self, operator: str, device_type: str, dtype: torch.dtype) -> Kernel | None:
        if device_type != "cpu" or dtype not in FLOATING:
            return None
        return _KERNELS.get(operator)


@hookimpl
def fastgraph_backends() -> list[Backend]:
    return [SimtBackend()]
