"""These tests need a GPU; the option ``--emulate`` puts the emulator in its place.

Without both they skip, but with the option ``--gpu`` they fail.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fastgraph.registry.registry import REGISTRY


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="tests/cuda: fail without our kernels")


@pytest.fixture
def device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[torch.device]:
    """A GPU on which our kernels are available and selected."""
    name = "simt" if request.config.getoption("--emulate") else "cuda"
    why_not = REGISTRY.backends[name].unavailable()
    if why_not is not None:
        # The option is unknown when pytest starts above this folder.
        (pytest.fail if request.config.getoption("--gpu", default=False) else pytest.skip)(why_not)
    monkeypatch.setenv("FASTGRAPH_BACKEND", name)  # for enable()
    REGISTRY.select(name)
    yield torch.device("cpu" if name == "simt" else f"cuda:{torch.cuda.current_device()}")
    REGISTRY.select(None)


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    """A real one."""
    if device.type != "cuda":
        pytest.skip("the emulator has no streams and no memory of its own")
    return device
