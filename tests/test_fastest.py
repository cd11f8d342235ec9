"""Which of two kernels computes a product."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgraph import Graph, settings
from fastgraph.backends import reference, sparse
from fastgraph.machine import capture
from fastgraph.tune.fastest import FastestSpmm, seconds_on_gpu
from tests.graphs import random_edges

EDGES = random_edges(20, 20, 300).unique(dim=1)


class Rival:
    """The other one: as the sparse backend."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def __call__(self, *arguments: Any) -> Tensor:
        self.kernels.calls[1] += 1
        if self.kernels.out_of_memory is not None:
            raise self.kernels.out_of_memory("of the other one")
        return sparse.spmm(*arguments)

    def fits(
        self, graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, transpose: bool
    ) -> bool:
        return sparse.fits(graph, x, transpose)

    def forget(self, graph: Graph, x: Tensor, transpose: bool) -> None:
        self.kernels.forgotten += 1


class Kernels:
    """Two kernels that count their calls, and a clock that finds the other one faster."""

    def __init__(self) -> None:
        self.calls = [0, 0]
        self.measured = self.forgotten = 0
        self.seconds_of_other = 1.0
        self.out_of_memory: type[Exception] | None = None
        self.spmm = FastestSpmm(
            self.kernel, {"other": Rival(self)}, self.seconds, lambda x: "a device"
        )

    def kernel(self, *arguments: Any) -> Tensor:
        self.calls[0] += 1
        return reference.spmm(*arguments)

    def seconds(self, call: Callable[[], Tensor]) -> float:
        before = list(self.calls)
        call()
        self.measured += 1
        return 2.0 if self.calls[0] > before[0] else self.seconds_of_other


@pytest.fixture
def kernels() -> Kernels:
    return Kernels()


@pytest.fixture
def graph() -> Graph:
    return Graph(EDGES, 20, 20)


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_current", settings.current().replace(measure=True))


def product(
    kernels: Kernels,
    graph: Graph,
    width: int = 5,
    dtype: torch.dtype = torch.float32,
    **other: Any,
) -> None:
    arguments = {"weight": None, "reduce": "sum", "transpose": False, **other}
    x = torch.randn(20, width, dtype=dtype)
    torch.testing.assert_close(
        kernels.spmm(graph, x, **arguments), reference.spmm(graph, x, **arguments)
    )


def test_the_other_one_computes_only_if_asked(kernels: Kernels, graph: Graph) -> None:
    product(kernels, graph)
    assert (kernels.calls, kernels.measured) == ([1, 0], 0)


@pytest.mark.usefixtures("measuring")
def test_each_graph_and_kind_of_product_is_measured_once(kernels: Kernels, graph: Graph) -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"width": 7},
        {"dtype": torch.float64},
        {"weight": torch.rand(EDGES.shape[1])},
        {"reduce": "mean"},
        {"transpose": True},
    ]
    for _ in range(3):
        for kind in kinds:
            product(kernels, graph, **kind)
    assert kernels.measured == 2 * len(kinds)
    assert kernels.calls == [len(kinds), len(kinds) + 3 * len(kinds)]
    product(kernels, Graph(EDGES, 20, 20))
    product(kernels, graph.renumbered())
    assert kernels.measured == 2 * len(kinds) + 4


@pytest.mark.usefixtures("measuring")
def test_deterministic_algorithms_leave_no_choice(kernels: Kernels, graph: Graph) -> None:
    product(kernels, graph)
    calls = list(kernels.calls)
    torch.use_deterministic_algorithms(True)
    try:
        product(kernels, graph)
    finally:
        torch.use_deterministic_algorithms(False)
    assert kernels.calls == [calls[0] + 1, calls[1]]


@pytest.mark.usefixtures("measuring")
def test_the_other_one_is_not_captured_in_a_cuda_graph(
    kernels: Kernels, graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    product(kernels, graph)
    monkeypatch.setattr(capture, "is_capturing", lambda *tensors: True)
    product(kernels, graph)
    product(kernels, graph, width=7)
    assert (kernels.calls, kernels.measured) == ([1 + 2, 2], 2)


@pytest.mark.usefixtures("measuring")
def test_what_the_slower_one_keeps_is_freed(kernels: Kernels, graph: Graph) -> None:
    product(kernels, graph)
    assert kernels.forgotten == 0
    kernels.seconds_of_other = 3.0
    for _ in range(2):
        product(kernels, graph, width=7)
    assert (kernels.forgotten, kernels.calls) == (1, [1 + 3, 2 + 1])


@pytest.mark.usefixtures("measuring")
@pytest.mark.parametrize("why", ["an edge twice", "no channels"])
def test_products_that_the_other_one_cannot_compute(
    kernels: Kernels, graph: Graph, why: str
) -> None:
    if why == "an edge twice":
        graph = Graph(torch.cat([EDGES, EDGES[:, :1]], dim=1), 20, 20)
    for _ in range(2):
        product(kernels, graph, width=0 if why == "no channels" else 5)
    assert kernels.calls[1] == 0


@pytest.mark.usefixtures("measuring")
def test_the_other_one_may_run_out_of_memory(kernels: Kernels, graph: Graph) -> None:
    kernels.out_of_memory = torch.OutOfMemoryError
    for _ in range(2):
        product(kernels, graph)
    assert (kernels.calls, kernels.forgotten) == ([3, 1], 1)


@pytest.mark.usefixtures("measuring")
def test_copies_of_the_graph_find_out_for_themselves(kernels: Kernels, graph: Graph) -> None:
    product(kernels, graph)
    for same in (copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        product(kernels, same)
    assert kernels.measured == 3 * 2


@pytest.mark.parametrize(("seconds", "least", "most"), [(0.001, 0.005, 0.02), (0.01, 0.02, 0.02)])
def test_a_gpu_sleeps_while_calls_are_queued(
    seconds: float, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it is not timed how long it waits for the host."""
    done: list[Any] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("mark")

        def synchronize(self) -> None:
            done.append("wait")

        def elapsed_time(self, end: Event) -> float:
            return 10.0

    def call() -> None:
        time.sleep(seconds)
        done.append("call")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", done.append)
    assert seconds_on_gpu(call) == 0.002
    assert done[:2] + done[3:] == ["call"] * 2 + ["mark"] + ["call"] * 5 + ["mark", "wait"]
    assert least <= done[2] / 2e9 <= most
