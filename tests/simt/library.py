"""Builds the CUDA kernels for the emulator, and calls them.

``checked`` is watched by the emulator itself and runs in the process of the tests; ``asan`` is
built with AddressSanitizer and UndefinedBehaviorSanitizer and needs a process of its own.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "simt"
BUILD = ROOT / "build" / "simt"
CSRC = ROOT / "fastgraph" / "csrc"
COMPILER = os.environ.get("CXX", "c++")

KERNELS = (
    CSRC / "cuda" / "gatv2.cu",
    CSRC / "cuda" / "spmm.cu",
    HERE / "exports.cu",
    HERE / "planted.cu",
)
RUNTIME = HERE / "emulator" / "runtime.cpp"

COMMON = (
    *("-std=c++17", "-O1", "-g", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
    # Kernels look at memory as vectors, which nvcc does not mind.
    *("-Wno-psabi", "-fno-strict-aliasing", "-fvisibility=hidden", "-ffp-contract=off"),
    *(f"-I{CSRC}", f"-I{CSRC / 'include'}", f"-I{HERE / 'emulator'}"),
)
ASAN = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
# For the runtime, the kernels and the linker.
FLAVOURS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    # Loads of vectors have to stay whole for their alignment to be seen.
    "checked": ((), ("-fsanitize=thread", "-fno-tree-sra"), ()),
    # Optimising what the sanitizers add takes longer than running it as it is.
    "asan": ((*ASAN, "-DSIMT_PORTABLE"), (*ASAN, "-O0"), ASAN),
}

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def why_unavailable() -> str | None:
    if shutil.which(COMPILER) is None:
        return f"there is no C++ compiler ({COMPILER})"
    macros = subprocess.run(
        [COMPILER, "-dM", "-E", "-x", "c++", os.devnull],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    if "__GNUC__" not in macros or "__clang__" in macros:
        return "the emulator takes its view of memory from GCC's instrumentation"
    return None


@functools.cache
def build(flavour: str) -> Path:
    """Compile one flavour, unless it is there already, and return its path."""
    for_runtime, for_kernels, for_link = FLAVOURS[flavour]
    headers = [*CSRC.rglob("*.h"), *CSRC.rglob("*.cuh"), *HERE.rglob("*.h")]
    digest = hashlib.sha256(repr((COMPILER, COMMON, FLAVOURS[flavour])).encode())
    for source in (*sorted(headers), RUNTIME, *KERNELS):
        digest.update(source.read_bytes())
    folder = BUILD / flavour
    library = folder / f"{digest.hexdigest()[:16]}.so"
    if library.exists():
        return library
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    objects = []
    for source in (RUNTIME, *KERNELS):
        flags = for_runtime if source == RUNTIME else for_kernels
        objects.append(folder / f"{source.stem}.o")
        command: list[str | Path] = [COMPILER, *COMMON, *flags, "-x", "c++", "-c", source]
        command += ["-o", objects[-1]]
        subprocess.run(command, check=True)
    # The instrumentation calls functions that are ours, so its own library is not linked.
    partial = library.with_suffix(".part")
    subprocess.run(
        [COMPILER, "-shared", "-Wl,--no-undefined", *for_link, *objects, "-ldl", "-o", partial],
        check=True,
    )
    partial.rename(library)
    return library


class SimtError(RuntimeError):
    """What the emulator has found wrong with a kernel."""


class CsrView(ctypes.Structure):
    """fastgraph::Csr."""

    _fields_ = (
        ("rowptr", ctypes.c_void_p),
        ("col", ctypes.c_void_p),
        ("edge_id", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("num_cols", ctypes.c_int64),
        ("num_entries", ctypes.c_int64),
    )


@dataclass
class Rows:
    """A compressed matrix on the host."""

    ptr: Tensor
    col: Tensor
    edge_id: Tensor | None
    num_cols: int

    @property
    def num_rows(self) -> int:
        return self.ptr.numel() - 1

    @property
    def longest(self) -> int:
        return int(self.ptr.diff().max()) if self.num_rows else 0


def compress(edge_index: Tensor, num_src: int, num_dst: int) -> Rows:
    src, dst = edge_index.long()
    order = dst.argsort(stable=True)
    ptr = torch.zeros(num_dst + 1, dtype=torch.int64)
    ptr[1:] = torch.bincount(dst, minlength=num_dst).cumsum(0)
    in_order = bool((order == torch.arange(order.numel())).all())
    return Rows(ptr, src[order].int(), None if in_order else order.int(), num_src)


@dataclass
class Device:
    """The memory of the emulated GPU during one call; a context manager."""

    lib: Any
    buffers: list[int] = field(default_factory=list)

    def __enter__(self) -> Device:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for buffer in reversed(self.buffers):
            self.lib.simt_free(buffer)

    def empty(self, name: str, num_bytes: int) -> int:
        pointer: int = self.lib.simt_allocate(num_bytes, name.encode())
        self.buffers.append(pointer)
        return pointer

    def put(self, name: str, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        tensor = tensor.contiguous()
        pointer = self.empty(name, tensor.nbytes)
        if tensor.nbytes:
            self.lib.simt_write(pointer, tensor.data_ptr(), tensor.nbytes)
        return pointer

    def csr(self, rows: Rows) -> Any:
        pointers = [self.put(name, getattr(rows, name)) for name in ("ptr", "col", "edge_id")]
        return ctypes.byref(CsrView(*pointers, rows.num_rows, rows.num_cols, rows.col.numel()))

    @staticmethod
    def get(pointer: int, *shape: int, dtype: torch.dtype) -> Tensor:
        out = torch.empty(shape, dtype=dtype)
        ctypes.memmove(out.data_ptr(), pointer, out.nbytes)
        return out


@dataclass
class Emulator:
    """The kernels of one build. Each call takes the seed of the order in which threads run."""

    path: Path | str
    lib: Any = field(init=False)

    def __post_init__(self) -> None:
        self.lib = ctypes.CDLL(str(self.path))
        self.lib.simt_error.restype = ctypes.c_char_p
        self.lib.simt_allocate.restype = ctypes.c_void_p
        self.lib.simt_allocate.argtypes = [ctypes.c_size_t, ctypes.c_char_p]
        self.lib.simt_free.argtypes = [ctypes.c_void_p]
        self.lib.simt_write.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        self.lib.simt_begin.argtypes = [ctypes.c_uint64]
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self.lib.simt_spmm_workspace.restype = size
        self.lib.simt_spmm_workspace.argtypes = [pointer, size, size]
        self.lib.simt_spmm.argtypes = [ctypes.c_int, pointer, size, *[pointer] * 5, size, pointer]
        self.lib.simt_gatv2_workspace.restype = size
        self.lib.simt_gatv2_workspace.argtypes = [pointer, size, size, size]
        self.lib.simt_gatv2.argtypes = [
            *(ctypes.c_int, pointer, size, *[pointer] * 5, size, ctypes.c_float, ctypes.c_double),
            *(ctypes.c_uint64, pointer, pointer, pointer, size, size, pointer),
        ]
        self.lib.simt_planted.argtypes = [
            *(ctypes.c_char_p, ctypes.c_int, ctypes.c_int, pointer, pointer)
        ]

    def check(self, code: int) -> None:
        if code:
            raise SimtError(self.lib.simt_error().decode() or f"error {code}")

    def spmm(
        self,
        rows: Rows,
        x: Tensor,
        weight: Tensor | None = None,
        row_scale: Tensor | None = None,
        col_scale: Tensor | None = None,
        seed: int = 0,
    ) -> Tensor:
        self.lib.simt_begin(seed)
        with Device(self.lib) as device:
            graph, width = device.csr(rows), x.shape[1]
            floats = self.lib.simt_spmm_workspace(graph, rows.longest, width)
            workspace = device.empty("workspace", 4 * floats)
            shape = rows.num_rows, width
            out = device.empty("out", rows.num_rows * width * x.element_size())
            code = self.lib.simt_spmm(
                *(DTYPES[x.dtype], graph, rows.longest, device.put("weight", weight)),
                *(device.put("row_scale", row_scale), device.put("col_scale", col_scale)),
                *(device.put("x", x), out, width, workspace),
            )
            self.check(code)
            return device.get(out, *shape, dtype=x.dtype)

    def gatv2(
        self,
        rows: Rows,
        inputs: Sequence[Tensor | None],
        slope: float = 0.2,
        dropout: float = 0.0,
        dropout_seed: int = 0,
        weights: bool = False,
        seed: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The output, stats and weights; inputs are x_src, x_dst, att, edge and weight_edge."""
        x_src, edge = inputs[0], inputs[3]
        assert x_src is not None
        dtype, (heads, width) = x_src.dtype, x_src.shape[1:]
        num_edges = rows.col.numel() if weights else 0
        self.lib.simt_begin(seed)
        with Device(self.lib) as device:
            graph = device.csr(rows)
            floats = self.lib.simt_gatv2_workspace(graph, rows.longest, heads, width)
            workspace = device.empty("workspace", 4 * floats)
            out = device.empty("out", rows.num_rows * heads * width * dtype.itemsize)
            stats = device.empty("stats", rows.num_rows * heads * 8)
            alpha = device.empty("alpha", num_edges * heads * dtype.itemsize)
            names = ("x_src", "x_dst", "att", "edge", "weight_edge")
            code = self.lib.simt_gatv2(
                *(DTYPES[dtype], graph, rows.longest),
                *(device.put(*given) for given in zip(names, inputs, strict=True)),
                *(0 if edge is None else edge.shape[1], slope, dropout, dropout_seed),
                *(out, stats, alpha if weights else None, heads, width, workspace),
            )
            self.check(code)
            return (
                device.get(out, rows.num_rows, heads, width, dtype=dtype),
                device.get(stats, rows.num_rows, heads, 2, dtype=torch.float32),
                device.get(alpha, num_edges, heads, dtype=dtype),
            )

    def planted(self, name: str, bug: bool, blocks: int = 1, seed: int = 0) -> Tensor:
        """Run a kernel of planted.cu on the numbers from 0 to 63."""
        self.lib.simt_begin(seed)
        with Device(self.lib) as device:
            given = device.put("in", torch.arange(64.0))
            out = device.put("out", torch.zeros(64))
            self.check(self.lib.simt_planted(name.encode(), bug, blocks, given, out))
            assert out is not None
            return device.get(out, 64, dtype=torch.float32)
