from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fastgraph.machine import native


@pytest.fixture(params=native.available_levels())
def lib(request: pytest.FixtureRequest) -> Any:
    return native.library(request.param)


@pytest.fixture
def best() -> Any:
    return native.library(native.available_levels()[-1])


@pytest.fixture(autouse=True)
def _keep_num_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
