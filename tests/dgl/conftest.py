"""Ranks for the tests of sharded graphs, as in ``tests/dist``, and DGL's sampler by ours."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import fastgraph
from tests.dist.conftest import once_on_ranks, pytest_generate_tests

__all__ = ["once_on_ranks", "pytest_generate_tests"]


@pytest.fixture
def dgl_sampling(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Our sampler behind DGL's."""
    monkeypatch.setenv("FASTGRAPH_DGL_SAMPLING", "1")
    with fastgraph.enabled():
        fastgraph.status().reset()
        yield
