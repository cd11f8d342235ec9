"""These tests need a GPU; the option ``--emulate`` puts the emulator in its place."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fastgraph.backends.registry import REGISTRY


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """A GPU on which our kernels are available."""
    if request.config.getoption("--emulate"):
        REGISTRY.select("simt")
        yield torch.device("cpu")
        REGISTRY.select(None)
        return
    why_not = REGISTRY.backends["cuda"].unavailable()
    if why_not is not None:
        pytest.skip(why_not)
    yield torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    """A real one."""
    if device.type != "cuda":
        pytest.skip("the emulator has no streams and no memory of its own")
    return device
