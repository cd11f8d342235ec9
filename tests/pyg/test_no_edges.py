"""Messages on graphs without edges, of which some raise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import EdgeConv, FeaStConv, GENConv, MessagePassing

import fastgraph
from tests.graphs import random_edges

# What a route asks of its arguments is the same for every backend.
pytestmark = pytest.mark.repeats

NODES, CHANNELS = 6, 4
NO_EDGES = torch.empty(2, 0, dtype=torch.int64)


class Heads(MessagePassing):
    """A layer that leaves it to torch how many channels a head has."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return torch.tanh(x_j.view(x_j.shape[0], 2, -1)).flatten(1)


RAISING = {
    "FeaStConv": lambda: FeaStConv(CHANNELS, CHANNELS, heads=2, add_self_loops=False),
    "Heads": Heads,
}


def _message_of_error(layer: Any, x: Tensor) -> str:
    with pytest.raises(RuntimeError) as error:
        layer(x, NO_EDGES)
    return str(error.value)


@pytest.mark.parametrize("is_known", [False, True], ids=["at first", "after a call with edges"])
@pytest.mark.parametrize("name", RAISING)
def test_a_message_that_raises_without_edges_does(name: str, is_known: bool) -> None:
    layer, x = RAISING[name](), torch.randn(NODES, CHANNELS)
    expected = _message_of_error(layer, x)
    with fastgraph.enabled(min_edges=0):
        for _ in range(3 * is_known):
            layer(x, random_edges(NODES, NODES, 20))
        fastgraph.status().reset()
        assert _message_of_error(layer, x) == expected
    assert fastgraph.status().row(type(layer).__name__).reasons == {
        "its message raises without edges": 1
    }


@pytest.mark.parametrize(
    "layer", [EdgeConv(nn.Linear(2 * CHANNELS, 3)), GENConv(CHANNELS, 3)], ids=type
)
def test_others_keep_their_route(layer: Any) -> None:
    x = torch.randn(NODES, CHANNELS)
    expected = layer(x, NO_EDGES)
    fastgraph.status().reset()
    with fastgraph.enabled(min_edges=0):
        found = layer(x, NO_EDGES)
    assert fastgraph.status().row(type(layer).__name__).routed == 1
    torch.testing.assert_close(found, expected)
