"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgraph
from fastgraph import Graph
from fastgraph.graphs.repeats import REPEATS
from fastgraph.layers.aggregation import Aggregation
from fastgraph.plugins.hookspecs import plugin_manager
from fastgraph.registry.registry import REGISTRY
from tests import pairs
from tests.interpreter import interpreter
from tests.simt import backend as simt

plugin_manager().register(simt)
gc.disable()  # until tests are collected, as below

# Graphs of tests are small, and must be routed nevertheless.
os.environ.setdefault("FASTGRAPH_MIN_EDGES", "0")

NOT_ASKED_FOR = "needs --emulate: `make emulate` runs it"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--emulate",
        action="store_true",
        help="let the emulator run the kernels for GPUs: tests/simt, tests/cuda without a GPU, and "
        "what runs on every backend",
    )
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="also what other tests show with fewer cases",
    )
    parser.addoption(
        "--repeats",
        action="store_true",
        help="with --emulate, also what differs from other tests in no way that a kernel sees",
    )
    parser.addoption(
        "--ranks",
        help="on how many ranks tests/dist computes, by commas; default: 3, or 4 for grids",
    )
    parser.addoption(
        "--steps", type=int, default=3, help="how many steps tests/dist compares with one process"
    )
    parser.addoption(
        "--kills", type=int, default=2, help="how many ranks tests/dist kills at random points"
    )


def repeats(item: pytest.Item) -> bool:
    """True if the emulator meets in other tests what a kernel sees of this one.

    tests/simt has every kernel on graphs of every kind. That operators and layers call kernels as
    these want to be called is shown by two graphs, and by one whose rows are cut.
    """
    if item.get_closest_marker("repeats") is not None:
        return True
    given = getattr(item, "callspec", None)
    enough = ("random", "bipartite_wide", "hub_small")
    return given is not None and str(given.params.get("case", "random")) not in enough


def emulated(item: pytest.Item) -> bool:
    """True if the emulator runs in a test: its library takes minutes to build, its tests to run."""
    return item.get_closest_marker("emulated") is not None


def exhaustive(item: pytest.Item) -> bool:
    """True if other tests show with fewer cases what a test shows."""
    return item.get_closest_marker("exhaustive") is not None


def repeated_forms(items: list[pytest.Item]) -> set[pytest.Item]:
    """Tests of a graph that is "random" in another form, but the first of a function.

    The form of edges is over when they are sorted, before anything else of a call is seen. Every
    backend and operator meets each form with the first of all other parameters.
    """
    met, found = set(), set()
    for item in items:
        call = getattr(item, "callspec", None)
        if call is None or str(call.params.get("case")) not in ("int32", "strided"):
            continue
        function = item.nodeid.partition("[")[0]
        first = (function, *(str(call.params.get(key)) for key in ("case", "backend", "name")))
        if first in met:
            found.add(item)
        met.add(first)
    return found


@pytest.hookimpl(trylast=True)  # pairs are those of the tests that nothing else leaves out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--emulate"):
        _leave_out(config, items, emulated)
    elif not config.getoption("--repeats"):
        _leave_out(config, items, repeats)
    if not config.getoption("--exhaustive"):
        _leave_out(config, items, exhaustive)
        _leave_out(config, items, repeated_forms(items).__contains__)
        _leave_out(config, items, pairs.left_out(items).__contains__)


def _leave_out(
    config: pytest.Config, items: list[pytest.Item], condition: Callable[[pytest.Item], bool]
) -> None:
    config.hook.pytest_deselected(items=[item for item in items if condition(item)])
    items[:] = [item for item in items if not condition(item)]


def pytest_collection_finish() -> None:
    """Have no collection of garbage look through what was imported and collected.

    It lives as long as the process, and is so much that each would take a quarter of a second.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


EMULATED = pytest.param("simt", marks=pytest.mark.emulated)
BACKENDS = ("cpu", "reference", "scatter", EMULATED)


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


@pytest.fixture
def tf32_allowed() -> Iterator[None]:
    """Products of matrices on GPUs may round float32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture
def forking_interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs that are started by ``sys.executable`` begin with torch and PyG imported."""
    with interpreter(os.environ) as executable:
        monkeypatch.setattr(sys, "executable", str(executable))
        yield


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same random inputs in every run, whichever tests run before."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def leave_nothing_enabled() -> Iterator[None]:
    """Every test starts and ends with upstream's own code, no status and no graphs of others."""
    fastgraph.disable()
    fastgraph.status().reset()
    REPEATS.clear()
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


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[Aggregation]:
    """The aggregations of layers that are computed from here on."""
    found: list[Aggregation] = []
    compute = Aggregation.compute

    def recording(aggregation: Aggregation) -> Tensor:
        found.append(aggregation)
        return compute(aggregation)

    monkeypatch.setattr(Aggregation, "compute", recording)
    return found
