"""The CUDA kernels."""

from __future__ import annotations

import functools
from typing import Any

import torch

from fastgraph import native
from fastgraph.backends.base import FLOATING, Kernel
from fastgraph.backends.cusparse import ALGORITHMS, CuSparseSpmm
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


_NATIVE = native_kernels(native.cuda_library)
_CUSPARSE = {
    f"cusparse-{algorithm}": CuSparseSpmm(native.cuda_library, algorithm)
    for algorithm in ALGORITHMS
}
_SPMM = FastestSpmm(_NATIVE["spmm"], _CUSPARSE, seconds_on_gpu)
_KERNELS = {
    name: with_torchs_error(kernel) for name, kernel in {**_NATIVE, "spmm": _SPMM.__call__}.items()
}


class CudaBackend:
    """Kernels for NVIDIA GPUs; see ``fastgraph/csrc/cuda``."""

    name = "cuda"
    priority = -3  # on request, until it has been measured against upstream on a GPU

    def unavailable(self) -> str | None:
        return native.why_cuda_unavailable()

    def kernel(self, operator: str, device_type: str, dtype: torch.dtype) -> Kernel | None:
        if device_type != "cuda" or dtype not in FLOATING:
            return None
        return _KERNELS.get(operator)
