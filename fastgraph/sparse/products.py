"""Products of sparse matrices with dense and with sparse ones, as patterns and values."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fastgraph import ops
from fastgraph.plugins.backend import FLOATING
from fastgraph.sparse.pairs import pairs
from fastgraph.sparse.pattern import Pattern, diagonal


class Values(Protocol):
    """Facts that are known of values before they are computed; of a tensor, too."""

    @property
    def shape(self) -> torch.Size:
        """Of all values."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the values."""
        ...

    @property
    def device(self) -> torch.device:
        """Where they are."""
        ...

    def dim(self) -> int:
        """The number of dimensions."""
        ...


def spmm(pattern: Pattern, val: Tensor, x: Tensor) -> Tensor:
    """The product with a dense matrix, a vector, or one matrix for each head.

    Args:
        pattern: of ``[n, m]``.
        val: ``[nnz]``, or ``[nnz, heads]`` for dense matrices of heads.
        x: ``[m]``, ``[m, k]`` or ``[m, k, heads]``, of the dtype of ``val``.

    Returns:
        ``[n]``, ``[n, k]`` or ``[n, k, heads]``.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit, or no kernel takes the dtype.
    """
    check_spmm(pattern, val, x)
    if x.dim() == 1:
        return _spmm(pattern, val, x.unsqueeze(1)).squeeze(1)
    if x.dim() == 2:
        return _spmm(pattern, val, x)
    return _spmm(pattern, val, x.transpose(1, 2)).transpose(1, 2).contiguous()


def _spmm(pattern: Pattern, val: Tensor, x: Tensor) -> Tensor:
    """Of ``[m, k]``, or ``[m, heads, k]`` with values ``[nnz, heads]``."""
    num_out = pattern.shape[0]
    if x.numel() == 0:  # no kernel runs for no channels, and a gradient has its shape even so
        messages = x.index_select(0, pattern.col) * val.unsqueeze(-1)
        return messages.new_zeros(num_out, *x.shape[1:]).index_add(0, pattern.row, messages)
    index, ptr, transpose, _, _ = pattern.edges
    return ops.spmm(x, index, val, ptr=ptr, num_out=num_out, transpose=transpose)


def check_spmm(pattern: Pattern, val: Values, x: Tensor) -> None:
    """Shapes, dtypes and devices fit; see :func:`spmm`.

    Raises:
        RuntimeError: they do not.
    """
    fits = x.dim() in (1, 2, 3) and x.shape[0] == pattern.shape[1]
    fits = fits and (x.dim() == 3) == (val.dim() == 2)
    if not fits or (x.dim() == 3 and x.shape[2] != val.shape[1]):
        raise RuntimeError(
            "X must be [m, k] or [m] for A of shape [n, m], or [m, k, heads] for values "
            f"[nnz, heads], got X of shape {list(x.shape)} for A of shape {list(pattern.shape)} "
            f"with values of shape {list(val.shape)}"
        )
    if x.dtype != val.dtype:
        raise RuntimeError(f"X must have the dtype of the values of A, {val.dtype}, got {x.dtype}")
    check_floating("X", x)
    if x.device != val.device:
        raise RuntimeError(f"X must be on the device of A, {val.device}, got {x.device}")


def check_floating(name: str, x: Values) -> None:
    """A tensor has a dtype that operators take.

    Raises:
        RuntimeError: it has none.
    """
    if x.dtype not in FLOATING:
        raise RuntimeError(f"{name} must be one of {[str(d) for d in FLOATING]}, got {x.dtype}")


def sddmm(pattern: Pattern, val: Tensor, x1: Tensor, x2: Tensor) -> Tensor:
    """The values of ``A * (X1 @ X2)``, computed where A has entries only.

    Args:
        pattern: of ``[n, m]``.
        val: ``[nnz]`` or, for matrices of heads, ``[nnz, heads]``.
        x1: ``[n]``, ``[n, k]`` or ``[n, k, heads]``.
        x2: ``[m]``, ``[k, m]`` or ``[k, m, heads]``.

    Returns:
        ``[nnz]``, or ``[nnz, heads]`` for matrices of heads.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit, or no kernel takes the dtype.
    """
    x1, x2 = as_matrices(x1, x2)
    check_sddmm(pattern, val, x1, x2)
    found = dots(pattern, x1, x2)
    return found * (val if val.dim() == found.dim() else val.unsqueeze(-1))


