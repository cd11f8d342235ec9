"""The symmetric normalisation of graph convolutions: a graph with self-loops and edge weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastgraph.graphs.edges import named_by_itself
from fastgraph.graphs.graph import Graph, check_range
from fastgraph.plugins.backend import accumulator, device_type
from fastgraph.registry.registry import REGISTRY


class WeightedGraph(NamedTuple):
    """A graph and one weight for each of its edges, ``[E]``."""

    graph: Graph
    weight: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.graph.nbytes + self.weight.nbytes


def normalised_graph(
    index: Tensor,
    weight: Tensor | None,
    num_nodes: int,
    loop_weight: float,
    transpose: bool,
    dtype: torch.dtype,
    *,
    num_others: int = 0,
    with_others: Callable[[Tensor], Tensor] | None = None,
) -> WeightedGraph:
    """The graph of GCN with its weights.

    Its edges are numbered as they are sorted. Everything is computed in the accumulating dtype, and
    the weights rounded to ``dtype``.

    Args:
        index: as for :func:`fastgraph.ops.gcn`, as are the arguments after it.
        weight: one for each edge, ``[E]``.
        num_nodes: the number of nodes.
        loop_weight: of the self-loops that are added; 0: none.
        transpose: reverse every edge.
        dtype: of the weights.
        num_others: how many further nodes there are, behind all others, to which no edge of
            ``index`` leads; not together with ``transpose``.
        with_others: takes the scales of nodes, ``[num_nodes]``, and gives them with those of the
            further nodes, whose edges are elsewhere.

    Raises:
        IndexError: ``index`` points outside the nodes.
        ValueError: wrong shape or dtype of ``index``.
    """
    loops = num_nodes if loop_weight else 0
    graph = Graph(index, num_nodes + num_others, num_nodes, self_loops=loops)
    wide = accumulator(dtype)
    if weight is None and loop_weight not in (0, 1):
        weight = torch.ones(index.shape[1], dtype=wide, device=index.device)
    if weight is not None:
        weight = weight.to(wide)
        if loop_weight:
            weight = _with_loop_weights(weight, index, num_nodes, loop_weight)
        order = graph.by_destination.edge_id
        weight = weight if order is None else weight.index_select(0, order)
    graph = named_by_itself(graph.renumbered())
    rows = graph.grouped(transpose=transpose)
    if weight is None:
        degree = rows.ptr.diff().to(wide)
    else:  # in one order, unlike a scatter on a GPU
        values = weight if rows.edge_id is None else weight.index_select(0, rows.edge_id)
        degree = torch.segment_reduce(values, "sum", offsets=rows.ptr, initial=0, unsafe=True)
    scale = degree.pow_(-0.5)
    scale.masked_fill_(scale == torch.inf, 0)
    of_sources = scale if with_others is None else with_others(scale)
    if weight is None:
        products = REGISTRY.kernel("sddmm", device_type(index), wide)
        ends = scale[:, None], of_sources[:, None]
        normalised = products(graph, *ends, 1, "sum", False).squeeze(1)
    else:  # in this order: the product of two scales may be infinite where weights are tiny
        rows = graph.by_destination  # in whose order edges are numbered
        of_rows = scale.repeat_interleave(rows.ptr.diff(), output_size=graph.num_edges)
        normalised = of_sources.index_select(0, rows.col).mul_(weight).mul_(of_rows)
    return WeightedGraph(graph, normalised.to(dtype))


def _with_loop_weights(weight: Tensor, index: Tensor, num_nodes: int, loop_weight: float) -> Tensor:
    """Weights of the edges of a :class:`fastgraph.Graph` with ``self_loops``.

    A node's loop takes the weight of its last one in ``index``, or else ``loop_weight``.

    Raises:
        IndexError: a self-loop lies outside the nodes.
    """
    loop_weights = weight.new_full((num_nodes,), loop_weight)
    is_loop = index[0] == index[1]
    if not is_loop.any():  # as mostly; picking edges by a mask takes longer than all else here
        return torch.cat([weight, loop_weights])
    loops = is_loop.nonzero().squeeze(1)
    nodes = index[0].index_select(0, loops)
    low, high = torch.aminmax(nodes)  # the graph has not seen them
    check_range(int(low), int(high), num_nodes, 0)
    loop_weights[nodes] = weight.index_select(0, loops)
    kept = is_loop.logical_not_().nonzero().squeeze(1)
    return torch.cat([weight.index_select(0, kept), loop_weights])
