"""DGL, or why it cannot be tested, and its graphs of the cases that every route must survive."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgraph.dgl
from fastgraph.upstream import LAYERS
from tests.graphs import Case, all_cases, random_edges, square_cases

os.environ.setdefault("DGLBACKEND", "pytorch")  # or else DGL writes a file at home
fastgraph.dgl.fix_import()
dgl = pytest.importorskip("dgl", reason="DGL is not installed: see `make test-dgl`")


def graph(edge_index: Tensor, num_src: int, num_dst: int | None = None) -> Any:
    """A homogeneous DGL graph, or a bipartite one with one relation."""
    ends = tuple(edge_index)
    if num_dst is None:
        return dgl.graph(ends, num_nodes=num_src, idtype=edge_index.dtype)
    sizes = {"source": num_src, "destination": num_dst}
    relation = {("source", "to", "destination"): ends}
    return dgl.heterograph(relation, num_nodes_dict=sizes, idtype=edge_index.dtype)


def of_case(case: Case) -> Any:
    bipartite = case.num_src != case.num_dst
    return graph(case.edge_index, case.num_src, case.num_dst if bipartite else None)


def block(case: Case) -> Any:
    """A sampled block: some nodes, and all whose edges they have."""
    return dgl.to_block(of_case(case), dst_nodes=case.edge_index[1].unique())


def routed_classes() -> set[type]:
    """The classes of layers with a route, of those that this version of DGL has."""
    from dgl.nn.pytorch import conv

    layers = LAYERS["dgl.nn.pytorch.conv"]
    return {getattr(conv, name) for name, _, _ in layers if hasattr(conv, name)}


def without_self_loops(case: Case) -> Any:
    """The graph with edges from a node to itself led to the next node."""
    source, destination = case.edge_index
    return graph(
        torch.stack([source, (destination + (source == destination)) % case.num_src]), case.num_src
    )


SQUARE = [case for case in square_cases() if case.name != "no_nodes"]
ALL = [case for case in all_cases() if case.name != "no_nodes"]
BLOCKS = [case for case in SQUARE if case.num_edges > 0]
ORDINARY = Case("ordinary", random_edges(30, 30, 150), 30, 30)
