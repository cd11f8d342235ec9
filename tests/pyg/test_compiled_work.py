"""Compiled layers do no more than uncompiled ones: as many passes of kernels, and products."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, GINConv, SAGEConv, TransformerConv

import fastgraph
from fastgraph.registry.registry import Registry
from tests.graphs import random_edges
from tests.wanted import PRODUCTS

EDGES = random_edges(12, 12, 40)

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "GCN": lambda: GCNConv(16, 16),
    "SAGE": lambda: SAGEConv(16, 16),
    "SAGE max": lambda: SAGEConv(16, 16, aggr="max"),
    "GIN": lambda: GINConv(nn.Linear(16, 16)),
    "GAT": lambda: GATConv(16, 16),
    "GATv2": lambda: GATv2Conv(16, 16),
    "Transformer": lambda: TransformerConv(16, 16),
}


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the kernel of each operator is taken."""
    taken: Counter[str] = Counter()
    upstream = Registry.kernel

    def kernel(self: Registry, operator: str, *where: Any) -> Any:
        taken[operator] += 1
        return upstream(self, operator, *where)

    monkeypatch.setattr(Registry, "kernel", kernel)
    return taken


@pytest.mark.parametrize("name", LAYERS)
def test_a_step_takes_no_more(name: str, passes: Counter[str]) -> None:
    torch.manual_seed(0)
    conv = LAYERS[name]()
    x = torch.randn(12, 16, requires_grad=True)

    def work(layer: Any) -> tuple[Tensor, Counter[str], int]:
        def step() -> Tensor:
            conv.zero_grad()
            x.grad = None
            layer(x, EDGES).square().sum().backward()  # all gradients: a compiled pass gives all
            assert x.grad is not None
            return x.grad

        for _ in range(2):
            step()  # compiles, and remembers what is remembered of a graph
        passes.clear()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            found = step()
        names = (event.name.partition("::")[2] for event in profile.events())
        return found, passes.copy(), sum(called in PRODUCTS for called in names)

    with fastgraph.enabled(min_edges=0):
        expected, plain_passes, plain_products = work(conv)
        found, compiled_passes, products = work(torch.compile(conv, backend="aot_eager"))
    torch.testing.assert_close(found, expected)
    assert sum(plain_passes.values()) >= 2
    assert compiled_passes.total() >= 2 and compiled_passes <= plain_passes
    assert products <= plain_products
