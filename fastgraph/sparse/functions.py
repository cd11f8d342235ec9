"""The functions of ``dgl.sparse`` on matrices, in its words."""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from fastgraph.sparse import fusing, products, semirings
from fastgraph.sparse.expression import Dot, Ends, Expression, mapped, may_wait
from fastgraph.sparse.pattern import check_tensor
from fastgraph.sparse.sparse_matrix import Scalar, SparseMatrix


def spmm(A: SparseMatrix, X: Tensor) -> Tensor:  # noqa: N803
    """The product of a sparse and a dense matrix; the same as ``A @ X``.

    Args:
        A: ``[n, m]``, values ``[nnz]``, or ``[nnz, heads]`` for one matrix for each head.
        X: ``[m]``, ``[m, k]``, or ``[m, k, heads]``, of the dtype of ``A``.

    Returns:
        ``[n]``, ``[n, k]``, or ``[n, k, heads]``; sums are accumulated in float32, or float64.

    Raises:
        AssertionError: an argument has the wrong type.
        RuntimeError: shapes, dtypes or devices do not fit, or values are no floating-point numbers.
    """
    _check_type("A", A, SparseMatrix)
    _check_type("X", X, Tensor)
    if isinstance(A.values, Expression):
        return fusing.product(A.values, X)
    return products.spmm(A.pattern, A.values, X)


def bspmm(A: SparseMatrix, X: Tensor) -> Tensor:  # noqa: N803
    """:func:`spmm` for matrices of heads."""
    return spmm(A, X)


def spspmm(A: SparseMatrix, B: SparseMatrix) -> SparseMatrix:  # noqa: N803
    """The product of two sparse matrices; the same as ``A @ B``.

    Args:
        A: ``[n, m]``, values ``[nnz]``, without duplicates.
        B: ``[m, p]``, likewise, of the dtype of ``A``.

    Returns:
        ``[n, p]``, with an entry wherever a product of two was added, though it may be 0.

    Raises:
        AssertionError: an argument has the wrong type.
        RuntimeError: shapes, dtypes or devices do not fit, or there are heads or duplicates.
    """
    _check_type("A", A, SparseMatrix)
    _check_type("B", B, SparseMatrix)
    return A.multiplied(B)


def matmul(
    A: Tensor | SparseMatrix,  # noqa: N803
    B: Tensor | SparseMatrix,  # noqa: N803
    semiring: str = "plus_times",
    ties: str = "split",
) -> Tensor | SparseMatrix:
    """:func:`spmm`, :func:`spspmm`, or the product of two dense matrices; or over a semiring.

    A semiring ``"ADD_MULTIPLY"`` is named as in python-graphblas. Each entry ``a`` of a row and the
    number ``x`` that it meets are a message: ``a * x`` for ``times``, ``a + x`` for ``plus``,
    ``a - x`` for ``minus``, ``a`` for ``first``, ``x`` for ``second``, and 1 for ``pair``. The
    messages of a row are reduced by ``plus``, ``min``, ``max``, ``logsumexp``, ``mean``, over their
    number, or ``weighted_mean``, by the values: ``weighted_mean_second`` is ``sum(a x) / sum(a)``,
    and ``weighted_mean_times``, which section 4.3 of Besta et al. (SC 2023) describes,
    ``sum(a^2 x) / sum(a)``. Rows without entries have the identity of the addition, infinity for
    ``min`` and minus infinity for ``max`` and ``logsumexp``, and 0 for means.

    Args:
        A: dense, or ``[n, m]`` with values ``[nnz]`` or ``[nnz, heads]``. Over a semiring entries
            in one place are several messages.
        B: as for :func:`spmm` or :func:`spspmm`.
        semiring: its name. All others need a sparse ``A``.
        ties: who has the gradient of a minimum or maximum that several messages attain:
            all of them, evenly (``"split"``), or the first one (``"winner"``), and nobody where the
            result is the identity.

    Raises:
        AssertionError: an argument has the wrong type, or only the first is dense.
        ValueError: there is no such semiring, or no such treatment of ties.
        RuntimeError: as for these.
    """
    _check_type("A", A, (Tensor, SparseMatrix))
    _check_type("B", B, (Tensor, SparseMatrix))
    if semiring != "plus_times":
        _check_type("A", A, SparseMatrix)
        assert isinstance(A, SparseMatrix)
        if isinstance(B, Tensor):
            return semirings.matmul(A.pattern, A._val, B, semiring, ties)
        made = semirings.spspmm(A.pattern, A._val, B.pattern, B._val, semiring, ties)
        return SparseMatrix(*made)
    if isinstance(A, Tensor):
        if not isinstance(B, Tensor):
            raise AssertionError("B must be a Tensor where A is one, got SparseMatrix")
        return torch.matmul(A, B)
    return spmm(A, B) if isinstance(B, Tensor) else spspmm(A, B)


