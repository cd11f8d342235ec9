"""The CUDA kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastgraph.backends import reference
from fastgraph.backends.block_attention import block_attention_by_rows
from fastgraph.backends.cusparse import ALGORITHMS, CuSparseSpmm
from fastgraph.backends.edge_programs import edge_program_kernel
from fastgraph.backends.generated import GeneratedKernels
from fastgraph.backends.kernels import native_kernels, sddmm_by_head, spmm_by_head
from fastgraph.backends.tasks import Tasks
from fastgraph.backends.tiles import TilesAttention, TilesSpmm
from fastgraph.machine import native
from fastgraph.plugins.backend import FLOATING, Kernel
from fastgraph.registry.operators import BIASED_ATTENTION
from fastgraph.tune.fastest import FastestAttention, FastestSpmm, Rival, seconds_on_gpu


class CudaBackend:
    """Kernels for NVIDIA GPUs; see ``fastgraph/csrc/cuda``.

    Args:
        library: gives the native library; asked at each call.
        device_type: of the tensors that its functions take.
        seconds: how long a call takes on the device, once it was warmed up.
        generated: kernels of edge programs; without them all are interpreted.
    """

    name = "cuda"
    priority = 50

    def __init__(
        self,
        library: Callable[[], Any] = native.cuda_library,
        device_type: str = "cuda",
        seconds: Callable[[Callable[[], Tensor]], float] = seconds_on_gpu,
        *,
        generated: GeneratedKernels | None,
    ) -> None:
        self._library = library
        self._device_type = device_type
        self._generated = generated
        at_once = {"gatv2", "gat", "attention", "biased_attention"}
        tasks = Tasks(library)
        kernels = native_kernels(
            library, tasks, at_once=at_once, leaves_out=False, more=(BIASED_ATTENTION,)
        )
        rivals: dict[str, Rival] = {
            f"cusparse-{number}": CuSparseSpmm(library, number) for number in ALGORITHMS
        }
        rivals["tiles"] = TilesSpmm(library)
        sums = FastestSpmm(kernels["spmm"], rivals, seconds, self.below)
        on_tiles: dict[str, Rival] = {"tiles": TilesAttention(library)}
        attention = FastestAttention(kernels["attention"], on_tiles, seconds, self.below)
        self._kernels: dict[str, Kernel] = {
            **kernels,
            "spmm": spmm_by_head(sums.__call__),
            "attention": attention.__call__,
            "sddmm": sddmm_by_head(kernels["sddmm"]),
            "edge_program": edge_program_kernel(library, tasks, generated),
            # Of edges alone: torch's operations store no more than their results do.
            "edge_softmax": reference.edge_softmax,
            "edge_softmax_backward": reference.edge_softmax_backward,
        }
        self._kernels |= block_attention_by_rows(self._kernels)

    def unavailable(self) -> str | None:
        return native.why_cuda_unavailable()

    def identities(self) -> dict[str, str]:
        """See :class:`fastgraph.plugins.backend.VerifiedBackend`. Wakes CUDA in this process."""
        found: dict[str, str] = {}
        for number in range(torch.cuda.device_count()):
            name = torch.cuda.get_device_name(number)
            if name not in found.values():
                found[f"cuda:{number}"] = name
        return {device: self._identity(name) for device, name in found.items()}

    def _identity(self, name: str) -> str:
        """A kind of GPU, and everything between it and the kernels."""
        driver = self._library().driver_version()
        found = f"{name}; driver {driver}; kernels {native.cuda_digest()}"
        return found if self._generated is None else f"{found}; {self._generated.identity()}"

    def below(self, x: Tensor) -> str:
        """Everything below kernels on the GPU that a tensor is on, as text."""
        return self._identity(torch.cuda.get_device_name(x.device))

    def kernel(self, operator: str, device_type: str, dtype: torch.dtype) -> Kernel | None:
        if device_type != self._device_type or dtype not in FLOATING:
            return None
        return self._kernels.get(operator)
