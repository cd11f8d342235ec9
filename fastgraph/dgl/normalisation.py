"""Normalisations by degree as weights of edges, and sums that count a node among its neighbours."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fastgraph.dgl.structure import Named, Structure
from fastgraph.graphs.edges import Grouped
from fastgraph.registry.backend import accumulator


@functools.singledispatch
def edge_weights(
    structure: Structure, norm: str, dtype: torch.dtype, *, numbered: bool
) -> Tensor | None:
    """What ``GraphConv`` multiplies messages by, ``[E]``; ``None`` for nothing.

    Args:
        structure: the edges.
        norm: as that layer has it: by ``"both"`` degrees of the ends, their square roots; by the
            ``"left"`` one, that of the source. ``"right"`` is a mean, which needs no weights.
        dtype: of the weights, which are computed in a wider one.
        numbered: whether they are in the order of DGL's numbers, or in that of the groups.
    """
    if norm not in ("both", "left"):
        return None
    edge_ids = structure.edge_ids if numbered else None
    given = structure.index, structure.ptr, edge_ids, structure.num_src, norm, dtype
    return structure.remembered("by degree", _Weights, *given).weight


class _Weights:
    def __init__(
        self,
        index: Tensor,
        ptr: Tensor,
        edge_ids: Tensor | None,
        num_src: int,
        norm: str,
        dtype: torch.dtype,
    ) -> None:
        wide = accumulator(dtype)
        index = index.long()
        out_degree = torch.bincount(index, minlength=num_src).to(wide)
        if norm == "left":
            weight = out_degree.reciprocal_()[index]
        else:
            degrees = ptr.diff().to(wide)
            in_degree = torch.repeat_interleave(degrees, ptr.diff().long(), output_size=len(index))
            weight = out_degree[index].rsqrt_().mul_(in_degree.rsqrt_())
        if edge_ids is not None:
            weight = torch.empty_like(weight).index_copy_(0, edge_ids.long(), weight)
        self.weight = weight.to(dtype)
        self.nbytes = self.weight.nbytes


@functools.singledispatch
def with_itself(structure: Structure) -> Named:
    """The edges, and one more for each destination, from the source with its number."""
    tensors, sizes = (structure.index, structure.ptr), (structure.num_src, structure.num_dst)
    return structure.remembered("CSC with itself", _with_itself, *tensors, *sizes)


def _with_itself(index: Tensor, ptr: Tensor, num_src: int, num_dst: int) -> Grouped:
    nodes = torch.arange(num_dst, device=ptr.device)
    ends = ptr + torch.arange(num_dst + 1, device=ptr.device, dtype=ptr.dtype)
    is_edge = torch.ones(len(index) + num_dst, dtype=torch.bool, device=ptr.device)
    is_edge[ends[1:].long() - 1] = False
    sources = torch.empty(len(is_edge), dtype=index.dtype, device=index.device)
    sources[is_edge], sources[~is_edge] = index, nodes.to(index.dtype)
    return Grouped(sources, ends, None, num_src, num_dst)