def sddmm(A: SparseMatrix, X1: Tensor, X2: Tensor) -> SparseMatrix:  # noqa: N803
    """``A * (X1 @ X2)``, computed only where ``A`` has entries.

    Args:
        A: ``[n, m]``, values ``[nnz]``, or ``[nnz, heads]`` for matrices of heads.
        X1: ``[n, k]``, ``[n]``, or ``[n, k, heads]``.
        X2: ``[k, m]``, ``[m]``, or ``[k, m, heads]``, of the dtype of ``X1``.

    Returns:
        Entries where ``A`` has them.

    Raises:
        AssertionError: an argument has the wrong type.
        RuntimeError: shapes, dtypes or devices do not fit, or values are no floating-point numbers.
    """
    _check_type("A", A, SparseMatrix)
    _check_type("X1", X1, Tensor)
    _check_type("X2", X2, Tensor)
    if not may_wait(A.pattern, X1.shape[2:].numel(), X1, X2, *A.tensors, form="dots") or 0 in (
        *X1.shape,
        *X2.shape,
    ):
        return SparseMatrix(A.pattern, products.sddmm(A.pattern, A._val, X1, X2))
    X1, X2 = products.as_matrices(X1, X2)  # noqa: N806
    products.check_sddmm(A.pattern, A.values, X1, X2)
    dots = Dot(A.pattern, X1, X2)
    weights = A.expression
    if weights.leaves(dots.dtype):
        return SparseMatrix(A.pattern, dots)
    made = mapped(operator.mul, dots, weights)
    if made is None:
        return SparseMatrix(A.pattern, products.sddmm(A.pattern, A._val, X1, X2))
    return SparseMatrix(A.pattern, made)


def bsddmm(A: SparseMatrix, X1: Tensor, X2: Tensor) -> SparseMatrix:  # noqa: N803
    """:func:`sddmm` for matrices of heads."""
    return sddmm(A, X1, X2)


def softmax(input: SparseMatrix, dim: int = 1) -> SparseMatrix:
    """:meth:`SparseMatrix.softmax`."""
    return input.softmax(dim)


def reduce(input: SparseMatrix, dim: int | None = None, rtype: str = "sum") -> Tensor:
    """:meth:`SparseMatrix.reduce`."""
    return input.reduce(dim, rtype)


def sum(input: SparseMatrix, dim: int | None = None) -> Tensor:
    """:meth:`SparseMatrix.reduce` by sums."""
    return input.sum(dim)


def smax(input: SparseMatrix, dim: int | None = None) -> Tensor:
    """:meth:`SparseMatrix.reduce` by maxima."""
    return input.smax(dim)


def smin(input: SparseMatrix, dim: int | None = None) -> Tensor:
    """:meth:`SparseMatrix.reduce` by minima."""
    return input.smin(dim)


def smean(input: SparseMatrix, dim: int | None = None) -> Tensor:
    """:meth:`SparseMatrix.reduce` by means."""
    return input.smean(dim)


def sprod(input: SparseMatrix, dim: int | None = None) -> Tensor:
    """:meth:`SparseMatrix.reduce` by products."""
    return input.sprod(dim)


def add(A: SparseMatrix, B: SparseMatrix) -> SparseMatrix:  # noqa: N803
    """``A + B``, with an entry where one of both has one, in ascending order.

    Raises:
        TypeError: one of both is no sparse matrix.
        RuntimeError: shapes, dtypes, devices or numbers of heads differ.
    """
    return A + B


def sub(A: SparseMatrix, B: SparseMatrix) -> SparseMatrix:  # noqa: N803
    """``A - B``; see :func:`add`."""
    return A - B


