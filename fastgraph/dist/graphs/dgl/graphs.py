"""Sharding a ``DGLGraph``."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Protocol, TypeGuard

import torch
from dgl.heterograph import DGLGraph
from torch import Tensor

from fastgraph.dist.graphs.dgl.index import ShardedIndex
from fastgraph.dist.graphs.dgl.structure import ShardedStructure
from fastgraph.dist.graphs.owners import agreed_parts, check_device, owner_of_edges
from fastgraph.dist.graphs.protocols import DglGraph, Frame
from fastgraph.dist.ranks.mesh import Mesh
from fastgraph.dist.ranks.own_device import HOST
from fastgraph.dist.tensor.layout import Layout, know, known, layout_of, usual
from fastgraph.dist.tensor.sharded import ShardedTensor, is_sharded, taken, whole


class ShardedGraph(DglGraph, Protocol):
    """A graph with sharded edges."""

    _graph: ShardedIndex


def shard(
    graph: DglGraph,
    *,
    weights: Sequence[float] | None = None,
    method: str = "metis",
    parts: Tensor | None = None,
    mode: str = "auto",
    mesh: Mesh | None = None,
    is_tied: bool = False,
) -> DglGraph:
    """See :func:`fastgraph.dist.graphs.pyg.shard`."""
    check_can_be_sharded(graph)
    device = graph.device
    if device != HOST:
        graph, is_tied = graph.to(HOST), False  # which is a copy
    sizes = num_nodes(graph)
    parts = agreed_parts(lambda: joint_edges(graph, sizes), sizes, weights, method, parts)
    of_nodes = [layout_of(owner, mode, mesh) for owner in parts.split(sizes)]
    for rows in of_nodes:
        know(rows)
    return _laid_out(graph, of_nodes, is_tied).to(device)


def sharded_as_usual(graph: DglGraph) -> DglGraph:
    """A graph that was made of a sharded one, and whose edges are whole, as a sharded one.

    Features that are sharded stay where they are.
    """
    rows = [usual(graph.num_nodes(ntype)) for ntype in graph.ntypes]
    return _laid_out(graph, rows, True)


def is_sharded_graph(value: object) -> TypeGuard[ShardedGraph]:
    """True if a value is a ``DGLGraph`` with sharded edges."""
    return isinstance(value, DGLGraph) and isinstance(value._graph, ShardedIndex)


def holders(
    graph: DglGraph,
) -> tuple[list[Layout], list[ShardedTensor], list[tuple[int, int]]] | None:
    """Who holds the nodes and edges of a graph; ``None`` if its edges are not sharded.

    Returns:
        As in :class:`fastgraph.dist.graphs.relayout.Placement`: of nodes, of edges, and the ends of
        these.
    """
    if not is_sharded_graph(graph):
        return None
    index, relations = graph._graph, range(len(graph.canonical_etypes))
    return (
        [usual(size) for size in num_nodes(graph)],
        [index.relation(etype).edge_index for etype in relations],
        [index.ends(etype) for etype in relations],
    )


def whole_graph(graph: DglGraph) -> DglGraph:
    """A sharded graph with its own edges and features on every rank; others as they are."""
    if not is_sharded_graph(graph):
        return graph
    found, index = mapped(graph, whole), graph._graph
    found._graph = index.whole()
    return found


def _laid_out(graph: DglGraph, of_nodes: Sequence[Layout], is_tied: bool) -> DglGraph:
    sizes = [rows.n for rows in of_nodes]
    relations, of_edges = [], []
    for etype in range(len(graph.canonical_etypes)):
        source, destination = map(int, graph._graph.metagraph.find_edge(etype))
        src, dst, _ = graph._graph.edges(etype, "eid")
        nodes = of_nodes[destination]
        ends = of_nodes[source].held(src.long()).owner, nodes.held(dst.long()).owner
        rows = layout_of(owner_of_edges(*ends, nodes.mode, nodes.mesh))
        if known(rows.n) is None:
            know(rows)
        local = torch.stack([end[rows.position_on(end.device)] for end in (src, dst)])
        edges = ShardedTensor(local, rows, 1)
        relations.append(ShardedStructure(edges, sizes[source], sizes[destination]))
        of_edges.append(rows)
    found = copy.copy(graph)
    found._graph = ShardedIndex(graph._graph.metagraph, sizes, relations)
    sharded = functools.partial(_sharded, is_tied=is_tied)
    found._node_frames = list(map(sharded, graph._node_frames, of_nodes))
    found._edge_frames = list(map(sharded, graph._edge_frames, of_edges))
    return found


def mapped(graph: DglGraph, replace: Callable[[Tensor], Tensor]) -> DglGraph:
    """A copy with other features."""
    found = graph.local_var()
    for frame in (*found._node_frames, *found._edge_frames):
        for key in list(frame.keys()):
            frame[key] = replace(frame[key])
    return found


def check_can_be_sharded(graph: DglGraph) -> None:
    """A graph is a whole one on the CPU or the device of this rank, and not sharded.

    Raises:
        ValueError: it is not.
    """
    if isinstance(graph._graph, ShardedIndex):
        raise ValueError("the graph is sharded already")
    if graph.is_block:
        raise ValueError("a block is part of a mini-batch; shard the whole graph")
    check_device("the graph", graph.device)


def num_nodes(graph: DglGraph) -> list[int]:
    """The numbers of nodes of all kinds."""
    return [graph.num_nodes(ntype) for ntype in graph.ntypes]


def features(graph: DglGraph) -> list[Tensor]:
    """All that frames hold."""
    frames = (*graph._node_frames, *graph._edge_frames)
    return [frame[key] for frame in frames for key in frame.keys()]  # noqa: SIM118


def joint_edges(graph: DglGraph, sizes: list[int]) -> Tensor:
    """The edges of all relations between nodes of all kinds, numbered one kind after the other."""
    starts = [sum(sizes[:ntype]) for ntype in range(len(sizes))]
    found = [torch.empty(2, 0, dtype=torch.int64, device=HOST)]
    for etype in range(len(graph.canonical_etypes)):
        source, destination = map(int, graph._graph.metagraph.find_edge(etype))
        src, dst, _ = graph._graph.edges(etype, "eid")
        found.append(torch.stack([src.long() + starts[source], dst.long() + starts[destination]]))
    return torch.cat(found, 1)


def _sharded(frame: Frame, rows: Layout, is_tied: bool) -> Frame:
    found = frame.clone()
    for key in list(found.keys()):
        x = found[key]
        if isinstance(x, Tensor) and not is_sharded(x):
            found[key] = taken(x, rows, 0, is_tied=is_tied, name=key)
    return found
