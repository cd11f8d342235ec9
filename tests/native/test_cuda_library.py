"""When the CUDA kernels can be used, and what is said when they cannot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fastgraph.machine import native
from fastgraph.registry.registry import REGISTRY

LOAD = native.cuda_library.__wrapped__


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    native.why_cuda_unavailable.cache_clear()
    yield
    native.why_cuda_unavailable.cache_clear()


@pytest.fixture
def gpu_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine where everything is right; returns where the library stands."""
    library = tmp_path / "libfastgraph_cuda.so"
    library.touch()
    versions = SimpleNamespace(runtime_version=lambda: 13000, driver_version=lambda: 13010)
    monkeypatch.setattr(native, "_CUDA_LIBRARY", library)
    monkeypatch.setattr(native, "cuda_library", lambda: versions)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return library


def test_available(gpu_machine: Path) -> None:
    assert native.why_cuda_unavailable() is None


def test_torch_without_cuda(gpu_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert native.why_cuda_unavailable() == "this torch was built without CUDA"


def test_no_kernels(gpu_machine: Path) -> None:
    gpu_machine.unlink()
    assert "FASTGRAPH_CUDA=on" in str(native.why_cuda_unavailable())


def test_no_gpu(gpu_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert native.why_cuda_unavailable() == "torch finds no GPU"


def test_a_library_that_does_not_load(gpu_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "cuda_library", LOAD)
    assert "the CUDA kernels cannot be loaded" in str(native.why_cuda_unavailable())


def test_asking_leaves_cuda_alone(gpu_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is forked later could not use it any more."""

    def initialise() -> None:
        raise AssertionError("CUDA was initialised")

    monkeypatch.setattr(torch.cuda, "_lazy_init", initialise)
    REGISTRY.select(None)
    assert native.why_cuda_unavailable() is None


def test_old_driver(gpu_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(runtime_version=lambda: 13000, driver_version=lambda: 12040)
    monkeypatch.setattr(native, "cuda_library", lambda: old)
    expected = "were built with CUDA 13.0, but the driver supports 12.4 at most"
    assert expected in str(native.why_cuda_unavailable())


def test_a_refusal_on_a_gpu_says_why_our_kernels_are_not_there() -> None:
    REGISTRY.select(None)
    why_not = REGISTRY.backends["cuda"].unavailable()
    hint = "would on request" if why_not is None else f"is unavailable: {why_not}"
    reason = str(REGISTRY.refusal("gatv2", "cuda", torch.float32))
    assert f"no backend computes gatv2 for torch.float32 on cuda; cuda {hint}" in reason
