"""Which of several kernels computes a product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgraph import Graph, settings
from fastgraph.backends import reference, sparse
from fastgraph.backends.fastest import FastestSpmm
from tests.graphs import random_edges

GRAPH_ARGUMENTS = random_edges(20, 20, 100), 20, 20


class Kernels:
    """Two kernels that count their calls, and a clock that finds the second one faster."""

    def __init__(self) -> None:
        self.calls = [0, 0]
        self.measured = 0
        self.spmm = FastestSpmm([self.first, self.second], self.seconds)

    def first(self, *arguments: Any) -> Tensor:
        self.calls[0] += 1
        return reference.spmm(*arguments)

    def second(self, *arguments: Any) -> Tensor:
        self.calls[1] += 1
        return sparse.spmm(*arguments)

    def seconds(self, call: Callable[[], Tensor]) -> float:
        before = list(self.calls)
        call()
        self.measured += 1
        return 2.0 if self.calls[0] > before[0] else 1.0


@pytest.fixture
def kernels() -> Kernels:
    return Kernels()


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_current", settings.current().replace(measure=True))


def product(kernels: Kernels, graph: Graph, width: int = 5, **other: Any) -> None:
    arguments = {"weight": None, "reduce": "sum", "transpose": False, **other}
    x = torch.randn(20, width)
    torch.testing.assert_close(
        kernels.spmm(graph, x, **arguments), reference.spmm(graph, x, **arguments)
    )


def test_the_first_kernel_computes_unless_asked(kernels: Kernels) -> None:
    product(kernels, Graph(*GRAPH_ARGUMENTS))
    assert (kernels.calls, kernels.measured) == ([1, 0], 0)


@pytest.mark.usefixtures("measuring")
def test_each_graph_and_kind_of_product_is_measured_once(kernels: Kernels) -> None:
    graph = Graph(*GRAPH_ARGUMENTS)
    kinds: list[dict[str, Any]] = [
        {},
        {"width": 7},
        {"weight": torch.rand(100)},
        {"reduce": "mean"},
        {"transpose": True},
    ]
    for _ in range(3):
        for kind in kinds:
            product(kernels, graph, **kind)
    assert kernels.measured == 2 * len(kinds)
    assert kernels.calls == [len(kinds), len(kinds) + 3 * len(kinds)]
    product(kernels, Graph(*GRAPH_ARGUMENTS))
    product(kernels, graph.renumbered())
    assert kernels.measured == 2 * len(kinds) + 4


@pytest.mark.usefixtures("measuring")
def test_deterministic_algorithms_leave_no_choice(kernels: Kernels) -> None:
    graph = Graph(*GRAPH_ARGUMENTS)
    product(kernels, graph)
    calls = list(kernels.calls)
    torch.use_deterministic_algorithms(True)
    try:
        product(kernels, graph)
    finally:
        torch.use_deterministic_algorithms(False)
    assert kernels.calls == [calls[0] + 1, calls[1]]
