"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fastgraph
from fastgraph import Graph
from fastgraph.hookspecs import plugin_manager
from fastgraph.registry.registry import REGISTRY
from tests.simt import backend as simt

plugin_manager().register(simt)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--emulate", action="store_true", help="run tests/cuda without a GPU")


BACKENDS = ("cpu", "reference", "scatter", "simt")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every backend in turn, selected for the test."""
    yield from selected(request.param)


def selected(name: str) -> Iterator[str]:
    """The body of a fixture: one backend for everything, if this machine has it."""
    why_not = REGISTRY.backends[name].unavailable()
    if why_not is not None:
        pytest.skip(why_not)
    REGISTRY.select(name)
    yield name
    REGISTRY.select(None)


@pytest.fixture
def restore_threads() -> Iterator[None]:
    """Put the number of threads back afterwards."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same random inputs in every run, whichever tests run before."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def leave_nothing_enabled() -> Iterator[None]:
    """Every test starts and ends with upstream's own code in place and an empty status."""
    fastgraph.disable()
    fastgraph.status().reset()
    yield
    fastgraph.disable()


@pytest.fixture
def sorted_graphs(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The graphs that are built from here on."""
    found: list[Graph] = []
    build = Graph.__init__

    def recording(graph: Graph, *given: Any, **options: Any) -> None:
        found.append(graph)
        build(graph, *given, **options)

    monkeypatch.setattr(Graph, "__init__", recording)
    return found