def as_matrices(x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors ``[n]`` and ``[m]`` as matrices ``[n, 1]`` and ``[1, m]``; matrices as they are."""
    return (
        x1.unsqueeze(1) if x1.dim() == 1 else x1,
        x2.unsqueeze(0) if x2.dim() == 1 else x2,
    )


def dots(pattern: Pattern, x1: Tensor, x2: Tensor) -> Tensor:
    """The values of ``X1 @ X2`` where a pattern has entries.

    Args:
        pattern: of ``[n, m]``.
        x1: ``[n, k]`` or ``[n, k, heads]``.
        x2: ``[k, m]`` or ``[k, m, heads]``.

    Returns:
        ``[nnz]`` or ``[nnz, heads]``.
    """
    ends = x2.transpose(0, 1), x1
    if x1.dim() == 3:
        ends = x2.permute(1, 2, 0), x1.transpose(1, 2)
    if x1.numel() == 0 or x2.numel() == 0:
        of_columns, of_rows = ends
        products = of_columns.index_select(0, pattern.col) * of_rows.index_select(0, pattern.row)
        return products.sum(-1)
    index, ptr, transpose, _, _ = pattern.edges
    if transpose:  # sources are rows then
        ends = ends[1], ends[0]
    found: Tensor = ops.sddmm(*ends, index, ptr=ptr)
    return found


def check_sddmm(pattern: Pattern, val: Values, x1: Tensor, x2: Tensor) -> None:
    """Shapes, dtypes and devices fit, of matrices; see :func:`sddmm`.

    Raises:
        RuntimeError: they do not.
    """
    (n, m), dim = pattern.shape, x1.dim()
    fits = dim == x2.dim() and dim in (2, 3) and val.dim() < dim
    fits = fits and (x1.shape[0], x2.shape[1]) == (n, m) and x1.shape[1] == x2.shape[0]
    fits = fits and x1.shape[2:] == x2.shape[2:]
    if not fits or (val.dim() == 2 and val.shape[1:] != x1.shape[2:]):
        raise RuntimeError(
            "X1 and X2 must be [n, k] and [k, m], [n] and [m], or [n, k, heads] and [k, m, heads] "
            "for A of shape [n, m] with values [nnz], or [nnz, heads] for matrices of heads, got "
            f"X1 of shape {list(x1.shape)} and X2 of shape {list(x2.shape)} for A of shape "
            f"{list(pattern.shape)} with values of shape {list(val.shape)}"
        )
    if x1.dtype != x2.dtype:
        raise RuntimeError(f"X1 and X2 must have one dtype, got {x1.dtype} and {x2.dtype}")
    check_floating("X1", x1)
    if x1.device != x2.device or x1.device != pattern.device:
        raise RuntimeError(
            f"X1 and X2 must be on the device of A, {pattern.device}, "
            f"got {x1.device} and {x2.device}"
        )


def softmax(pattern: Pattern, val: Tensor, dim: int) -> Tensor:
    """The softmax of the values of each row, for ``dim`` 1, or of each column, for 0.

    Args:
        pattern: of the matrix.
        val: ``[nnz]`` or ``[nnz, heads]``.
        dim: along which.

    Raises:
        ValueError: ``dim`` is neither.
        RuntimeError: no kernel takes the dtype.
    """
    if dim not in (0, 1):
        raise ValueError(f"dim must be 0 or 1, got {dim}")
    check_floating("the values", val)
    if val.numel() == 0:
        return val.clone()
    index, ptr, transpose, _, _ = pattern.edges
    num_in, num_out = pattern.shape
    if dim == 1:
        num_in, num_out = num_out, num_in
    else:
        transpose = not transpose
    return ops.edge_softmax(
        val, index, ptr=ptr, num_out=num_out, num_in=num_in, transpose=transpose
    )


_OF_PROGRAMS = {"sum": "sum", "smean": "mean", "smax": "max", "smin": "min"}


def reduced(pattern: Pattern, val: Tensor, dim: int, reduction: str) -> Tensor:
    """The reduction of the values of each row, for ``dim`` 1, or of each column, for 0.

    It goes along edges, where :class:`Groups` would sort entries first.

    Args:
        pattern: of the matrix.
        val: ``[nnz]`` or ``[nnz, heads]``, of floating-point numbers.
        dim: along which.
        reduction: one of ``fastgraph.sparse.groups.REDUCTIONS`` but for products.
    """
    index, ptr, transpose, _, _ = pattern.edges
    num_out, num_in = pattern.shape if dim == 1 else pattern.shape[::-1]
    width = val.shape[1:].numel()
    (out,) = ops.edge_program(
        f"v = edge {width}\n{_OF_PROGRAMS[reduction]} v",
        {"v": val},
        index,
        ptr=ptr,
        num_in=num_in,
        num_out=num_out,
        transpose=transpose if dim == 1 else not transpose,
    )[:1]
    return out if val.dim() == 2 else out.squeeze(1)


def spspmm(a: Pattern, a_val: Tensor, b: Pattern, b_val: Tensor) -> tuple[Pattern, Tensor]:
    """The product of two sparse matrices without duplicates, with an entry where one may be.

    Every pair of an entry of A and one of B in the row of its column is a product; products in one
    place are added. So memory is that of as many products as there are multiplications.

    Args:
        a: of ``[n, m]``.
        a_val: ``[nnz]``.
        b: of ``[m, p]``.
        b_val: ``[nnz]`` of B, of the dtype of ``a_val``.

    Returns:
        The pattern, in ascending order unless one of both is a square diagonal, and its values.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit, or there are duplicates.
    """
    check_spspmm(a, a_val, b, b_val)
    if a.is_diagonal and b.is_diagonal:
        return _diagonals(a, a_val, b, b_val)
    if a.is_diagonal and a.shape[0] == a.shape[1]:
        return b, b.by_row.gather(a_val) * b_val
    if b.is_diagonal and b.shape[0] == b.shape[1]:
        return a, a.by_column.gather(b_val) * a_val
    made = pairs(a, b)
    return made.pattern, made.products.sum(made.of_a.gather(a_val) * made.of_b.gather(b_val))


def _diagonals(a: Pattern, a_val: Tensor, b: Pattern, b_val: Tensor) -> tuple[Pattern, Tensor]:
    shape = a.shape[0], b.shape[1]
    common = min(a.nnz, b.nnz)
    val = a_val[:common] * b_val[:common]
    return diagonal(shape, a.device), torch.nn.functional.pad(val, (0, min(shape) - common))


def check_spspmm(a: Pattern, a_val: Values, b: Pattern, b_val: Values) -> None:
    """Two sparse matrices can be multiplied.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit, or there are heads or duplicates.
    """
    if a.shape[1] != b.shape[0]:
        raise RuntimeError(
            "B must have as many rows as A has columns, got A of shape "
            f"{list(a.shape)} and B of shape {list(b.shape)}"
        )
    for name, val in (("A", a_val), ("B", b_val)):
        if val.dim() != 1:
            raise RuntimeError(
                f"{name} must have values [nnz] to be multiplied with a sparse matrix, "
                f"got shape {list(val.shape)}"
            )
    if a_val.dtype != b_val.dtype or a_val.device != b_val.device:
        raise RuntimeError(
            "A and B must have one dtype and be on one device, got "
            f"{a_val.dtype} on {a_val.device} and {b_val.dtype} on {b_val.device}"
        )
    check_no_duplicates("spspmm", a, b)


def check_no_duplicates(name: str, a: Pattern, b: Pattern) -> None:
    """Each place of both holds one entry at most.

    Raises:
        RuntimeError: one of them has two in one place.
    """
    for argument, pattern in (("A", a), ("B", b)):
        if pattern.has_duplicate:
            raise RuntimeError(
                f"{argument} must not have duplicate entries in {name}, but it has: "
                f"{argument}.coalesce() adds them"
            )
