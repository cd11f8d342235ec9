"""Builds the CUDA kernels for the emulator, and calls them.

It watches them itself, through the instrumentation that compilers have for sanitizers, and counts
how often each of their lines runs.

``python -m tests.simt.library`` builds it; the time of a test is limited.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import tvm_ffi
from filelock import FileLock
from torch import Tensor

from fastgraph.edge_programs.source import NAME

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "simt"
BUILD = ROOT / "build" / "emulator"
GENERATED = ROOT / "build" / "generated"
CSRC = ROOT / "fastgraph" / "csrc"
COMPILER = os.environ.get("CXX", "c++")
# Such as ccache; it has no part in what is compiled.
LAUNCHER = [part for part in os.environ.get("CMAKE_CXX_COMPILER_LAUNCHER", "").split(";") if part]

KERNELS = (
    *sorted((CSRC / "cuda").glob("*.cu")),
    HERE / "planted.cu",
)
# What is not watched: the emulator itself, and the host's side of the kernels.
EMULATOR = tuple(sorted((HERE / "emulator").glob("*.cpp")))
HOST = (
    *EMULATOR,
    *(
        CSRC / "bindings" / f"{name}.cpp"
        for name in (
            *("biased_attention", "content", "edge_program", "operators", "tasks", "tiles"),
        )
    ),
)
TVM_FFI = Path(tvm_ffi.__file__).parent

INCLUDED = (CSRC, CSRC / "include", HERE / "emulator", ROOT)
COMMON = (
    # Lines for reports, and nothing on variables, which would take longer to compile.
    *("-std=c++17", "-O1", "-g1", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
    # Kernels look at memory as vectors, which nvcc does not mind.
    *("-Wno-psabi", "-fno-strict-aliasing", "-fvisibility=hidden", "-ffp-contract=off"),
    *(f"-I{folder}" for folder in INCLUDED),
    "-DFASTGRAPH_SIMT",
    *("-isystem", str(TVM_FFI / "include"), '-DFASTGRAPH_DEVICE="tests/simt/device.h"'),
)
# Where pointers lead is seen by the emulator itself.
UNDEFINED = (
    "-fsanitize=signed-integer-overflow,integer-divide-by-zero,shift,bounds,bool,enum,builtin,"
    "unreachable,return"
)
# Loads of vectors have to stay whole for their alignment to be seen. Counters of lines are added to
# by single instructions: as loads and stores they would be watched, too, and most of what is. That
# is -fprofile-update, by a name with which ccache does not refuse to keep what is compiled.
COUNTED = ("--coverage", "--profile-update=atomic")
WATCHED_ALONE = ("-fsanitize=thread", "-fno-tree-sra")
WATCHED = (UNDEFINED, *WATCHED_ALONE, *COUNTED)
# Of attention's kernels, one of each kind for element types but float, unless all are asked for.
LAYOUTS = () if os.environ.get("SIMT_EVERY_LAYOUT") else ("-DFASTGRAPH_FEW_LAYOUTS",)


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
def build() -> Path:
    """Compile what has changed, and return the library's path."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with FileLock(BUILD.with_suffix(".lock")):  # against other processes of the tests
        return _build()


def _build() -> Path:
    # Most of the time that kernels take is the emulator's.
    flags = dict.fromkeys(HOST, (UNDEFINED, "-O0")) | dict.fromkeys(KERNELS, (*WATCHED, *LAYOUTS))
    flags |= dict.fromkeys(EMULATOR, ("-O3", "-fvisibility=default"))
    # What takes longest comes first, so that no core is left alone with it in the end.
    sources = sorted(flags, key=lambda source: source.stat().st_size, reverse=True)
    with ThreadPoolExecutor(os.cpu_count()) as compilers:
        objects = list(compilers.map(_compile, sources, map(flags.__getitem__, sources)))
    library = BUILD / f"{hashlib.sha256(repr(objects).encode()).hexdigest()[:16]}.so"
    if not library.exists():
        # The instrumentation calls functions that are ours, so its own libraries are not linked.
        partial = library.with_suffix(f".{os.getpid()}")
        subprocess.run(
            [
                *(COMPILER, "-shared", "-Wl,--no-undefined", "--coverage", *objects),
                *(f"-L{TVM_FFI / 'lib'}", "-ltvm_ffi", "-ldl", "-o", partial),
            ],
            check=True,
        )
        partial.rename(library)
    kept = {path.stem for path in (library, *objects)}  # with what the compiler puts beside them
    for path in BUILD.iterdir():
        if path.stem not in kept:
            path.unlink()
    return library


