"""Kernels that are generated and compiled for one edge program each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fastgraph.edge_programs import lanes, registers, source
from fastgraph.edge_programs.lowering import Code
from fastgraph.machine import native, nvrtc
from fastgraph.machine.capture import is_capturing

Load = Callable[[str, torch.device], int]
"""Compiles a source and gives the address of its kernel, for a device."""


class GeneratedKernel(NamedTuple):
    """A kernel as native functions take it.

    Attributes:
        address: of the kernel.
        chunks: blocks of its grid that share the columns of a row.
    """

    address: int
    chunks: int


class GeneratedKernels:
    """Those of all programs, each compiled at the first call of its program.

    Args:
        load: compiles and loads.
        is_available: true if that can be done here; asked at calls.
        compiler: names what compiles; asked at calls.
    """

    def __init__(
        self,
        load: Load,
        is_available: Callable[[], bool] = lambda: True,
        compiler: Callable[[], str] = lambda: "",
    ) -> None:
        self._load = load
        self._is_available = is_available
        self._compiler = compiler
        # With the code itself, whose identity is that of the key as long as it is there.
        self._found: dict[
            tuple[int, torch.dtype, torch.device], tuple[Code, GeneratedKernel | None]
        ] = {}

    def __call__(self, code: Code, like: Tensor) -> GeneratedKernel | None:
        """The kernel of a program; ``None`` where the program has to be interpreted.

        That is where it :func:`has no kernel <fastgraph.edge_programs.source.cuda_source>`, where
        there is no compiler, and where it would have to run while a CUDA graph is captured.

        Args:
            code: the program.
            like: one of its operands.
        """
        key = id(code), like.dtype, like.device
        found = self._found.get(key)
        if found is not None:
            return found[1]
        written = source.cuda_source(code, like.dtype) if self._is_available() else None
        kernel = None
        if written is not None:
            if is_capturing(like):
                return None
            address = self._load(source.prelude() + written.text, like.device)
            kernel = GeneratedKernel(address, written.chunks)
        self._found[key] = code, kernel
        return kernel

    def identity(self) -> str:
        """A name for all that decides about kernels: who writes them, and who compiles them."""
        digest = hashlib.sha256(source.prelude().encode())
        for module in (lanes, registers, source):
            digest.update(Path(str(module.__file__)).read_bytes())
        return f"{self._compiler()} of {digest.hexdigest()[:16]}"


def generated_on_gpus() -> GeneratedKernels:
    """Kernels that NVRTC compiles."""

    def load(text: str, device: torch.device) -> int:
        with torch.cuda.device(device):
            image = nvrtc.compile_source(text, torch.cuda.get_device_capability(device))
            address: int = native.cuda_library().load_kernel(image, source.NAME)
            return address

    def is_available() -> bool:
        # CUDA before 12.8, with which our kernels may be built, loads no others.
        loads = hasattr(native.cuda_library(), "load_kernel")
        return loads and nvrtc.why_unavailable() is None

    return GeneratedKernels(load, is_available, nvrtc.identity)
