"""The edges of a type that ``dgl.dataloading`` may draw, by probabilities or a mask.

They are remembered until these values change.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgraph.dgl.structure import Structure
from fastgraph.graphs.memo import recalled, tensor_key
from fastgraph.plugins.refusal import Refusal
from fastgraph.routing.conditions import plain_tensor


class Columns(NamedTuple):
    """Edges that may be drawn, grouped by destination.

    Attributes:
        ptr: ``[nodes + 1]``, where those of each destination begin.
        row: ``[edges]``, their sources.
        edge_ids: ``[edges]``, their numbers; ``None`` where that is their order.
        weight: ``[edges]``, in proportion to which they are drawn; ``None`` for equal chances.
    """

    ptr: Tensor
    row: Tensor
    edge_ids: Tensor | None
    weight: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self if tensor is not None)


def columns_of(
    g: Any, structure: Structure, kind: tuple[str, str, str], name: str | None
) -> Columns | Refusal:
    """The edges that may be drawn by a feature of them, or why not to draw by it.

    Args:
        g: the graph.
        structure: its edges of one type.
        kind: that type.
        name: of the feature; ``None`` for equal chances.

    Raises:
        ValueError: a probability is negative or not finite.
    """
    if name is None:
        return Columns(structure.ptr, structure.index, structure.edge_ids)
    features = g.edges[kind].data
    if name not in features:
        return Refusal("probabilities that edges do not have")
    values = features[name]
    refusal = plain_tensor("prob", values)
    if refusal is not None:
        return refusal
    if values.dim() != 1 or values.dtype not in (torch.bool, torch.float32, torch.float64):
        return Refusal("probabilities that are neither one float nor one bool for each edge")
    if values.is_inference():  # edits of which nobody counts
        return _drawable(structure, values)
    # DGL, too, copies edges from one format to another once, and sees no edit of the first then.
    key = "edges to draw", structure.identity, tensor_key(values)
    return recalled(key, _drawable, (structure, values), [values])


def _drawable(structure: Structure, values: Tensor) -> Columns:
    """The edges whose value is true or positive."""
    ids = structure.edge_ids
    by_place = values.detach() if ids is None else values.detach().index_select(0, ids)
    is_mask = values.dtype == torch.bool
    if not is_mask and not bool(((by_place >= 0) & by_place.isfinite()).all()):
        wrong = values[~((values >= 0) & values.isfinite())][0].item()
        raise ValueError(f"prob must be at least 0 and finite on all edges, got {wrong}")
    drawn = by_place if is_mask else by_place > 0
    places = drawn.nonzero().squeeze(1)
    before = torch.cat([places.new_zeros(1), drawn.cumsum(0)])
    return Columns(
        before.index_select(0, structure.ptr).to(structure.ptr.dtype),
        structure.index.index_select(0, places),
        places if ids is None else ids.index_select(0, places),
        None if is_mask else by_place.index_select(0, places),
    )
