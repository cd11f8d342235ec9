"""The C++ kernels for the CPU."""

from __future__ import annotations

import torch

from fastgraph import native
from fastgraph.backends.base import FLOATING, Kernel
from fastgraph.backends.kernels import native_kernels

_KERNELS = native_kernels(native.library, leaves_edges=True, any_row_order=True)


class CpuBackend:
    """Vectorised, multi-threaded kernels; see ``fastgraph/csrc/cpu``."""

    name = "cpu"
    priority = 100

    def unavailable(self) -> str | None:
        return native.why_unavailable()

    def kernel(self, operator: str, device_type: str, dtype: torch.dtype) -> Kernel | None:
        if device_type != "cpu" or dtype not in FLOATING:
            return None
        return _KERNELS.get(operator)
