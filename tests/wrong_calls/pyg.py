"""PyG's classes, in their usual configurations and in others of those with a route of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric import EdgeIndex

from tests.cuda.benchmarks import measure
from tests.graphs import random_edges
from tests.wrong_calls.cases import Case, Shapes, cases, recorded
from tests.wrong_calls.values import changed

_usual, _others, _given = (measure(name) for name in ("pyg_usual", "pyg_usual_others", "given"))

SHAPES = Shapes(num_nodes=14, num_edges=40, num_kinds=_given.RELATIONS)
CHANNELS = 8  # features of edges are half as wide

Usual = Any


def _own(build: Callable[[], nn.Module], *, edges: str | None = None) -> Usual:
    def call(layer: Any, given: Any) -> Any:
        more = {} if edges is None else {edges: getattr(given, _VALUES[edges])}
        return layer(given.x, given.edges, **more)

    return _given.Usual(lambda _: build(), call)


_VALUES = {"edge_attr": "features", "edge_weight": "weight"}
_C, _F = CHANNELS, _given.EDGE_FEATURES
_ATTENTION = {"GATConv": pyg.GATConv, "GATv2Conv": pyg.GATv2Conv}

OPTIONS: dict[str, Usual] = {
    "GCNConv, cached": _own(lambda: pyg.GCNConv(_C, 5, cached=True)),
    "GCNConv, improved": _own(lambda: pyg.GCNConv(_C, 5, improved=True)),
    "GCNConv, not normalised": _own(lambda: pyg.GCNConv(_C, 5, normalize=False)),
    "GCNConv, no loops": _own(lambda: pyg.GCNConv(_C, 5, add_self_loops=False)),
    "GCNConv, mean": _own(lambda: pyg.GCNConv(_C, 5, aggr="mean")),
    "GCNConv, max": _own(lambda: pyg.GCNConv(_C, 5, aggr="max")),
    "GCNConv, backwards": _own(lambda: pyg.GCNConv(_C, 5, flow="target_to_source")),
    "SAGEConv, project": _own(lambda: pyg.SAGEConv(_C, 5, project=True)),
    "SAGEConv, no root": _own(lambda: pyg.SAGEConv(_C, 2, root_weight=False)),
    "SAGEConv, backwards": _own(lambda: pyg.SAGEConv(_C, 5, flow="target_to_source")),
    "GraphConv, max": _own(lambda: pyg.GraphConv(_C, 5, aggr="max")),
    "LGConv, not normalised": _own(lambda: pyg.LGConv(normalize=False), edges="edge_weight"),
    "SimpleConv, combined": _own(lambda: pyg.SimpleConv("max", combine_root="cat")),
    "SimpleConv, weighted": _own(lambda: pyg.SimpleConv("mean"), edges="edge_weight"),
    "SGConv, weighted": _own(lambda: pyg.SGConv(_C, 5, K=2), edges="edge_weight"),
    "ChebConv, weighted": _own(lambda: pyg.ChebConv(_C, 5, K=3), edges="edge_weight"),
    "TransformerConv, beta": _own(lambda: pyg.TransformerConv(_C, 3, heads=2, beta=True)),
    "TransformerConv, mean": _own(
        lambda: pyg.TransformerConv(_C, 3, concat=False, root_weight=False)
    ),
} | {
    f"{name}, {what}": _own(lambda cls=cls, options=options: cls(_C, 3, **options), edges=edges)
    for name, cls in _ATTENTION.items()
    for what, options, edges in (
        ("no loops", {"heads": 2, "add_self_loops": False}, None),
        ("edges, no loops", {"edge_dim": _F, "add_self_loops": False}, "edge_attr"),
        ("mean", {"heads": 2, "concat": False, "residual": True}, None),
    )
}
"""Configurations beside the usual ones, of the layers with routes of their own."""

CONFIGURATIONS: dict[str, Usual] = {
    **_usual.CONVS,
    **OPTIONS,
    **_others.AGGREGATIONS,
    **_others.POOLING,
}
"""By name; a class of a pair of features stands twice."""

PAIRS = {f"{name}, pair": one for name, one in _usual.CONVS.items() if one.takes_pair}
NAMES = (*CONFIGURATIONS, *PAIRS)


def layer_and_cases(name: str) -> tuple[nn.Module, list[Case]]:
    """A layer and its calls.

    Args:
        name: of :data:`NAMES`.

    Raises:
        ImportError: upstream lacks a package for it.
    """
    config = PAIRS.get(name) or CONFIGURATIONS[name]
    targets = 9 if name in PAIRS else None
    index = random_edges(SHAPES.num_nodes, targets or SHAPES.num_nodes, SHAPES.num_edges)
    data = measure("graphs").GraphData("wrong calls", index, SHAPES.num_nodes)
    given = _given.Given(data, CHANNELS, num_targets=targets)
    torch.manual_seed(0)
    layer = config.build(given)
    arguments = recorded(layer, lambda recorder: config.call(recorder, given))
    found = cases(layer, arguments, SHAPES)
    if arguments.get("edge_index") is given.edges:
        found += [
            Case(f"edge_index: EdgeIndex, {what}", ((), {**arguments, "edge_index": wrong}))
            for what, wrong in _edge_indices(index, (SHAPES.num_nodes, targets)).items()
        ]
    return layer, found


def _edge_indices(index: Tensor, size: tuple[int, int | None]) -> dict[str, EdgeIndex]:
    """In place of an ``edge_index``, of a graph of this size."""
    num_src, num_dst = size[0], size[1] or size[0]
    by_column = index[:, index[1].argsort(stable=True)]
    sized = {"sort_order": "col", "sparse_size": (num_src, num_dst)}
    return {
        "not sorted": EdgeIndex(index),
        "too large": EdgeIndex(changed(index, (1, 7), num_dst)),
        "sorted": EdgeIndex(by_column, **sized),
        "sorted, without a size": EdgeIndex(by_column, sort_order="col"),
        "sorted, more nodes": EdgeIndex(
            by_column, sort_order="col", sparse_size=(num_src + 3, num_dst + 3)
        ),
        "sorted, fewer nodes": EdgeIndex(
            by_column, sort_order="col", sparse_size=(num_src - 2, num_dst - 2)
        ),
        "by sources": EdgeIndex(index[:, index[0].argsort(stable=True)], sort_order="row"),
        "said to be sorted": EdgeIndex(index, **sized),
        "int32": EdgeIndex(by_column.int(), **sized),
    }
