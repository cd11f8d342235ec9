"""All columns of DGL's layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import dgl
import torch
from dgl import nn as dglnn
from dgl.dataloading import DataLoader, NeighborSampler
from torch import Tensor, nn

import fastgraph
from fastgraph import Graph
from measure.cell import Effort, Run
from measure.dgl_layers import NO_ROUTE, Products, arguments_of, build, without_products
from measure.kernels import beside_native, native_sum
from measure.routing import ColumnError, ordering_after, ours_enabled
from measure.timing import Contestant, interleave

# Norm of the difference over the norm of upstream's value, as for PyG's layers.
_TOLERANCE = 1e-3
# A softmax does not change when all scores of a row do, so this is 0 but for roundings.
_ZERO_GRADIENTS = ("gradient of key.bias",)

_CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "upstream": nullcontext,
    "ours": ours_enabled,
}


@contextmanager
def _expected(layer: str, ours: bool) -> Iterator[None]:
    """Fail unless calls of the layer are routed in the block, or fastgraph sees none.

    Of a user's model something must be routed; what has no operator falls back.
    """
    fastgraph.status().reset()
    yield
    rows = fastgraph.status().rows
    if layer not in NO_ROUTE:
        rows = [fastgraph.status().row(layer.partition(" ")[0])]
    routed = sum(row.routed for row in rows)
    fell_back = 0 if layer in NO_ROUTE and ours else sum(row.fell_back for row in rows)
    if fell_back or bool(routed) is not ours:
        raise ColumnError(f"{layer}: expected routed={ours}:\n{fastgraph.status()}")


def _agree(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    largest = max(value.norm() for value in expected.values())
    for what, value in expected.items():
        norm = largest if what in _ZERO_GRADIENTS else value.norm().clamp(min=1e-30)
        error = float((found[what] - value).norm() / norm)
        if not error < _TOLERANCE:
            raise ColumnError(f"{what} differs from upstream's by {error:.1e} of its norm")


def measure_cell(graph: Any, layer: str, channels: int, effort: Effort) -> dict[str, Any]:
    """Milliseconds of forward and backward: the layer, message passing alone, dense products."""
    torch.manual_seed(0)
    x = torch.randn(graph.num_nodes(), channels, requires_grad=True)
    more = arguments_of(layer, graph)
    whole = build(layer, channels)
    products = Products(whole, x)
    dense = [Contestant("dense", products.step, products.prepare)] if len(products) else []
    alone = without_products(build(layer, channels))
    return {
        "layer": _beside(layer, whole, graph, x, more, dense, effort),
        "message_passing": _beside(layer, alone, graph, x, more, [], effort),
    }


def _beside(
    layer: str,
    module: nn.Module,
    graph: Any,
    x: Tensor,
    more: tuple[Tensor, ...],
    others: list[Contestant],
    effort: Effort,
) -> dict[str, dict[str, float]]:
    contestants, expected = [], None
    for column, context in _CONTEXTS.items():
        run = Run(module, x, graph, forward=lambda x, graph: module(graph, x, *more))
        contestant = Contestant(column, run.step, run.prepare, context)
        with _expected(layer, column == "ours"):
            (contestant.estimate,) = contestant.turn()
            with ordering_after(0):  # rows of a graph are put in order once
                (contestant.estimate,) = contestant.turn()
        if expected is None:
            expected = run.results()
        else:
            _agree(run.results(), expected)
        run.prepare()
        contestants.append(contestant)
    contestants += others
    interleave(contestants, rounds=effort.rounds, budget=effort.budget)
    return {contestant.name: contestant.spread.to_json() for contestant in contestants}


class _Sage(nn.Module):
    """Two layers of GraphSAGE on blocks."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([dglnn.SAGEConv(channels, channels, "mean") for _ in "12"])

    def forward(self, blocks: list[Any], x: Tensor) -> Tensor:
        for layer, block in zip(self.layers, blocks, strict=True):
            x = layer(block, x).relu()
        return x

    def without_neighbours(self, blocks: list[Any], x: Tensor) -> Tensor:
        """All but the aggregation: products of the shapes of the layers'."""
        for layer, block in zip(self.layers, blocks, strict=True):
            x = x[: block.num_dst_nodes()]
            x = (layer.fc_self(x) + layer.fc_neigh(x)).relu()
        return x


def measure_sampled(graph: Any, channels: int, effort: Effort) -> dict[str, Any]:
    """Milliseconds of an epoch of GraphSAGE on sampled neighbours.

    Beside them those of sampling alone (``sampler``), and of the epoch without the aggregation
    (``dense``): nothing else of it changes when its layers are routed.
    """
    torch.manual_seed(0)
    x, model = torch.randn(graph.num_nodes(), channels), _Sage(channels)
    nodes = torch.randperm(graph.num_nodes())[:8192]
    batches = DataLoader(graph, nodes, NeighborSampler([10, 10]), batch_size=1024)

    def sample() -> None:
        for _ in batches:
            pass

    def train(forward: Callable[[list[Any], Tensor], Tensor]) -> None:
        for sources, _, blocks in batches:
            model.zero_grad(set_to_none=True)
            forward(blocks, x[sources]).sum().backward()

    contestants = [
        Contestant("sampler", sample),
        Contestant("dense", functools.partial(train, model.without_neighbours)),
    ]
    epoch = functools.partial(train, model)
    contestants += [Contestant(name, epoch, context=c) for name, c in _CONTEXTS.items()]
    with _expected("SAGEConv", True):
        interleave(contestants, rounds=effort.rounds, budget=2 * effort.budget)
    return {contestant.name: contestant.spread.to_json() for contestant in contestants}


def measure_routed_call(graph: Any, channels: int, calls: int) -> dict[str, Any]:
    """Forward of calls that are nothing but a sum, beside the native call, in microseconds."""
    torch.manual_seed(0)
    x = torch.randn(graph.num_nodes(), channels)
    sources, destinations = graph.edges()
    size = graph.num_nodes()
    rows = Graph(torch.stack([sources, destinations]), size, size).by_destination
    layer = dglnn.GraphConv(channels, channels, norm="none", weight=False, bias=False)
    routed: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
        "GraphConv": ("GraphConv", lambda x: layer(graph, x)),
        "copy_u_sum": ("dgl.gspmm", lambda x: dgl.ops.copy_u_sum(graph, x)),
    }
    result: dict[str, Any] = {}
    for name, (counted_as, call) in routed.items():
        for training in (False, True):
            features = x.clone().requires_grad_(training)
            mode = "training" if training else "inference"
            result[f"{name} {mode}"] = beside_native(
                lambda: native_sum(rows, x),
                functools.partial(call, features),
                calls,
                functools.partial(_expected, counted_as, True),
            )
    return result
