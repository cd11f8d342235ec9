"""What the tests of routes share."""

from __future__ import annotations

from typing import Any

import pytest
from torch_geometric.nn import GraphConv, SAGEConv

from fastgraph import Graph

# PyG renders a class's `propagate` from its first instance in the process. Whether it can use
# `message_and_aggregate` is decided there, so a first instance with an unusual aggregation would
# change what later tests compare with.
SAGEConv(1, 1)
GraphConv(1, 1)


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
