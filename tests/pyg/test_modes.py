"""Modes of torch that count, record or change operations meet those of upstream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from torch_geometric.nn import (
    GATConv,
    GATv2Conv,
    GCNConv,
    GPSConv,
    LGConv,
    SAGEConv,
    TransformerConv,
    global_max_pool,
)

import fastgraph
from tests.graphs import random_edges
from tests.pyg.traced_layers import Scaled

# No kernel of ours runs in what is left to upstream.
pytestmark = pytest.mark.repeats

NODES, CHANNELS = 20, 4
EDGES = random_edges(NODES, NODES, 90)
WATCHED = "a mode of torch looks at all operations"

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "sums": lambda: LGConv(normalize=False),
    "GCNConv": lambda: GCNConv(CHANNELS, 5),
    "SAGEConv": lambda: SAGEConv(CHANNELS, 5, aggr="max"),
    "several aggregations": lambda: SAGEConv(CHANNELS, 5, aggr=["mean", "std"]),
    "GATConv": lambda: GATConv(CHANNELS, 3, heads=2),
    "GATv2Conv": lambda: GATv2Conv(CHANNELS, 3, heads=2),
    "TransformerConv": lambda: TransformerConv(CHANNELS, 3, heads=2),
    "GPSConv": lambda: GPSConv(CHANNELS, None, heads=2).eval(),
    "traced": Scaled,
}


def _changed(name: str, found: Any) -> Any:
    """The result of an operation, changed if it is one that upstream composes layers of."""
    names = ("index_select", "scatter", "softmax", "mm", "addmm", "linear")
    is_of_upstream = name.startswith(names)
    is_value = isinstance(found, Tensor) and found.is_floating_point()
    return found * 1.5 if is_of_upstream and is_value else found


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _changed(getattr(func, "__name__", ""), func(*args, **(kwargs or {})))


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        return _changed(name, func(*args, **(kwargs or {})))


def _features() -> Tensor:
    return torch.randn(NODES, CHANNELS, generator=torch.Generator().manual_seed(0)).double()


@contextmanager
def _layer(name: str) -> Iterator[tuple[nn.Module, Tensor, Tensor]]:
    torch.manual_seed(0)
    layer, x = LAYERS[name]().double(), _features().requires_grad_()
    plain = layer(x, EDGES).detach()
    with fastgraph.enabled(min_edges=0):
        fastgraph.status().reset()
        yield layer, x, plain


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("mode", [Functions, Operators])
def test_modes_that_change_what_upstream_computes(mode: Any, name: str) -> None:
    torch.manual_seed(0)
    layer, x = LAYERS[name]().double(), _features().requires_grad_()
    plain = layer(x, EDGES)
    with mode():
        expected = layer(x, EDGES)
    assert not torch.allclose(plain, expected)
    with fastgraph.enabled(min_edges=0):
        layer(x, EDGES)  # what is kept of it is not for the next call
        fastgraph.status().reset()
        with mode():
            found = layer(x, EDGES)
        rows = fastgraph.status().rows
        assert sum(row.routed for row in rows) == 0
        assert WATCHED in {reason for row in rows for reason in row.reasons}
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(layer(x, EDGES), plain)


@pytest.mark.parametrize("mode", [Functions, Operators])
def test_functions_outside_message_passing(mode: Any) -> None:
    x, batch = _features(), torch.arange(NODES) // 7
    with mode():
        expected = global_max_pool(x, batch)
    with fastgraph.enabled(min_edges=0), mode():
        torch.testing.assert_close(global_max_pool(x, batch), expected)


def test_a_counter_of_operations_counts_those_of_upstream() -> None:
    layer, x = TransformerConv(CHANNELS, 3, edge_dim=2), _features().float()
    features = torch.randn(EDGES.shape[1], 2)
    counts = []
    for is_enabled in (False, True):
        with FlopCounterMode(display=False) as counter:
            if is_enabled:
                with fastgraph.enabled(min_edges=0):
                    layer(x, EDGES, features).sum().backward()
            else:
                layer(x, EDGES, features).sum().backward()
        counts.append(counter.get_flop_counts())
    assert counts[0] == counts[1] and counts[0]["Global"]


@pytest.mark.parametrize("name", LAYERS)
def test_a_default_device_keeps_routes(name: str) -> None:
    with _layer(name) as (layer, x, plain), torch.device("cpu"):
        torch.testing.assert_close(layer(x, EDGES), plain)
        assert sum(row.routed for row in fastgraph.status().rows) == 1


def test_a_default_device_beside_another_mode() -> None:
    with _layer("GATConv") as (layer, x, _), Functions(), torch.device("cpu"):
        layer(x, EDGES)
        assert fastgraph.status().row("GATConv").reasons == {WATCHED: 1}