def mul(A: SparseMatrix | Scalar, B: SparseMatrix | Scalar) -> SparseMatrix:  # noqa: N803
    """``A * B``: by a number, or entry by entry where both have one, in ascending order.

    Raises:
        TypeError: neither is a sparse matrix, or one is no number either.
        RuntimeError: as for :func:`add`, or one of both has duplicates.
    """
    out: SparseMatrix = A * B  # type: ignore[assignment]  # of two numbers, as in DGL
    return out


def div(A: SparseMatrix, B: SparseMatrix | Scalar) -> SparseMatrix:  # noqa: N803
    """``A / B``: by a number, or entry by entry of a matrix with entries in the same places.

    Raises:
        TypeError: an argument has the wrong type.
        RuntimeError: as for :func:`mul`, or ``B`` has entries elsewhere.
    """
    return A / B


def power(A: SparseMatrix, scalar: Scalar) -> SparseMatrix:  # noqa: N803
    """The values of ``A`` to a power.

    Raises:
        TypeError: the exponent is no number.
    """
    return A**scalar


def neg(A: SparseMatrix) -> SparseMatrix:  # noqa: N803
    """``-A``."""
    return A.neg()


def inv(A: SparseMatrix) -> SparseMatrix:  # noqa: N803
    """:meth:`SparseMatrix.inv`."""
    return A.inv()


def sp_broadcast_v(A: SparseMatrix, v: Tensor, op: str) -> SparseMatrix:  # noqa: N803
    """Each value of ``A`` and the number of its row, or of its column.

    Args:
        A: ``[n, m]``, values ``[nnz]`` or ``[nnz, heads]``.
        v: ``[n, 1]`` for one number for each row, ``[1, m]`` or ``[m]`` for each column.
        op: a function of the module ``operator``: ``"add"``, ``"sub"``, ``"mul"`` or ``"truediv"``.

    Raises:
        TypeError: ``v`` is not a tensor.
        AssertionError: it has another shape.
    """
    check_tensor("v", v)
    of_two = getattr(operator, op)
    n, m = A.shape
    shape = (1, *v.shape) if v.dim() == 1 else tuple(v.shape)
    if shape not in ((1, m), (n, 1)):
        raise AssertionError(
            f"v must be [{n}, 1], [1, {m}] or [{m}] for A of shape {[n, m]}, "
            f"got shape {list(v.shape)}"
        )
    if may_wait(A.pattern, A.values.shape[1:].numel(), v, *A.tensors) and v.dtype == A.dtype:
        ends = Ends(A.pattern, v.reshape(-1), is_row=shape != (1, m))
        made = mapped(of_two, A.expression, ends)
        if made is not None:
            return SparseMatrix(A.pattern, made)
    of_entries = A.pattern.gather(v.reshape(-1), is_row=shape != (1, m))
    if A._val.dim() > 1:
        of_entries = of_entries.unsqueeze(1)
    return SparseMatrix(A.pattern, of_two(A._val, of_entries))


def sp_add_v(A: SparseMatrix, v: Tensor) -> SparseMatrix:  # noqa: N803
    """:func:`sp_broadcast_v` with ``+``."""
    return sp_broadcast_v(A, v, "add")


def sp_sub_v(A: SparseMatrix, v: Tensor) -> SparseMatrix:  # noqa: N803
    """:func:`sp_broadcast_v` with ``-``."""
    return sp_broadcast_v(A, v, "sub")


def sp_mul_v(A: SparseMatrix, v: Tensor) -> SparseMatrix:  # noqa: N803
    """:func:`sp_broadcast_v` with ``*``."""
    return sp_broadcast_v(A, v, "mul")


def sp_div_v(A: SparseMatrix, v: Tensor) -> SparseMatrix:  # noqa: N803
    """:func:`sp_broadcast_v` with ``/``."""
    return sp_broadcast_v(A, v, "truediv")


def _check_type(name: str, value: object, types: type | tuple[type, ...]) -> None:
    if not isinstance(value, types):
        names = [t.__name__ for t in (types if isinstance(types, tuple) else (types,))]
        raise AssertionError(f"{name} must be a {' or a '.join(names)}, got {type(value).__name__}")
