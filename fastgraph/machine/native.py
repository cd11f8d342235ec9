"""The native libraries: the one that fits this machine is chosen, and loaded once."""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path
from typing import Any, Final

import torch

from fastgraph.machine.forks import lock_across_forks
from fastgraph.settings import CPU_LEVELS, Settings

_LIBRARY_DIR: Final = Path(__file__).parents[1] / "lib"
_CUDA_LIBRARY: Final = _LIBRARY_DIR / "libfastgraph_cuda.so"

_forked = False


def _remember_fork() -> None:
    global _forked
    _forked = True


# A library loaded before a fork notices it by itself; one that a forked child loads cannot, and
# the OpenMP threads of the parent do not exist in the child.
os.register_at_fork(after_in_child=_remember_fork)


def _library_path(level: str) -> Path:
    return _LIBRARY_DIR / f"libfastgraph_cpu_{level}.so"


def _machine_level() -> str:
    """The highest level that this processor executes, as torch sees it."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability.startswith("AVX512"):
        return "avx512"
    if capability.startswith("AVX2"):
        return "avx2"
    return "baseline"


def available_levels() -> list[str]:
    """Levels that were built and that this processor executes, lowest first."""
    supported = CPU_LEVELS[: CPU_LEVELS.index(_machine_level()) + 1]
    return [level for level in supported if _library_path(level).exists()]


def cpu_level() -> str:
    """The level in use: the highest available one, bounded by the ``cpu_level`` setting.

    Raises:
        RuntimeError: If no library was built.
        ValueError: If ``FASTGRAPH_CPU_LEVEL`` or another ``FASTGRAPH_*`` variable is invalid.
    """
    available = available_levels()
    if not available:
        raise RuntimeError(_missing_message(_machine_level()))
    bound = Settings.from_environment().cpu_level
    if bound is None:
        return available[-1]
    within = [level for level in available if CPU_LEVELS.index(level) <= CPU_LEVELS.index(bound)]
    return (within or available)[-1 if within else 0]


def library(level: str | None = None) -> Any:
    """The module of kernels for ``level``, by default for :func:`cpu_level`.

    Its functions take CPU tensors and check them; see ``csrc/cpu/kernels.h`` for what each does.

    Raises:
        ValueError: If ``level`` is unknown or beyond what this processor executes.
        RuntimeError: If the library is missing from the installation.
    """
    return _load(level) if level is not None else _default_library()


@functools.cache
def _default_library() -> Any:
    return _load(cpu_level())


@functools.cache
def _load(level: str) -> Any:
    if level not in CPU_LEVELS:
        raise ValueError(f"level must be one of {', '.join(CPU_LEVELS)}, got {level!r}")
    if CPU_LEVELS.index(level) > CPU_LEVELS.index(_machine_level()):
        raise ValueError(
            f"level must be at most {_machine_level()!r} on this processor, got {level!r}"
        )
    path = _library_path(level)
    if not path.exists():
        raise RuntimeError(_missing_message(level))
    module = _load_module(path)
    if _forked:
        module.run_serially()
    return module


_loading = lock_across_forks()  # as a fork in the middle of an import leaves the child waiting


def _load_module(path: Path) -> Any:
    with _loading:
        import tvm_ffi

        # What kernels without enough working memory raise (`with_memory` of
        # csrc/bindings/checks.h).
        tvm_ffi.register_error("FastgraphOutOfMemory", torch.OutOfMemoryError)
        return tvm_ffi.load_module(str(path))


def _missing_message(level: str) -> str:
    return (
        f"fastgraph's compiled kernels are missing: expected {_library_path(level)}. "
        "Install the package with `pip install .`, or in a source tree build them with "
        "`cmake -S . -B build && cmake --build build`"
    )


def why_unavailable() -> str | None:
    """Why the kernels cannot be used here, or ``None`` if they can."""
    return None if available_levels() else _missing_message(_machine_level())


@functools.cache
def is_available() -> bool:
    """True if the kernels can be used here."""
    return why_unavailable() is None


@functools.cache
def cuda_library() -> Any:
    """The module of CUDA kernels.

    Its functions take tensors on one GPU and check them; those that it shares with
    :func:`library` have the same arguments.

    Raises:
        RuntimeError: If the library cannot be loaded, or is missing from the installation.
    """
    return _load_module(_CUDA_LIBRARY)


@functools.cache
def cuda_digest() -> str:
    """A name for the content of the library of CUDA kernels."""
    with _CUDA_LIBRARY.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


@functools.cache
def cpu_digest() -> str:
    """A name for the content of the library that :func:`library` gives by default."""
    with _library_path(cpu_level()).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


@functools.cache
def why_cuda_unavailable() -> str | None:
    """Why the CUDA kernels cannot be used here, or ``None`` if they can.

    Asked whenever fastgraph is enabled, so it leaves CUDA alone: processes that are forked
    afterwards could not use it any more. Whether a GPU is too old is seen by the first call on it.
    """
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    if not _CUDA_LIBRARY.exists():
        return (
            "this installation has no CUDA kernels; building from source makes them where there "
            "are nvcc and a GPU, or everywhere with FASTGRAPH_CUDA=on"
        )
    if torch.cuda.device_count() == 0:  # unlike is_available(), counted by NVML
        return "torch finds no GPU"
    try:
        library = cuda_library()
    except RuntimeError as error:
        return f"the CUDA kernels cannot be loaded: {error}"
    built, supported = (
        divmod(version, 1000) for version in (library.runtime_version(), library.driver_version())
    )
    if supported[0] < built[0]:
        return (
            f"the CUDA kernels were built with CUDA {built[0]}.{built[1] // 10}, but the driver "
            f"supports {supported[0]}.{supported[1] // 10} at most"
        )
    return None
