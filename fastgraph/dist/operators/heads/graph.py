"""All edges on every rank, as a graph for the operators that compute some heads of all nodes.

Nodes and edges are numbered in the order of ranks and, of each, of its local rows, as
:mod:`fastgraph.dist.operators.heads.exchange` puts them together.
"""

from __future__ import annotations

import functools
from functools import cached_property

import torch
from torch import Tensor

from fastgraph.dist.operators.rank_graph import local_edges
from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.counts import COUNTS
from fastgraph.dist.ranks.own_device import HOST
from fastgraph.dist.tensor.layout import Layout, layout_of
from fastgraph.dist.tensor.memo import Recent, cached, on_host
from fastgraph.graphs.edges import Edges, named
from fastgraph.graphs.graph import Graph


class WholeGraph:
    """A graph that every rank has.

    Args:
        pair: int64 ``[2, E]``, the global numbers of the sources and destinations of all edges, in
            the order of ranks.
        rows: which edges each rank holds.
        sources: who holds the nodes that edges start from.
        destinations: who holds those that they lead to.
        self_loops: replace the self-loops by one for each of the first so many nodes.
        device: that operators compute on.

    Attributes:
        rows, sources, destinations: as given.
    """

    def __init__(
        self,
        pair: Tensor,
        rows: Layout,
        sources: Layout,
        destinations: Layout,
        self_loops: int,
        device: torch.device,
    ) -> None:
        self.rows, self.sources, self.destinations = rows, sources, destinations
        self._loops, self._is_kept = self_loops, None
        if self_loops:
            self._is_kept = pair[0] != pair[1]
            pair = torch.cat(
                [pair[:, self._is_kept], torch.arange(self_loops, device=HOST).expand(2, -1)], 1
            )
        index = torch.stack([sources.order[pair[0]], destinations.order[pair[1]]]).int()
        self._graph = Graph(index.to(device), sources.n, destinations.n)
        self._derived = Recent()
        COUNTS.plans += 1

    @cached_property
    def position(self) -> Tensor:
        """int64 ``[edges]``: where each edge is among those of one process.

        Self-loops that were added follow all others.
        """
        position = inverse(self.rows.order)
        if self._is_kept is None:
            return position
        kept = inverse(position[self._is_kept].argsort())
        return torch.cat([kept, torch.arange(len(kept), len(kept) + self._loops, device=HOST)])

    def edges_of(self, *, numbered: bool) -> Edges:
        """The graph as operators take it.

        Args:
            numbered: whether something is given or returned for each edge.
        """
        make = functools.partial(named, self._graph, numbered=numbered)
        edges: Edges = self._derived.get(numbered, make)[0]
        return edges


def inverse(order: Tensor) -> Tensor:
    """int64: where each place of a permutation went."""
    places = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter_(0, order, places)


def whole_graph(
    index: Tensor,
    sources: Layout,
    destinations: Layout,
    transpose: bool = False,
    self_loops: int = 0,
) -> WholeGraph:
    """The graph of an ``edge_index`` on every rank, cached with it.

    Edges that are sharded are sent to all ranks, once.

    Args:
        index: ``edge_index``, sharded or replicated.
        sources: the layout of the nodes whose rows are gathered.
        destinations: that of the nodes which aggregate them.
        transpose: whether edges are taken the other way round.
        self_loops: replace the self-loops by one for each of the first so many nodes.

    Raises:
        IndexError: on all ranks, if ``index`` points outside the nodes.
        NoRuleError: ``index`` is sharded in another way.
    """
    local, rows = local_edges(index)

    def make() -> WholeGraph:
        pair = on_host(local.flip(0) if transpose else local).long()
        if rows is not None:
            pair = transport.all_gather(pair.t(), rows.counts).t()
        _check_inside(pair, sources.n, destinations.n)
        if rows is not None:
            return WholeGraph(pair, rows, sources, destinations, self_loops, local.device)
        found = layout_of(destinations.held(pair[1]).owner)
        pair = pair[:, inverse(found.order)]
        return WholeGraph(pair, found, sources, destinations, self_loops, local.device)

    key = ("whole graph", rows, sources, destinations, transpose, self_loops)
    found: WholeGraph = cached(local, key, make, is_part=rows is not None)
    return found


def _check_inside(pair: Tensor, num_sources: int, num_destinations: int) -> None:
    sizes = torch.tensor([[num_sources], [num_destinations]], device=HOST)
    if bool(((pair < 0) | (pair >= sizes)).any()):
        raise IndexError(
            f"edge_index points outside the nodes, of which there are {num_sources} sources and "
            f"{num_destinations} destinations"
        )
