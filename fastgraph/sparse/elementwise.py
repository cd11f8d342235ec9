"""Sums, products and quotients of two sparse matrices, entry by entry, as patterns and values."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgraph.graphs.graph import normal_mode
from fastgraph.sparse.groups import Groups
from fastgraph.sparse.pattern import Pattern, from_places
from fastgraph.sparse.products import check_no_duplicates


def add(a: Pattern, a_val: Tensor, b: Pattern, b_val: Tensor) -> tuple[Pattern, Tensor]:
    """The sum, with an entry where one of both has one, in ascending order.

    Raises:
        RuntimeError: shapes, dtypes, devices or heads differ.
    """
    _check(a, a_val, b, b_val)
    if a is b or (a.is_diagonal and b.is_diagonal):
        pattern, val = a, a_val + b_val
        if a.is_diagonal:
            return pattern, val
    else:
        with normal_mode():
            dtype = torch.promote_types(a.dtype, b.dtype)
            both = torch.cat([a.indices.to(dtype), b.indices.to(dtype)], dim=1)
            pattern = Pattern(a.shape, both)
        val = torch.cat([a_val, b_val])
    return pattern.coalesced.pattern, pattern.coalesced.values(val)


def mul(a: Pattern, a_val: Tensor, b: Pattern, b_val: Tensor) -> tuple[Pattern, Tensor]:
    """The product of the entries that both have, in ascending order.

    Raises:
        RuntimeError: shapes, dtypes, devices or heads differ, or there are duplicates.
    """
    _check(a, a_val, b, b_val)
    if a.is_diagonal and b.is_diagonal:
        return a, a_val * b_val
    check_no_duplicates("mul", a, b)
    with normal_mode(), torch.no_grad():
        (a_places, a_order), (b_places, b_order) = a.ascending, b.ascending
        position = torch.searchsorted(b_places, a_places)
        is_common = position < b.nnz
        is_common[is_common.clone()] = b_places[position[is_common]] == a_places[is_common]
        of_a, of_b = a_order[is_common], b_order[position[is_common]]
        pattern = from_places(a_places[is_common], a.shape, torch.promote_types(a.dtype, b.dtype))
    return pattern, Groups(of_a, a.nnz).gather(a_val) * Groups(of_b, b.nnz).gather(b_val)


def div(a: Pattern, a_val: Tensor, b: Pattern, b_val: Tensor) -> tuple[Pattern, Tensor]:
    """The quotient of two matrices with the same entries, in the order of the first.

    Raises:
        RuntimeError: shapes, dtypes, devices, heads or the places of entries differ, or there are
            duplicates.
    """
    _check(a, a_val, b, b_val)
    if a is b or (a.is_diagonal and b.is_diagonal):
        if not a.is_diagonal:
            check_no_duplicates("div", a, b)
        return a, a_val / b_val
    check_no_duplicates("div", a, b)
    (a_places, a_order), (b_places, b_order) = a.ascending, b.ascending
    if not torch.equal(a_places, b_places):
        raise RuntimeError("B must have entries where A has them in div, got others")
    with normal_mode():
        of_b = torch.empty_like(b_order).index_copy_(0, a_order, b_order)
    return a, a_val / Groups(of_b, b.nnz).gather(b_val)


def _check(a: Pattern, a_val: Tensor, b: Pattern, b_val: Tensor) -> None:
    if a.shape != b.shape:
        raise RuntimeError(f"A and B must have one shape, got {list(a.shape)} and {list(b.shape)}")
    facts = [(v.dtype, v.device, tuple(v.shape[1:])) for v in (a_val, b_val)]
    if facts[0] != facts[1]:
        raise RuntimeError(
            "A and B must have values of one dtype, on one device and with as many heads, got "
            + " and ".join(f"{dtype} on {device}, {[*heads]}" for dtype, device, heads in facts)
        )
