"""When the CUDA kernels can be used, and what is said when they cannot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fastgraph import native
from fastgraph.backends.registry import REGISTRY


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
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    set_gpus(monkeypatch, (9, 0))
    return library


def set_gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capabilities[i])


def test_available(gpu_machine: Path) -> None:
    assert native.why_cuda_unavailable() is None


def test_torch_without_cuda(gpu_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert native.why_cuda_unavailable() == "this torch was built without CUDA"


def test_no_kernels(gpu_machine: Path) -> None:
    gpu_machine.unlink()
    assert "FASTGRAPH_CUDA=on" in str(native.why_cuda_unavailable())


def test_no_gpu(gpu_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert native.why_cuda_unavailable() == "torch finds no GPU"


def test_old_gpu(gpu_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_gpus(monkeypatch, (7, 0), (7, 5))
    expected = "the CUDA kernels need compute capability 8.0, but the GPU has 7.5"
    assert native.why_cuda_unavailable() == expected
    native.why_cuda_unavailable.cache_clear()
    set_gpus(monkeypatch, (7, 5), (12, 0))
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
