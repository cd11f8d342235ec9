"""The minimal gathering loops of ``gather.cpp``, to compare achieved bandwidth with."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

_SOURCE = Path(__file__).with_name("gather.cpp")
_COMPILE = ("g++", "-std=c++17", "-O3", "-march=native", "-mprefer-vector-width=512", "-fopenmp")
CHANNELS = 256


class MinimalLoops:
    """The loops, compiled for this machine.

    Raises:
        FileNotFoundError: there is no g++.
        subprocess.CalledProcessError: it failed; its messages went to stderr.
    """

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory(prefix="fastgraph-benchmark-") as folder:
            unit, library = Path(folder) / "gather.o", Path(folder) / "gather.so"
            command = [option for option in _COMPILE if _supported(option)]
            subprocess.run([*command, "-fPIC", "-c", str(_SOURCE), "-o", str(unit)], check=True)
            # Linked without -fopenmp: a second OpenMP runtime would compete with torch's threads.
            subprocess.run(["g++", "-shared", str(unit), "-o", str(library)], check=True)
            self._library = ctypes.CDLL(str(library))

    def read(self, ptr: Tensor, col: Tensor, x: Tensor) -> Callable[[], None]:
        """A call that only reads the rows."""
        return self._call("gather_read", ptr, col, x, torch.empty(ptr.numel() - 1))

    def sum(self, ptr: Tensor, col: Tensor, x: Tensor) -> Callable[[], None]:
        """A call that also writes one row of sums for each destination."""
        return self._call("gather_sum", ptr, col, x, torch.empty(ptr.numel() - 1, x.shape[1]))

    def _call(
        self, name: str, ptr: Tensor, col: Tensor, x: Tensor, out: Tensor
    ) -> Callable[[], None]:
        dtypes = (ptr.dtype, col.dtype, x.dtype)
        if dtypes != (torch.int64, torch.int32, torch.float32) or x.shape[1] != CHANNELS:
            raise ValueError(
                f"the minimal loops take int64 ptr, int32 col and float32 x of {CHANNELS} "
                f"channels, got {dtypes} and {x.shape[1]} channels"
            )
        function = getattr(self._library, name)
        tensors = (ptr, col, x.detach(), out)
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in tensors]
        sizes = [ctypes.c_int64(ptr.numel() - 1), ctypes.c_int64(x.shape[1])]

        def call(_alive: tuple[Tensor, ...] = tensors) -> None:
            function(*pointers, *sizes)

        return call


def _supported(option: str) -> bool:
    return not option.startswith("-mprefer-vector-width") or "AVX512" in (
        torch.backends.cpu.get_cpu_capability()
    )
