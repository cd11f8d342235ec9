"""Rows of several small tensors go to other ranks beside each other, in the messages of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn

import fastgraph
import fastgraph.dist as fgd
from fastgraph import ops
from fastgraph.dist.operators.cost import Cluster, Distribution, Layer, RowOperand
from fastgraph.dist.operators.halo.cost import by_halo
from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.world import WORLD
from tests.dist.graphs import NUM_FEATURES, graph, uneven

D, C = NUM_FEATURES, 6


class WithKeys(nn.Module):
    """Attention whose keys have no gradient, and so send none back."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Linear(D, D)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        query, keys, values = (y.view(-1, 2, 4) for y in (x, x.detach(), self.values(x)))
        return ops.attention(query, keys, values, edge_index)[0].flatten(1)


class Penalty(nn.Module):
    """The gradient of attention, which has one itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = gnn.TransformerConv(D, C, heads=2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        out = self.conv(x, edge_index)
        (grad,) = torch.autograd.grad(out.square().sum(), [x], create_graph=True)
        return grad


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "TransformerConv": lambda: gnn.TransformerConv(D, C, heads=2),
    "CGConv": lambda: gnn.CGConv(D),
    "ResGatedGraphConv": lambda: gnn.ResGatedGraphConv(D, C),
    "GeneralConv, of two widths": lambda: gnn.GeneralConv(D, C, attention=True, heads=2),
    "keys without a gradient": WithKeys,
    "second derivatives": Penalty,
}


class Pass(NamedTuple):
    """Of a layer: its output on this rank and gradients, and exchanges forward and backward."""

    results: list[Tensor]
    exchanges: list[int]


def computed(name: str, data: Any) -> Pass:
    torch.manual_seed(0)
    layer = LAYERS[name]()
    x = data.x.detach().clone().requires_grad_()
    layer(x, data.edge_index)  # plans
    counts = []
    fgd.COUNTS.reset()
    out = layer(x, data.edge_index)
    counts.append(fgd.COUNTS.calls["all_to_all"])
    fgd.COUNTS.reset()
    out.square().sum().backward()
    counts.append(fgd.COUNTS.calls["all_to_all"])
    grads = [p.grad for p in (x, *layer.parameters()) if p.grad is not None]
    return Pass([fgd.whole(y.detach()) for y in (out, *grads)], counts)


def on_this_rank() -> dict[str, tuple[Pass, Pass]]:
    """Each layer with its tensors together, then one after the other."""
    torch.set_default_dtype(torch.float64)
    data = fgd.shard(graph(), parts=uneven(WORLD.size), mode="halo")
    found = {}
    with fastgraph.enabled():
        for name in LAYERS:
            together = computed(name, data)
            with mock.patch.object(transport, "_LARGE", 0):
                found[name] = together, computed(name, data)
    return found


@pytest.fixture(scope="module", params=[2, 3])
def found(request: Any, once_on_ranks: Any) -> list[dict[str, tuple[Pass, Pass]]]:
    found: list[dict[str, tuple[Pass, Pass]]] = once_on_ranks(on_this_rank, request.param)
    return found


@pytest.mark.parametrize("name", LAYERS)
def test_rows_have_the_same_bits_in_fewer_messages(found: list[Any], name: str) -> None:
    for of_rank in found:
        together, in_turns = of_rank[name]
        for one, other in zip(together.results, in_turns.results, strict=True):
            assert torch.equal(one, other)
        if name == "keys without a gradient":
            assert (together.exchanges, in_turns.exchanges) == ([1, 1], [2, 1])
        elif name != "second derivatives":
            assert (together.exchanges, in_turns.exchanges) == ([1, 1], [2, 2])


def in_bytes() -> list[list[Tensor]]:
    """Tensors of several dtypes and widths, received in new memory and in memory that is given."""
    rank, size = WORLD.rank, WORLD.size
    tensors = [
        torch.arange(2 * size).view(size, 2) + 10 * rank,
        torch.full((size, 0), 1.0),
        torch.full((size,), rank % 2 == 0),
        torch.full((size, 1, 3), float(rank), dtype=torch.float64).expand(size, 1, 3),
    ]
    counts = [1] * size
    into = [torch.empty(x.shape, dtype=x.dtype) for x in tensors]
    transport.all_to_all_together(tensors, counts, counts, into)
    return [transport.all_to_all_together(tensors, counts, counts), into]


def test_tensors_of_any_dtypes_and_widths_travel_together(once_on_ranks: Any) -> None:
    for rank, of_rank in enumerate(once_on_ranks(in_bytes, 2)):
        for numbers, nothing, flags, values in of_rank:
            assert numbers.tolist() == [[2 * rank, 2 * rank + 1], [2 * rank + 10, 2 * rank + 11]]
            assert nothing.shape == (2, 0)
            assert flags.tolist() == [True, False]
            assert values.tolist() == [[[0.0] * 3], [[1.0] * 3]]


@pytest.mark.parametrize(("halo", "exchanges"), [(8, 2), (2**20, 4)])
def test_the_cost_counts_large_tensors_one_by_one(halo: int, exchanges: int) -> None:
    operands = tuple(RowOperand("sources", True, 8, True, number) for number in range(2))
    layer, pair = Layer(operands, heads=2, channels=1, out=8), [2**21] * 2
    rows = Distribution(pair, pair, pair, [halo] * 2, [halo] * 2, {})
    assert by_halo(layer, rows, Cluster(1e-5, 1e9, 1e-9, 1e-9)).collectives == exchanges
