"""The CUDA kernels."""

from __future__ import annotations

import functools
from typing import Any

import torch

from fastgraph import native
from fastgraph.backends import sparse
from fastgraph.backends.base import FLOATING, Kernel
from fastgraph.backends.fastest import FastestSpmm, seconds_on_gpu
from fastgraph.backends.kernels import native_kernels


def with_torchs_error(kernel: Kernel) -> Kernel:
    """A kernel that raises torch's own error where its scratch memory does not fit."""

    @functools.wraps(kernel)
    def call(*arguments: Any) -> Any:
        try:
            return kernel(*arguments)
        except MemoryError as error:
            raise torch.OutOfMemoryError(str(error)) from None

    return call


_KERNELS = {
    name: with_torchs_error(kernel) for name, kernel in native_kernels(native.cuda_library).items()
}
_SPMM = FastestSpmm(_KERNELS["spmm"], sparse.spmm, sparse.fits, seconds_on_gpu)


class CudaBackend:
    """Kernels for NVIDIA GPUs; see ``fastgraph/csrc/cuda``."""

    name = "cuda"
    priority = -3  # on request, until it has been measured against upstream on a GPU

    def unavailable(self) -> str | None:
        return native.why_cuda_unavailable()

    def kernel(self, operator: str, device_type: str, dtype: torch.dtype) -> Kernel | None:
        if device_type != "cuda" or dtype not in FLOATING:
            return None
        if operator == "spmm" and dtype in sparse.DTYPES:
            return _SPMM
        return _KERNELS.get(operator)
