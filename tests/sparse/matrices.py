"""Patterns with the awkward cases that every operation must survive, and their dense matrices."""

from __future__ import annotations

import torch
from torch import Tensor

import fastgraph.sparse as fgs
from fastgraph.sparse import SparseMatrix
from fastgraph.sparse.pattern import Pattern

FORMS = ("coo", "int32", "strided", "csr", "csc", "transposed")
"""Ways in which one set of places can be given; values are in the order of the form."""


def places(shape: tuple[int, int], nnz: int, *, distinct: bool = False, seed: int = 0) -> Tensor:
    """Unsorted indices ``[2, nnz]``, with duplicates unless ``distinct``."""
    generator = torch.Generator().manual_seed(seed)
    size = shape[0] * shape[1]
    if distinct:
        flat = torch.randperm(size, generator=generator)[:nnz]
    else:
        flat = torch.randint(size, (nnz,), generator=generator)
    return torch.stack([flat // shape[1], flat % shape[1]])


def pattern(form: str, shape: tuple[int, int], indices: Tensor) -> Pattern:
    """The pattern of these places, numbered as the form has them."""
    row, col = indices
    if form == "coo":
        return fgs.spmatrix(indices, shape=shape).pattern
    if form == "int32":
        return fgs.spmatrix(indices.int(), shape=shape).pattern
    if form == "strided":
        return fgs.spmatrix(torch.stack([indices, indices], dim=2)[..., 1], shape=shape).pattern
    if form == "transposed":
        return fgs.from_coo(col, row, shape=shape[::-1]).T.pattern
    near, far, size = (row, col, shape[0]) if form == "csr" else (col, row, shape[1])
    order = torch.argsort(near, stable=True)
    ptr = torch.cat([torch.zeros(1), near.bincount(minlength=size).cumsum(0)]).long()
    make = fgs.from_csr if form == "csr" else fgs.from_csc
    return make(ptr, far[order], shape=shape).pattern


PLACES = {
    "square": ((6, 6), places((6, 6), 20)),
    "wide": ((3, 9), places((3, 9), 14)),
    "tall": ((9, 4), places((9, 4), 11)),
    "distinct": ((5, 7), places((5, 7), 12, distinct=True)),
    "one": ((4, 5), torch.tensor([[2], [3]])),
    "none": ((3, 4), torch.empty(2, 0, dtype=torch.int64)),
    "row": ((1, 5), places((1, 5), 8)),
    "column": ((5, 1), places((5, 1), 8)),
    "hub": ((40, 40), torch.stack([torch.arange(200) % 2 * 7, torch.arange(200) % 40])),
}

MATRICES = [
    (name, form)
    for name in PLACES
    for form in (FORMS if name in ("square", "wide", "none") else ("coo", "csc"))
]
"""Names of places, and forms, for ``pytest.mark.parametrize``."""


def matrix(
    name: str,
    form: str = "coo",
    heads: int | None = None,
    dtype: torch.dtype = torch.float64,
    *,
    requires_grad: bool = False,
    seed: int = 1,
) -> SparseMatrix:
    """The matrix of a name and a form, with random values."""
    where = pattern(form, *PLACES[name])
    generator = torch.Generator().manual_seed(seed)
    size = (where.nnz,) if heads is None else (where.nnz, heads)
    val = torch.randn(size, dtype=torch.float64, generator=generator).to(dtype)
    return SparseMatrix(where, val.requires_grad_(requires_grad))


def dense(pattern: Pattern, val: Tensor) -> Tensor:
    """The dense matrix ``[n, m]`` or ``[n, m, heads]``, by products with matrices of ones alone."""
    n, m = pattern.shape
    of_rows = (pattern.row.unsqueeze(1) == torch.arange(n)).to(val.dtype)
    of_columns = (pattern.col.unsqueeze(1) == torch.arange(m)).to(val.dtype)
    heads = val if val.dim() == 2 else val.unsqueeze(1)
    out = torch.einsum("en,em,eh->nmh", of_rows, of_columns, heads)
    return out if val.dim() == 2 else out.squeeze(2)
