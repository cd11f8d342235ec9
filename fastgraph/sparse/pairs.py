"""The entries of two sparse matrices that meet in their product, remembered while both live."""

from __future__ import annotations

from functools import cached_property

import torch

from fastgraph.graphs.graph import normal_mode
from fastgraph.graphs.memo import MEMO, is_recording, recalled, tensor_key
from fastgraph.sparse.groups import Groups
from fastgraph.sparse.pattern import Pattern, from_places


class Pairs:
    """The multiplications of a product: each entry of A with all of B in the row of its column.

    Attributes:
        of_a: the entry of A of each.
        of_b: that of B.
        products: that of the product, to which it is added.
        pattern: of the product, in ascending order.
    """

    def __init__(self, a: Pattern, b: Pattern) -> None:
        ptr, col, ids = b.rows
        middle = a.col.long()
        counts = ptr.diff()[middle]
        ends = counts.cumsum(0)
        of_a = torch.repeat_interleave(counts)
        first = ptr[middle] - (ends - counts)
        position = torch.arange(len(of_a), device=a.device) + first[of_a]
        of_b = position if ids is None else ids[position].long()
        places = a.row.long()[of_a] * b.shape[1] + col.long()[position]
        distinct, group = torch.unique(places, return_inverse=True)
        shape = a.shape[0], b.shape[1]
        self.of_a = Groups(of_a, a.nnz)
        self.of_b = Groups(of_b, b.nnz)
        self.products = Groups(group, len(distinct))
        self.pattern = from_places(distinct, shape, torch.promote_types(a.dtype, b.dtype))

    @cached_property
    def by_product(self) -> Pattern:
        """A matrix with a row for each entry of the product and a column for each pair."""
        with normal_mode(), torch.no_grad():
            index = self.products.index
            numbers = torch.arange(len(index), device=index.device)
            return Pattern((self.products.num_groups, len(index)), torch.stack([index, numbers]))

    @property
    def nbytes(self) -> int:
        """Of the indices, and of what sorting each of them for a gradient leaves."""
        indices = (self.of_a.index, self.of_b.index, self.products.index)
        return 2 * sum(t.nbytes for t in indices) + self.pattern.indices.nbytes


def pairs(a: Pattern, b: Pattern) -> Pairs:
    """The pairs of two patterns: made once for as long as the indices of both live unchanged.

    They count as graphs do for the setting ``cache_bytes``.
    """
    a.check_unedited()
    b.check_unedited()
    (of_a, which_a), (of_b, which_b) = a.source, b.source
    tensors = (*of_a, *of_b)
    if is_recording() or any(tensor.is_inference() for tensor in tensors):
        return _made(a, b)
    key = ("pairs", which_a, which_b, *map(tensor_key, tensors))
    found = recalled(key, _made, (a, b), tensors)
    if found.pattern.is_edited:  # by whom a product gave its indices to
        MEMO.forget(key)
        found = recalled(key, _made, (a, b), tensors)
    return found


def _made(a: Pattern, b: Pattern) -> Pairs:
    with normal_mode(), torch.no_grad():
        return Pairs(a, b)
