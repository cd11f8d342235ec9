"""Messages that are projected by a matrix of their relation, without one for each edge.

Edges of one relation from one source carry the same message. So features are projected once for
each *pair* of a source and a relation that occurs, and edges lead from these pairs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from dgl.nn.pytorch.linear import TypedLinear
from torch import Tensor

from fastgraph.dgl.calls import Accepted
from fastgraph.dgl.structure import Named, Structure
from fastgraph.graphs.edges import Grouped
from fastgraph.graphs.graph import Graph
from fastgraph.graphs.memo import remembered
from fastgraph.layers.modules import KnownModules
from fastgraph.plugins.refusal import Refusal
from fastgraph.routing.conditions import is_plain

TYPED_LINEAR = KnownModules(TypedLinear)


class Pairs:
    """Pairs of a source and a relation that occur among edges, by relation, then by source.

    Attributes:
        grouped: the edges, from pairs to destinations, with their numbers.
    """

    grouped: Named
    _source: Tensor
    _sizes: list[int]

    def __init__(
        self,
        graph: Graph,
        index: Tensor,
        ptr: Tensor,
        edge_ids: Tensor | None,
        etype: Tensor,
        num_rels: int,
    ) -> None:
        relation = etype if edge_ids is None else etype.index_select(0, edge_ids)
        keys = (relation.long() * graph.num_src).add_(index)
        found, pair = _numbered(keys, num_rels * graph.num_src)
        self._source = found % graph.num_src
        firsts = graph.num_src * torch.arange(num_rels + 1, device=found.device)
        self._sizes = torch.searchsorted(found, firsts).diff().tolist()
        self.grouped = grouped = Grouped(graph.from_sources(pair, len(found)))
        self.nbytes = self._source.nbytes + grouped.nbytes

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        r""":math:`x_s W_r` for each pair :math:`(s, r)`.

        Args:
            x: ``[sources, *heads, in_channels]``.
            weight: ``[relations, *heads, in_channels, out_channels]``, with heads where ``x`` has
                them.

        Returns:
            ``[pairs, *heads, out_channels]``.
        """
        return projected(x.index_select(0, self._source), weight, self._sizes)


def unless_edited(projected: Tensor, etype: Tensor) -> Tensor:
    """``projected``, whose gradient is an error where types of edges were edited, as it is in DGL.

    DGL saves the types for its backward pass, where pairs are remembered as they were.
    """
    is_recorded = projected.requires_grad and torch.is_grad_enabled()
    if not is_recorded or not is_plain(projected, etype) or etype.is_inference():
        return projected
    found: Tensor = _UnlessEdited.apply(projected, etype)  # type: ignore[no-untyped-call]
    return found


class _UnlessEdited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, projected: Tensor, etype: Tensor) -> Tensor:
        ctx.save_for_backward(etype)
        return projected.view_as(projected)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        _ = ctx.saved_tensors  # torch compares versions
        return grad, None


_PLACES = 16
"""For each key, in which it takes less time to look up numbers than to sort."""


def _numbered(keys: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The values that occur among ``keys``, ascending, and the number of each key's, int32.

    Args:
        keys: int64 ``[E]``, below ``size``.
        size: how many there may be.
    """
    if size > _PLACES * len(keys):
        found, number = torch.unique(keys, return_inverse=True)
        return found, number.int()
    occurs = keys.new_zeros(size, dtype=torch.bool)
    occurs[keys] = True
    number = occurs.cumsum(0, dtype=torch.int32).sub_(1)
    return occurs.nonzero().squeeze(1), number.index_select(0, keys)


def projected(x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
    """Rows one relation after the other, ``sizes`` of each, by its matrix."""
    rows = x.split(sizes)
    if x.dim() == 2:
        return torch.cat([part @ matrix for part, matrix in zip(rows, weight, strict=True)])
    return torch.cat(
        [torch.einsum("nhd,hde->nhe", p, matrix) for p, matrix in zip(rows, weight, strict=True)]
    )


def pairs_of(call: Accepted, etype: object, num_rels: int) -> Pairs | Refusal:
    """The pairs of a call, or why it must be left to upstream.

    Args:
        call: its edges.
        etype: the relation of each edge, by the numbers of edges.
        num_rels: the number of relations.
    """
    structure = call.structure
    refusal = structure.refusal("the types of edges", etype)
    if refusal is not None:
        return refusal
    assert isinstance(etype, Tensor)
    if etype.dtype not in (torch.int32, torch.int64) or etype.shape != (structure.num_edges,):
        return Refusal(f"types of edges of shape {list(etype.shape)}, {etype.dtype}")
    if etype.device != structure.device:
        return Refusal("types of edges on another device than features")
    if len(etype) == 0:
        return Refusal("a graph without edges")
    least, most = remembered("range", _Range, etype).ends
    if least < 0 or most >= num_rels:
        return Refusal(f"types of edges from {least} to {most} for {num_rels} relations")
    return find_pairs(structure, etype, num_rels)


@functools.singledispatch
def find_pairs(structure: Structure, etype: Tensor, num_rels: int) -> Pairs:
    """The pairs among edges of given relations, which must be in range."""
    grouped = structure.numbered()
    assert isinstance(grouped, Grouped)
    graph, rows = grouped.graph, grouped.graph.by_destination
    make = functools.partial(Pairs, graph)
    return remembered("pairs", make, rows.col, rows.ptr, rows.edge_id, etype, num_rels)


class _Range:
    nbytes = 0

    def __init__(self, values: Tensor) -> None:
        self.ends = int(values.amin()), int(values.amax())


def typed_linear_refusal(name: str, module: Any) -> Refusal | None:
    """Why what a ``TypedLinear`` does on single edges cannot be done on pairs."""
    if type(module) is not TypedLinear:
        return Refusal(f"{name} is a {type(module).__name__}")
    if TYPED_LINEAR.is_watched(module):
        return Refusal(f"{name} has hooks or is replaced")
    return None


def matrices_of(module: TypedLinear) -> Tensor:
    """The matrices of relations, or the blocks along their diagonals.

    Returns:
        ``[relations, in_channels, out_channels]``, or ``[relations, blocks, ...]`` with the
        channels of a block.
    """
    weight: Tensor = module.get_weight()
    if module.regularizer != "bdd":
        return weight
    return weight.view(len(weight), module.num_bases, module.submat_in, module.submat_out)
