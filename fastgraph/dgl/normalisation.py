"""Normalisations by degree as weights of edges, and sums that count a node among its neighbours."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fastgraph.dgl.structure import Named, Relation, Structure
from fastgraph.graphs.edges import Grouped
from fastgraph.graphs.graph import Graph, beside, normal_mode
from fastgraph.plugins.backend import accumulator

WEIGHTED = ("both", "left")
"""Of the normalisations that ``GraphConv`` has, those by one weight for each edge."""


@functools.singledispatch
def edge_weights(relation: Relation, norm: str, dtype: torch.dtype) -> Tensor:
    """The weights that ``GraphConv`` multiplies messages by, ``[E]``, in the order of the edges.

    Args:
        relation: the edges.
        norm: as that layer has it: by ``"both"`` degrees of the ends, their square roots; by the
            ``"left"`` one, that of the source. ``"right"`` is a mean, which needs no weights.
        dtype: of the weights, which are computed in a wider one.
    """
    raise TypeError(f"relation must be a Grouped or a sharded one, got {type(relation).__name__}")


@edge_weights.register
def _(relation: Grouped, norm: str, dtype: torch.dtype) -> Tensor:
    graph = relation.graph
    return beside(graph, ("by degree", norm, dtype), lambda: _Weights(graph, norm, dtype)).weight


class _Weights:
    def __init__(self, graph: Graph, norm: str, dtype: torch.dtype) -> None:
        with normal_mode():  # what is remembered must serve training as well
            self.weight = _by_degree(graph, norm, accumulator(dtype)).to(dtype)
        self.nbytes = self.weight.nbytes


def _by_degree(graph: Graph, norm: str, wide: torch.dtype) -> Tensor:
    rows = graph.by_destination
    of_sources, of_destinations = _of_nodes(graph, norm, wide)
    weight = of_sources.index_select(0, rows.col)  # faster than an index in brackets
    if of_destinations is not None:
        degrees = rows.ptr.diff()
        weight *= torch.repeat_interleave(of_destinations, degrees, output_size=len(weight))
    if rows.edge_id is None:
        return weight
    return torch.empty_like(weight).index_copy_(0, rows.edge_id.long(), weight)


def node_scales(relation: Grouped, norm: str, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The factors of rows of sources, ``[num_src, 1]``, and of destinations, for the same norms.

    Args:
        relation: the edges.
        norm: as for :func:`edge_weights`.
        dtype: of the factors, which are computed in a wider one.
    """
    graph = relation.graph
    found = beside(graph, ("of nodes", norm, dtype), lambda: _Scales(graph, norm, dtype))
    return found.source, found.destination


def _of_nodes(graph: Graph, norm: str, wide: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The factors of sources, and those of destinations where there are any, finite for all."""
    rows = graph.by_destination
    out_degree = torch.bincount(rows.col, minlength=graph.num_src).to(wide).clamp_(min=1)
    if norm == "left":
        return out_degree.reciprocal_(), None
    return out_degree.rsqrt_(), rows.ptr.diff().to(wide).clamp_(min=1).rsqrt_()


class _Scales:
    def __init__(self, graph: Graph, norm: str, dtype: torch.dtype) -> None:
        with normal_mode():  # what is remembered must serve training as well
            source, destination = _of_nodes(graph, norm, accumulator(dtype))
            self.source = source.to(dtype).unsqueeze(1)
            self.destination = None
            if destination is not None:
                self.destination = destination.to(dtype).unsqueeze(1)
        self.nbytes = self.source.nbytes * (1 if self.destination is None else 2)


@functools.singledispatch
def with_itself(structure: Structure) -> Named:
    """The edges, and one more for each destination, from the source with its number."""
    sizes = structure.num_src, structure.num_dst
    return structure.remembered("CSC with itself", _with_itself, *sizes)


def _with_itself(index: Tensor, ptr: Tensor, edge_ids: None, num_src: int, num_dst: int) -> Grouped:
    device, dtype = index.device, index.dtype  # one for both, or else they would be converted
    nodes = torch.arange(num_dst, device=device, dtype=dtype)
    ends = ptr.to(dtype) + torch.arange(num_dst + 1, device=device, dtype=dtype)
    last = ends[1:].long() - 1
    is_edge = torch.ones(len(index) + num_dst, dtype=torch.bool, device=device)
    is_edge[last] = False
    sources = torch.empty(len(is_edge), dtype=dtype, device=device)
    sources.masked_scatter_(is_edge, index)  # takes a quarter of the time of an index
    sources[last] = nodes
    return Grouped.of(sources, ends, None, num_src, num_dst)
