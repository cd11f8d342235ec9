"""A check that a bare machine has what a benchmark needs, before anything else is imported."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Collection
from pathlib import Path

# What to import, and what to install for it.
_PACKAGES = {
    "torch": "torch",
    "torch_geometric": "torch_geometric",
    "tvm_ffi": "apache-tvm-ffi",
    **{name: name for name in ("attrs", "click", "filelock", "networkx", "numpy")},
    **{name: name for name in ("platformdirs", "pluggy", "rich", "wrapt")},
}
_TEST_PACKAGES = {"pytest": "pytest", "pytest_timeout": "pytest-timeout"}


def find_program(name: str) -> str | None:
    """A program on PATH, or one of CUDA's in its usual place."""
    usual = Path("/usr/local/cuda/bin") / name
    return shutil.which(name) or (str(usual) if usual.exists() else None)


EXCHANGE = "__dlpack_c_exchange_api__"
"""By this tensors hand stream and allocator of torch to the kernels, without a module between."""


def missing(stages: Collection[str]) -> list[str]:
    """The packages and programs that these stages need and this machine lacks."""
    packages = dict(_PACKAGES)
    if "test" in stages or "sanitize" in stages:
        packages |= _TEST_PACKAGES
    programs = ["cmake", "ninja", "nvcc", "c++"] if "build" in stages else []
    if "sanitize" in stages:
        programs.append("compute-sanitizer")
    found = [
        *(f"the package {wheel}" for name, wheel in packages.items() if not _is_there(name)),
        *(f"the program {name}" for name in programs if find_program(name) is None),
    ]
    if _is_there("torch") and stages:
        found += _missing_of_torch()
    return found


def _missing_of_torch() -> list[str]:
    import torch

    if hasattr(torch.Tensor, EXCHANGE):
        return []
    return [
        f"a torch whose tensors have {EXCHANGE}, such as 2.10 (this one is {torch.__version__})"
    ]


def _is_there(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
