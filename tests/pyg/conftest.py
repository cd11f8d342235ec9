"""Settings and layers that the tests of routes share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch_geometric.nn import GraphConv, SAGEConv

import fastgraph
from fastgraph.graphs.witness import Checksum
from fastgraph.pyg import traced

# PyG renders a class's `propagate` from its first instance in the process. Whether it can use
# `message_and_aggregate` is decided there, so a first instance with an unusual aggregation would
# change what later tests compare with.
SAGEConv(1, 1)
GraphConv(1, 1)


@pytest.fixture
def nothing_known() -> None:
    """Nothing is known of the layers of other tests, whose messages were traced."""
    traced.KNOWN.clear()


@pytest.fixture
def sampling_enabled() -> Iterator[None]:
    """PyG's loaders sample by ours."""
    with fastgraph.enabled():
        yield


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of elements of tensors whose content was compared."""
    compared: list[int] = []
    upstream = Checksum.confirms

    def confirms(self: Checksum, tensors: Any) -> bool:
        compared.extend(tensor.numel() for tensor in tensors)
        return upstream(self, tensors)

    monkeypatch.setattr(Checksum, "confirms", confirms)
    return compared
