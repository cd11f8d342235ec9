"""NVRTC, the compiler of CUDA C++ that comes with torch's builds for CUDA.

It needs neither a toolkit nor a GPU. What it compiles is kept in the cache directory of the user.
"""

from __future__ import annotations

import base64
import ctypes
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import torch

from fastgraph.machine import cache

_KIND = "cubins-1"
# Products are no part of sums unless the source says so: a value that is computed by two kernels,
# and compared, has to have the same bits in both.
_OPTIONS = ("--std=c++17", "--fmad=false")


@functools.cache
def why_unavailable() -> str | None:
    """Why nothing can be compiled here, or ``None`` if it can."""
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    return None if _found() else f"{_file()} was found neither beside torch nor by the system"


@functools.cache
def identity() -> str:
    """The compiler, and how it is asked to compile; of none, the reason."""
    return why_unavailable() or " ".join([_version(_nvrtc()), *_OPTIONS])


def compile_source(source: str, capability: tuple[int, int]) -> bytes:
    """A cubin for GPUs of a compute capability, or PTX where this NVRTC does not know it.

    Args:
        source: CUDA C++.
        capability: such as ``(9, 0)``.

    Raises:
        RuntimeError: NVRTC refuses the source, with what it says.
    """
    nvrtc = _nvrtc()
    architecture, kind = _architecture(nvrtc, capability)
    options = [*_OPTIONS, f"--gpu-architecture={architecture}"]
    of_source = "\n".join([_version(nvrtc), *options, source])
    kept = cache.read(_KIND, of_source)
    if isinstance(kept, str):
        return base64.b64decode(kept)
    image = _compile(nvrtc, source, options, kind)
    cache.write(_KIND, of_source, base64.b64encode(image).decode())
    return image


def _file() -> str:
    return f"libnvrtc.so.{str(torch.version.cuda).partition('.')[0]}"


def _folders() -> Iterator[Path]:
    """Where packages have the library: that of NVIDIA, and torch's own."""
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations or () if spec else ():
        yield from sorted(Path(place).glob("*/lib"))
    yield Path(torch.__file__).parent / "lib"


@functools.cache
def _found() -> ctypes.CDLL | None:
    for folder in (*_folders(), Path()):
        try:
            return ctypes.CDLL(str(folder / _file()))
        except OSError:  # the next may have it
            continue
    return None


def _nvrtc() -> ctypes.CDLL:
    found = _found()
    if found is None:
        raise RuntimeError(f"nothing can be compiled: {why_unavailable()}")
    return found


def _version(nvrtc: ctypes.CDLL) -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(nvrtc, nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return f"NVRTC {major.value}.{minor.value}"


def _architecture(nvrtc: ctypes.CDLL, capability: tuple[int, int]) -> tuple[str, str]:
    count = ctypes.c_int()
    _check(nvrtc, nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
    known = (ctypes.c_int * count.value)()
    _check(nvrtc, nvrtc.nvrtcGetSupportedArchs(known))
    wanted = 10 * capability[0] + capability[1]
    if wanted in known:
        return f"sm_{wanted}", "CUBIN"
    return f"compute_{max(number for number in known if number <= wanted)}", "PTX"


def _compile(nvrtc: ctypes.CDLL, source: str, options: list[str], kind: str) -> bytes:
    program = ctypes.c_void_p()
    text = source.encode()
    created = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), text, b"edge_kernel.cu", 0, None, None
    )
    _check(nvrtc, created)
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), given):
            log = _content(nvrtc, program, "ProgramLog").rstrip(b"\0").decode()
            raise RuntimeError(f"NVRTC refuses a kernel of an edge program: {log}")
        return _content(nvrtc, program, kind)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _content(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, kind: str) -> bytes:
    size = ctypes.c_size_t()
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size)))
    content = ctypes.create_string_buffer(size.value)
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{kind}")(program, content))
    return content.raw


def _check(nvrtc: ctypes.CDLL, error: int) -> None:
    if error:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"NVRTC: {nvrtc.nvrtcGetErrorString(error).decode()}")
