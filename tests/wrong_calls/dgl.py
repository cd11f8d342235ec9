"""DGL's layers in usual configurations."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.cuda.benchmarks import measure
from tests.dgl.graphs import dgl
from tests.graphs import random_edges
from tests.wrong_calls.cases import Case, Shapes, cases, recorded

_usual, _given = measure("dgl_usual"), measure("given")

CHANNELS = 8
NODES = 14
NAMES: tuple[str, ...] = tuple(_usual.LAYERS)


def layer_and_cases(name: str) -> tuple[nn.Module, list[Case]]:
    """A layer and its calls.

    Args:
        name: of :data:`NAMES`.
    """
    index = random_edges(NODES, NODES, 40)
    data = measure("graphs").GraphData("wrong calls", index, NODES)
    given = _given.Given(data, CHANNELS)
    config = _usual.LAYERS[name]
    torch.manual_seed(0)
    layer = config.build(given)
    arguments = recorded(layer, lambda recorder: config.call(recorder, given))
    shapes = Shapes(NODES, _usual.graph_of(given).num_edges(), _given.RELATIONS)
    return layer, cases(layer, arguments, shapes, _graphs)


def _graphs(good: Any) -> dict[str, Any]:
    """In place of a graph, by what may be wrong with it."""
    source, destination = good.edges()
    ends = (source, destination)
    two_relations = dgl.heterograph(
        {("a", "r", "a"): ([0, 1], [1, 0]), ("a", "s", "a"): ([0, 1], [1, 1])}
    )
    bipartite = dgl.heterograph(
        {("a", "to", "b"): (source, destination % 9)}, num_nodes_dict={"a": NODES, "b": 9}
    )
    few = destination[:2].unique()
    return {
        "zero in-degree": dgl.graph(([0, 1], [1, 0]), num_nodes=NODES),
        "no edges": dgl.graph(([], []), num_nodes=NODES),
        "no nodes": dgl.graph(([], []), num_nodes=0),
        "fewer nodes": dgl.graph((source % 9, destination % 9), num_nodes=9),
        "more nodes": dgl.graph(ends, num_nodes=NODES + 3),
        "fewer edges": dgl.graph((source[:-2], destination[:-2]), num_nodes=NODES),
        "two relations": two_relations,
        "bipartite": bipartite,
        "a block": dgl.to_block(good),
        "a block of few": dgl.to_block(dgl.in_subgraph(good, few), few),
        "without CSC": dgl.graph(ends, num_nodes=NODES).formats(["coo"]),
        "CSC alone": dgl.graph(ends, num_nodes=NODES).formats(["csc"]),
        "an edge_index": torch.stack(ends),
        "None": None,
        "a string": "edges",
        "a list": torch.stack(ends).tolist(),
        "int32": dgl.graph(ends, num_nodes=NODES).int(),
    }
