"""Builds ``csrc/cuda/cusparse.cpp`` for the CPU, and a stand-in for the library that it calls."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import tvm_ffi
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).parent
CSRC = ROOT / "fastgraph" / "csrc"
BUILD = ROOT / "build" / "cusparse"
COMPILER = os.environ.get("CXX", "c++")
TVM_FFI = Path(tvm_ffi.__file__).parent


class Counts(ctypes.Structure):
    """The counters and switches of the stand-in, as in ``stand_in.cpp``."""

    _fields_ = (
        ("matrices", ctypes.c_int64),
        ("prepared", ctypes.c_int64),
        ("products", ctypes.c_int64),
        ("unsupported_algorithm", ctypes.c_int64),
        ("failure", ctypes.c_int),
    )


def _folder_of(header: str) -> Path | None:
    packages = Path(sysconfig.get_path("purelib"))
    folders = [
        *Path("/usr/local").glob("cuda*/include"),
        *(Path(home) / "include" for home in [os.environ.get("CUDA_HOME")] if home),
        *packages.glob("nvidia/*/include"),
    ]
    return next((folder for folder in folders if (folder / header).exists()), None)


def why_unavailable() -> str | None:
    if shutil.which(COMPILER) is None:
        return f"there is no C++ compiler ({COMPILER})"
    for header in ("cuda_bf16.h", "cusparse.h"):
        if _folder_of(header) is None:
            return f"there is no {header}"
    return None


@functools.cache
def build() -> tuple[Path, Path]:
    """The paths of the stand-in and of the library under test."""
    BUILD.mkdir(parents=True, exist_ok=True)
    # By another name than cuSPARSE's own, which a torch for CUDA has loaded.
    stand_in, library = BUILD / "libstand_in.so", BUILD / "library.so"
    flags: list[str | Path] = [
        *("-std=c++17", "-O1", "-g", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"),
        *(f"-I{ROOT}", f"-I{CSRC}", f"-I{CSRC / 'include'}", "-isystem", TVM_FFI / "include"),
        *(f"-idirafter{_folder_of(header)}" for header in ("cuda_bf16.h", "cusparse.h")),
    ]
    with FileLock(BUILD / "lock"):  # against other processes of the tests
        _compile([*flags, HERE / "stand_in.cpp", f"-Wl,-soname,{stand_in.name}"], stand_in)
        defined = (
            '-DFASTGRAPH_DEVICE="tests/cuda/cusparse/device.h"',
            f'-DFASTGRAPH_CUSPARSE="{stand_in.name}"',
        )
        linked = ("-fvisibility=hidden", f"-L{TVM_FFI / 'lib'}", "-ltvm_ffi", "-ldl")
        _compile([*flags, *defined, CSRC / "cuda" / "cusparse.cpp", *linked], library)
    return stand_in, library


def _compile(arguments: list[str | Path], out: Path) -> None:
    newest = max(p.stat().st_mtime for p in (*HERE.iterdir(), *CSRC.rglob("*.*")))
    if not out.exists() or out.stat().st_mtime < newest:
        partial = out.with_suffix(f".{os.getpid()}")
        subprocess.run([COMPILER, *arguments, "-o", partial], check=True)
        partial.rename(out)


@functools.cache
def load() -> tuple[Any, Counts]:
    """The library under test, and the counts of the stand-in that it calls."""
    stand_in, library = build()
    counts = ctypes.CDLL(str(stand_in)).stand_in_counts
    counts.restype = ctypes.POINTER(Counts)
    return tvm_ffi.load_module(str(library)), counts().contents