def _compile(source: Path, flags: Sequence[str]) -> Path:
    command: list[str | Path] = [COMPILER, *COMMON, *flags, "-x", "c++", "-c", source]
    digest = hashlib.sha256(repr(command).encode())
    # Bindings include the last by a macro.
    for path in sorted(_included(source) | _included(HERE / "device.h")):
        digest.update(path.read_bytes())
    found = BUILD / f"{source.stem}-{digest.hexdigest()[:16]}.o"
    if not found.exists():
        partial = found.with_suffix(".partial")  # one name, as caches of compilers look at it
        subprocess.run([*LAUNCHER, *command, "-o", partial], check=True)
        partial.rename(found)
    return found


def load_generated(source: str) -> int:
    """The address of a kernel that was generated for one edge program, and is watched, too."""
    # The library's name stands for headers and the emulator.
    digest = hashlib.sha256((build().name + source).encode()).hexdigest()[:16]
    GENERATED.mkdir(parents=True, exist_ok=True)
    path = GENERATED / f"{digest}.so"
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            _compile_generated(source, path)
    address = ctypes.cast(ctypes.CDLL(str(path))[NAME], ctypes.c_void_p).value
    assert address is not None
    return address


def _compile_generated(source: str, library: Path) -> None:
    text, built = library.with_suffix(".cpp"), library.with_suffix(".o")
    text.write_text(source)
    flags = ("-fvisibility=default", UNDEFINED, *WATCHED_ALONE, "-w")
    subprocess.run([*LAUNCHER, COMPILER, *COMMON, *flags, "-c", text, "-o", built], check=True)
    # Instrumentation calls functions of the emulator, which is there already.
    partial = library.with_suffix(f".{os.getpid()}")
    subprocess.run([COMPILER, "-shared", built, "-o", partial], check=True)
    partial.rename(library)


@functools.cache
def _included(path: Path) -> frozenset[Path]:
    """A file with all that it includes in quotation marks, whatever it includes that by."""
    names = re.findall(r'^#include "(.*)"', path.read_text(), re.MULTILINE)
    places = [folder / name for name in names for folder in (path.parent, *INCLUDED)]
    found = (_included(place.resolve()) for place in places if place.is_file())
    return frozenset({path}).union(*found)


class SimtError(RuntimeError):
    """A fault that the emulator has found in a kernel."""


class OneAtATime:
    """The functions of a module, of which only one runs at any time: there is one machine."""

    def __init__(self, module: Any) -> None:
        self._module, self._lock = module, threading.Lock()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._module, name)

        def call(*args: Any) -> Any:
            with self._lock:
                return function(*args)

        setattr(self, name, call)
        return call


class Emulator:
    """One build of the CUDA kernels.

    Attributes:
        functions: those of ``csrc/bindings``, for tensors on the CPU.
    """

    def __init__(self, path: Path | str) -> None:
        self.functions = OneAtATime(tvm_ffi.load_module(str(path)))
        # With names that kernels which are generated later find.
        self._lib = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self._lib.simt_seed.argtypes = [ctypes.c_uint64]
        self._lib.simt_portable.argtypes = [ctypes.c_bool]
        self._lib.simt_planted.restype = ctypes.c_char_p
        pointer = ctypes.c_void_p
        self._lib.simt_planted.argtypes = [
            *(ctypes.c_char_p, ctypes.c_int, ctypes.c_int, pointer, pointer)
        ]

    def seed(self, seed: int) -> None:
        """Let the threads run in another order."""
        self._lib.simt_seed(seed)

    def planted(
        self, name: str, bug: bool, blocks: int = 1, seed: int = 0, portable: bool = False
    ) -> Tensor:
        """Run a kernel of planted.cu on the numbers from 0 to 63.

        The C library switches threads if it is ``portable``, as where nothing faster is known.
        """
        self.seed(seed)
        self._lib.simt_portable(portable)
        given, out = torch.arange(64.0), torch.zeros(64)
        arguments = (name.encode(), bug, blocks, given.data_ptr(), out.data_ptr())
        report: bytes = self._lib.simt_planted(*arguments)
        self._lib.simt_portable(False)
        if report:
            raise SimtError(report.decode())
        return out


def main() -> None:
    why_not = why_unavailable()
    if why_not is not None:
        print(f"skipped: no emulator, {why_not}")
        return
    print(build())


if __name__ == "__main__":
    main()
