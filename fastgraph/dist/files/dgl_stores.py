"""The parts of a ``DGLGraph`` as files hold them; see :mod:`fastgraph.dist.files.stores`.

Frames of nodes, then the ends of the edges of each relation, then frames of edges, of which any
names are taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from dgl import graph_index
from dgl.frame import Frame as DglFrame
from dgl.heterograph import DGLGraph
from torch import Tensor

from fastgraph.dist.files.stores import Contents, Key, Store, name_of_type
from fastgraph.dist.graphs.dgl.index import ShardedIndex
from fastgraph.dist.graphs.dgl.structure import ShardedStructure
from fastgraph.dist.graphs.protocols import Attribute, DglGraph, Frame
from fastgraph.dist.ranks.own_device import HOST
from fastgraph.dist.tensor.layout import Layout

_ENDS = "edge_index"


def contents(graph: DglGraph, parts: Sequence[Tensor]) -> Contents:
    """The parts of a ``DGLGraph``, as files hold them.

    Args:
        graph: of which it shares the memory.
        parts: for each kind of nodes the rank of each, int64.

    Raises:
        ValueError: it is a batch of several graphs.
    """
    if graph.batch_size != 1:
        raise ValueError(f"data must be a single graph, got a batch of {graph.batch_size}")
    owners = dict(zip(map(_nodes, graph.ntypes), parts, strict=True))
    stores = [
        _of_frame(ntype, _nodes(ntype), frame)
        for ntype, frame in zip(graph.ntypes, graph._node_frames, strict=True)
    ]
    for etype, relation in enumerate(graph.canonical_etypes):
        source, destination, _ = graph._graph.edges(etype, "eid")
        name = _edges(relation)
        owners[name] = owners[_nodes(relation[2])][destination.long()]
        ends = {_ENDS: torch.stack([source, destination])}
        stores.append(Store(relation, f"ends of {name}", ends, {_ENDS: (1, name)}))
    stores += [
        _of_frame(relation, _edges(relation), frame)
        for relation, frame in zip(graph.canonical_etypes, graph._edge_frames, strict=True)
    ]
    return Contents("DGLGraph", stores, owners)


def graph_of(
    kind: str, stores: Sequence[tuple[Key, dict[str, Attribute]]], layouts: Mapping[str, Layout]
) -> DglGraph:
    """A graph of what one was made of; see :func:`fastgraph.dist.files.stores.graph_of`."""
    of_nodes = [(key, values) for key, values in stores if isinstance(key, str)]
    of_edges = [
        (key, values) for key, values in stores if not (key is None or isinstance(key, str))
    ]
    ntypes = [ntype for ntype, _ in of_nodes]
    sizes = [layouts[_nodes(ntype)].n for ntype in ntypes]
    relations = of_edges[: len(of_edges) // 2]
    structures, ends = [], torch.empty(2, len(relations), dtype=torch.int64, device=HOST)
    for etype, ((source, _, destination), values) in enumerate(relations):
        pair = ntypes.index(source), ntypes.index(destination)
        ends[:, etype] = torch.tensor(pair, device=HOST)
        structures.append(ShardedStructure(values[_ENDS], *(sizes[ntype] for ntype in pair)))
    metagraph = graph_index.from_coo(len(ntypes), *ends, True)
    rows = [*sizes, *(layouts[_edges(relation)].n for relation, _ in relations)]
    columns = [values for _, values in (*of_nodes, *of_edges[len(relations) :])]
    made = [DglFrame(values, num_rows=n) for values, n in zip(columns, rows, strict=True)]
    index = ShardedIndex(metagraph, sizes, structures)
    etypes = [etype for (_, etype, _), _ in relations]
    graph: DglGraph = DGLGraph(index, ntypes, etypes, made[: len(ntypes)], made[len(ntypes) :])
    return graph


def _of_frame(key: Key, name: str, frame: Frame) -> Store:
    values = {column: frame[column] for column in frame.keys()}  # noqa: SIM118
    return Store(key, name, values, dict.fromkeys(values, (0, name)))


def _nodes(ntype: str) -> str:
    return f"nodes of {name_of_type(ntype)}"


def _edges(relation: Sequence[str]) -> str:
    return f"edges of {name_of_type(relation)}"
