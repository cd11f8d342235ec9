"""Reductions of a program's own, by the number of edges that nodes have, on sharded graphs.

DGL hands a function the messages of all nodes with as many edges, ``[nodes, edges of each, ...]``,
and so does this, with the nodes that each rank has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from dgl import frame as frames
from dgl.udf import NodeBatch
from torch import Tensor

from fastgraph.dist.graphs.dgl.graphs import ShardedGraph
from fastgraph.dist.graphs.dgl.structure import ShardedStructure
from fastgraph.dist.graphs.protocols import Frame
from fastgraph.dist.operators.halo.graph import neighbourhoods
from fastgraph.dist.ranks.agreement import on_all_ranks
from fastgraph.dist.tensor.layout import Layout, usual
from fastgraph.dist.tensor.memo import on_host
from fastgraph.dist.tensor.sharded import ShardedTensor, placed


class _Bucket(NamedTuple):
    """Nodes with as many edges.

    Attributes:
        degree: how many.
        nodes: int64 ``[nodes]``, sharded.
        edges: int64 ``[nodes * degree]``, the numbers of those that lead to each, sharded.
    """

    degree: int
    nodes: ShardedTensor
    edges: ShardedTensor


def reduced(
    graph: ShardedGraph,
    function: Callable[[NodeBatch], Mapping[str, Tensor]],
    messages: Mapping[str, Tensor],
    *,
    orig_nid: Tensor | None,
) -> Frame:
    """``dgl.core.invoke_udf_reduce``: a frame of what a function makes of messages.

    Args:
        graph: with one relation, sharded.
        function: takes a ``NodeBatch``, and returns features by name.
        messages: features of edges by name.
        orig_nid: numbers of nodes that the function is shown, or ``None``.
    """
    kind = graph.dsttypes[0]
    frame = graph._node_frames[graph.get_ntype_id_from_dst(kind)]
    relation = graph._graph.relation(0)
    results: list[Mapping[str, Tensor]] = []
    buckets = _buckets(relation)
    for degree, members, edges in buckets.each:
        mail = {}
        for key, values in messages.items():
            rows = values.index_select(0, edges)
            mail[key] = rows.view(len(members), degree, *values.shape[1:])
        shown = members if orig_nid is None else orig_nid.index_select(0, members)
        batch = NodeBatch(graph, shown, kind, frame.subframe(members), msgs=mail)
        results.append(function(batch))
    found: Frame = frames.Frame(num_rows=relation.num_dst)
    found._initializers = frame._initializers
    found._default_initializer = frame._default_initializer
    for key in results[0] if results else ():
        values = torch.cat([result[key] for result in results])
        found[key] = _initial(found, key, values).index_copy(0, buckets.nodes, values)
    return found


def _initial(frame: Frame, key: str, values: Tensor) -> Tensor:
    """The values of zero in-degree nodes."""
    n = frame.num_rows
    shape = (n, *values.shape[1:])
    initializer = frame.get_initializer(key)
    if initializer is None:
        zeros = torch.zeros((), dtype=values.dtype, device=values.device).expand(shape)
        return placed(zeros, usual(n), 0)
    initial = initializer(shape, values.dtype, values.device, slice(0, n))
    return placed(initial, usual(n), 0)


class _Buckets(NamedTuple):
    """The nodes that have edges.

    Attributes:
        each: by how many they have, in ascending order.
        nodes: those of all, in their order.
    """

    each: list[_Bucket]
    nodes: Tensor


def _buckets(relation: ShardedStructure) -> _Buckets:
    """They are cached with the edges."""
    edges = relation.edge_index
    rows = usual(relation.num_src), usual(relation.num_dst)
    make = lambda: _made(edges, *rows)  # noqa: E731
    return edges.cached(("buckets", *rows), make)


def _made(edge_index: ShardedTensor, sources: Layout, rows: Layout) -> _Buckets:
    graph = neighbourhoods(edge_index, sources, rows)
    edges = graph.edges_of(numbered=True)
    assert edges.ptr is not None
    # In the order of their numbers, as DGL sorts them.
    device = edges.index.device
    numbers = torch.arange(edges.num_edges, device=device)
    order = edges.index[1].long() if edges.index.dim() == 2 else numbers
    number, begin = graph.edges.position_on(device)[order], edges.ptr.long()
    degrees = begin.diff()
    found = []
    for degree in sorted({d for of_rank in on_all_ranks(degrees.unique().tolist) for d in of_rank}):
        if degree:
            members = (degrees == degree).nonzero().view(-1)
            layout = Layout(rows.key[on_host(members)], rows.bound)
            own = number[begin[members, None] + torch.arange(degree, device=device)].view(-1)
            these = ShardedTensor(rows.position_on(device)[members], layout, 0)
            found.append(_Bucket(degree, these, ShardedTensor(own, layout.split(degree), 0)))
    nodes: list[Tensor] = [bucket.nodes for bucket in found] or [rows.position[:0]]
    return _Buckets(found, torch.cat(nodes))
