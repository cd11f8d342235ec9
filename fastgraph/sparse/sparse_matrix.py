"""``SparseMatrix``: a pattern and its values."""

from __future__ import annotations

import operator
from collections.abc import Callable
from numbers import Number
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fastgraph.plugins.backend import FLOATING
from fastgraph.sparse import elementwise, fusing, products, selection
from fastgraph.sparse.expression import (
    Ends,
    Entries,
    Expression,
    Softmax,
    leaves,
    mapped,
    may_defer,
    may_wait,
)
from fastgraph.sparse.groups import REDUCTIONS, Groups
from fastgraph.sparse.lazy_values import expression_of, index_of, lazy_values
from fastgraph.sparse.pattern import Pattern, Shape, check_tensor, diagonal
from fastgraph.sparse.virtual import Virtual, applied

Scalar: TypeAlias = float | Tensor
"""A number, or a tensor without dimensions."""


def is_scalar(x: object) -> bool:
    """True for a :data:`Scalar`."""
    return isinstance(x, Number) or (isinstance(x, Tensor) and x.dim() == 0)


class SparseMatrix:
    """A sparse matrix, or one for each of several heads with entries in the same places.

    Entries may be in any order and several in one place, where they are added by all that is linear
    in them. Row ``i`` aggregates: in ``A @ X`` it sums what its entries' columns name. Matrices are
    immutable; those that an operation makes share patterns, and what was sorted of them, with its
    operands. Made by :func:`~fastgraph.sparse.spmatrix` and its like.
    """

    def __init__(
        self, pattern: Pattern, val: Tensor | Expression, *, is_ones: bool = False
    ) -> None:
        if not isinstance(val, Expression):
            check_tensor("val", val)
            val = expression_of(val, pattern)
        if val.dim() not in (1, 2):
            raise AssertionError(f"val must be [nnz] or [nnz, heads], got shape {list(val.shape)}")
        if val.shape[0] != pattern.nnz or val.device != pattern.device:
            raise RuntimeError(
                f"val must have a value for each of {pattern.nnz} entries on {pattern.device}, "
                f"got shape {list(val.shape)} on {val.device}"
            )
        self._pattern = pattern
        self._values = val
        self._version = val._version if is_ones and isinstance(val, Tensor) else None

    def __getstate__(self) -> dict[str, Any]:
        """With values computed, as copies of tensors count their edits anew."""
        return {"pattern": self._pattern, "val": self._val, "is_ones": self._is_ones}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def pattern(self) -> Pattern:
        """Where the entries are; one object for all matrices that share it."""
        return self._pattern

    @property
    def values(self) -> Tensor | Expression:
        """The values: the tensor that was given, or an expression that computes them."""
        return self._values

    @property
    def expression(self) -> Expression:
        """The values as an expression, in which they may be operands."""
        if isinstance(self._values, Expression):
            return self._values
        return Entries(self._pattern, self._values, is_ones=self._is_ones)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The values, if they are a tensor; no expression is one."""
        return (self._values,) if isinstance(self._values, Tensor) else ()

    @property
    def _is_ones(self) -> bool:
        """True if the values were made as ones, and not edited since."""
        if self._version is None or isinstance(self._values, Expression):
            return False
        return self._values._version == self._version

    @property
    def val(self) -> Tensor:
        """The values, ``[nnz]`` or ``[nnz, heads]``: the tensor that was given, or one that waits.

        The latter is computed by the first function that needs numbers, and stays an expression
        under arithmetic, ``leaky_relu`` and ``dropout``.

        Raises:
            RuntimeError: a tensor of which they are computed was edited in place.
        """
        return self._values if isinstance(self._values, Tensor) else lazy_values(self._values)

    @property
    def _val(self) -> Tensor:
        """The values, computed."""
        return self._values if isinstance(self._values, Tensor) else self._values.value()

    @property
    def shape(self) -> Shape:
        """Numbers of rows and columns."""
        return self._pattern.shape

    @property
    def nnz(self) -> int:
        """Number of entries, duplicates included."""
        return self._pattern.nnz

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self._values.dtype

    @property
    def device(self) -> torch.device:
        """Where the values and indices are."""
        return self._pattern.device

    @property
    def row(self) -> Tensor:
        """The row of each entry, ``[nnz]``."""
        return index_of(self._pattern, is_row=True)

    @property
    def col(self) -> Tensor:
        """The column of each entry, ``[nnz]``."""
        return index_of(self._pattern, is_row=False)

    def coo(self) -> tuple[Tensor, Tensor]:
        """Rows and columns of all entries."""
        return self._pattern.row, self._pattern.col

    def indices(self) -> Tensor:
        """Rows and columns of all entries, ``[2, nnz]``."""
        return self._pattern.indices

    def csr(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The entries by row: ``indptr``, columns, and the number of each entry.

        The last is ``None`` where entries are numbered in this order.
        """
        ptr, columns, numbers = self._pattern.rows
        return ptr, columns, numbers

    def csc(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The entries by column: ``indptr``, rows, and numbers as in :meth:`csr`."""
        ptr, rows, numbers = self._pattern.columns
        return ptr, rows, numbers

    def to_dense(self) -> Tensor:
        """The dense matrix, ``[n, m]`` or ``[n, m, heads]``; values in one place are added."""
        zeros = self._val.new_zeros(*self.shape, *self._val.shape[1:])
        row, col = self._pattern.row.long(), self._pattern.col.long()
        return zeros.index_put((row, col), self._val, accumulate=True)

    def transpose(self) -> SparseMatrix:
        """The transposed matrix, with the same values in the same order."""
        return SparseMatrix(self._pattern.transposed(), self._val)

    def t(self) -> SparseMatrix:
        """The transposed matrix."""
        return self.transpose()

    @property
    def T(self) -> SparseMatrix:  # noqa: N802
        """The transposed matrix."""
        return self.transpose()

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> SparseMatrix:
        """The matrix on another device, with values of another dtype; itself if both are given."""
        device = self.device if device is None else torch.device(device)
        dtype = self.dtype if dtype is None else dtype
        val = self._val.to(device=device, dtype=dtype)
        if val.device == self.device:
            return self if dtype == self.dtype else self._like(val)
        moved = Pattern(
            self.shape, self.indices().to(device), is_diagonal=self._pattern.is_diagonal
        )
        return SparseMatrix(moved, val)

    def cuda(self) -> SparseMatrix:
        """The matrix on the current GPU."""
        return self.to(device="cuda")

    def cpu(self) -> SparseMatrix:
        """The matrix in the host's memory."""
        return self.to(device="cpu")

    def coalesce(self) -> SparseMatrix:
        """Entries in ascending order by row and column, those in one place added."""
        coalesced = self._pattern.coalesced
        return SparseMatrix(coalesced.pattern, coalesced.values(self._val))

    def has_duplicate(self) -> bool:
        """True if several entries are in one place."""
        return self._pattern.has_duplicate

    def is_diag(self) -> bool:
        """True if the matrix was made as a diagonal; the places of others are not looked at."""
        return self._pattern.is_diagonal

    def index_select(self, dim: int, index: Tensor) -> SparseMatrix:
        """Rows, for ``dim`` 0, or columns, for 1, by number.

        Raises:
            ValueError, TypeError, RuntimeError, IndexError: as for
                :func:`fastgraph.sparse.selection.index_select`.
        """
        return self._selected(selection.index_select(self._pattern, dim, index))

    def range_select(self, dim: int, index: slice) -> SparseMatrix:
        """Consecutive rows, for ``dim`` 0, or columns, for 1.

        Raises:
            ValueError, TypeError, NotImplementedError, RuntimeError: as for
                :func:`fastgraph.sparse.selection.range_select`.
        """
        return self._selected(selection.range_select(self._pattern, dim, index))

    def sample(
        self,
        dim: int,
        fanout: int,
        ids: Tensor | None = None,
        replace: bool = False,
        bias: bool = False,
    ) -> SparseMatrix:
        """At most ``fanout`` entries of each of the rows (``dim`` 0) or columns (1) in ``ids``.

        Args:
            dim: of what ``ids`` holds numbers.
            fanout: how many entries; -1 for all.
            ids: int64 or int32; default: all.
            replace: draw with replacement.
            bias: draw in proportion to values ``[nnz]``.

        Returns:
            A matrix with as many rows, or columns, as there are ``ids``; its values have gradients.

        Raises:
            ValueError, TypeError, RuntimeError, IndexError: as for
                :func:`fastgraph.sparse.selection.sample`.
        """
        return self._selected(
            selection.sample(self._pattern, self._val, dim, fanout, ids, replace, bias)
        )

    def compact(
        self, dim: int, leading_indices: Tensor | None = None
    ) -> tuple[SparseMatrix, Tensor]:
        """The matrix without empty rows (``dim`` 0) or columns (1), and the numbers of the others.

        Args:
            dim: what is renumbered.
            leading_indices: those that are kept in any case, and come first in this order.

        Raises:
            ValueError, TypeError, RuntimeError, IndexError: as for
                :func:`fastgraph.sparse.selection.compact`.
        """
        pattern, kept = selection.compact(self._pattern, dim, leading_indices)
        return SparseMatrix(pattern, self._val), kept

    def reduce(self, dim: int | None = None, rtype: str = "sum") -> Tensor:
        """The reduction of the values: of each row for ``dim`` 1, of each column for 0, or of all.

        Entries that the matrix does not have are no zeros: they are left out. A row without any
        gives 0.

        Args:
            dim: default: all values.
            rtype: ``"sum"``, ``"smax"``, ``"smin"``, ``"smean"`` or ``"sprod"``.

        Returns:
            ``[n]``, ``[m]`` or no dimension, followed by ``[heads]`` where values have them.

        Raises:
            ValueError: ``dim`` is neither of these.
            RuntimeError: ``rtype`` is neither of these.
            IndexError: an extremum of no values at all.
        """
        if rtype not in REDUCTIONS:
            raise RuntimeError(f"rtype must be one of {[*REDUCTIONS]}, got {rtype!r}")
        if dim is None:
            return self._reduce_all(rtype)
        if dim not in (0, 1):
            raise ValueError(f"dim must be 0, 1 or None, got {dim}")
        if self._pattern.is_sharded and rtype != "sprod" and self.dtype in FLOATING:
            return products.reduced(self._pattern, self._val, dim, rtype)
        if isinstance(self._values, Expression):
            return fusing.reduction(self._values, dim, rtype)
        groups: Groups = self._pattern.by_row if dim == 1 else self._pattern.by_column
        return groups.reduce(self._val, rtype)

    def _reduce_all(self, rtype: str) -> Tensor:
        if rtype == "smax":
            return self._val.amax(0)
        if rtype == "smin":
            return self._val.amin(0)
        # A group without rows is 0, but a product of nothing is 1; sums of integers are int64.
        if self.nnz == 0 or self.dtype not in FLOATING or self._pattern.is_sharded:
            if rtype == "sprod":
                return self._val.prod(0)
            return self._val.mean(0) if rtype == "smean" else self._val.sum(0)
        return self._pattern.all_entries.reduce(self._val, rtype).squeeze(0)

    def sum(self, dim: int | None = None) -> Tensor:
        """:meth:`reduce` by sums."""
        return self.reduce(dim, "sum")

    def smax(self, dim: int | None = None) -> Tensor:
        """:meth:`reduce` by maxima."""
        return self.reduce(dim, "smax")

    def smin(self, dim: int | None = None) -> Tensor:
        """:meth:`reduce` by minima."""
        return self.reduce(dim, "smin")

    def smean(self, dim: int | None = None) -> Tensor:
        """:meth:`reduce` by means."""
        return self.reduce(dim, "smean")

    def sprod(self, dim: int | None = None) -> Tensor:
        """:meth:`reduce` by products."""
        return self.reduce(dim, "sprod")

    def softmax(self, dim: int = 1) -> SparseMatrix:
        """The softmax of the values of each row for ``dim`` 1, of each column for 0.

        Raises:
            ValueError: ``dim`` is neither.
            RuntimeError: values are not floating-point numbers.
        """
        if isinstance(self._values, Expression) and dim == 1 and may_defer():
            products.check_floating("the values", self._values)
            return self._like(Softmax(self._values))
        return self._like(products.softmax(self._pattern, self._val, dim))

    def neg(self) -> SparseMatrix:
        """The matrix with values of the other sign."""
        return self._mapped(operator.neg)

    def _sampled(self, function: Callable[..., Any], virtual: Virtual) -> SparseMatrix:
        """The function of the values and those of a virtual matrix, where there are entries."""
        values: Expression | Tensor = self._values
        others = virtual.sampled(self._pattern)
        is_product = function is operator.mul
        if is_product and self._is_ones and leaves(self.dtype, others.dtype):
            return self._like(others)
        if isinstance(values, Expression) and isinstance(others, Tensor):
            others = Entries(self._pattern, others)
        elif isinstance(others, Expression):
            values = self.expression
        return self._like(applied(function, values, others))

    def _mapped(self, function: Callable[..., Tensor], *args: Any) -> SparseMatrix:
        """The function of the values and of numbers, later where they are an expression."""
        if isinstance(self._values, Expression):
            made = mapped(function, self._values, *args)
            if made is not None:
                return self._like(made)
        return self._like(function(self._val, *args))

    def inv(self) -> SparseMatrix:
        """The inverse of a square matrix that was made as a diagonal.

        Raises:
            AssertionError: it was not, or has heads.
        """
        if not self.is_diag() or self.shape[0] != self.shape[1] or self._val.dim() != 1:
            raise AssertionError(
                "A must be a square diagonal matrix with values [nnz] to be inverted, got shape "
                f"{list(self.shape)} with values of shape {list(self._val.shape)}, "
                f"{'' if self.is_diag() else 'not '}made as a diagonal"
            )
        return self._like(1.0 / self._val)

    def __matmul__(self, other: Tensor | SparseMatrix) -> Tensor | SparseMatrix:
        if isinstance(other, SparseMatrix):
            return self.multiplied(other)
        if isinstance(other, Tensor):
            if isinstance(self._values, Expression):
                return fusing.product(self._values, other)
            return products.spmm(self._pattern, self._values, other)
        return NotImplemented

    def multiplied(self, other: SparseMatrix) -> SparseMatrix:
        """The product with a sparse matrix; that with a diagonal one may wait.

        Raises:
            RuntimeError: as for :func:`fastgraph.sparse.products.spspmm`.
        """
        for is_row, scaling, scaled in ((True, self, other), (False, other, self)):
            if not scaling.is_diag() or scaled.is_diag():
                continue
            is_square = scaling.shape[0] == scaling.shape[1]
            given = [scaling._val, *scaled.tensors]
            if is_square and scaling.nnz > 0 and may_wait(scaled._pattern, 1, *given):
                products.check_spspmm(self._pattern, self._values, other._pattern, other._values)
                of_nodes = Ends(scaled._pattern, scaling._val, is_row=is_row)
                if scaled._is_ones and leaves(scaled.dtype, of_nodes.dtype):
                    return scaled._like(of_nodes)
                made = mapped(operator.mul, of_nodes, scaled.expression)
                if made is not None:
                    return scaled._like(made)
        return SparseMatrix(*products.spspmm(self._pattern, self._val, other._pattern, other._val))

    def __add__(self, other: SparseMatrix) -> SparseMatrix:
        if not isinstance(other, SparseMatrix):
            return NotImplemented
        return SparseMatrix(*elementwise.add(self._pattern, self._val, other._pattern, other._val))

    def __sub__(self, other: SparseMatrix) -> SparseMatrix:
        if not isinstance(other, SparseMatrix):
            return NotImplemented
        return self + -other

    def __mul__(self, other: SparseMatrix | Virtual | Scalar) -> SparseMatrix:
        if isinstance(other, SparseMatrix):
            return SparseMatrix(
                *elementwise.mul(self._pattern, self._val, other._pattern, other._val)
            )
        if isinstance(other, Virtual):
            return self._sampled(operator.mul, other)
        return self._mapped(operator.mul, other) if is_scalar(other) else NotImplemented

    __rmul__ = __mul__

    def __truediv__(self, other: SparseMatrix | Virtual | Scalar) -> SparseMatrix:
        if isinstance(other, SparseMatrix):
            return SparseMatrix(
                *elementwise.div(self._pattern, self._val, other._pattern, other._val)
            )
        if isinstance(other, Virtual):
            return self._sampled(operator.truediv, other)
        return self._mapped(operator.truediv, other) if is_scalar(other) else NotImplemented

    def __pow__(self, exponent: Scalar) -> SparseMatrix:
        return self._like(self._val**exponent) if is_scalar(exponent) else NotImplemented

    __neg__ = neg

    def _like(self, val: Tensor | Expression) -> SparseMatrix:
        return SparseMatrix(self._pattern, val)

    def _selected(self, selected: selection.Selected) -> SparseMatrix:
        return SparseMatrix(selected.pattern, selected.values(self._val))

    def __repr__(self) -> str:
        facts = f"shape={self.shape}, nnz={self.nnz}"
        if self._values.dim() > 1:
            facts += f", val_size={tuple(self._values.shape[1:])}"
        lines = [f"indices={self.indices()}", f"values={self._val}"]
        lines = [text.replace("\n", "\n" + " " * (text.index("=") + 1)) for text in lines]
        body = ",\n".join([*lines, facts])
        name = f"{type(self).__name__}("
        return name + body.replace("\n", "\n" + " " * len(name)) + ")"

    # These shadow the names of types, and so come last.

    def double(self) -> SparseMatrix:
        """The matrix with values in float64."""
        return self.to(dtype=torch.float64)

    def long(self) -> SparseMatrix:
        """The matrix with values in int64."""
        return self.to(dtype=torch.int64)

    def float(self) -> SparseMatrix:
        """The matrix with values in float32."""
        return self.to(dtype=torch.float32)

    def int(self) -> SparseMatrix:
        """The matrix with values in int32."""
        return self.to(dtype=torch.int32)


def diag(val: Tensor, shape: Shape | None = None) -> SparseMatrix:
    """A diagonal matrix.

    Args:
        val: ``[n]``, or ``[n, heads]`` for one matrix for each head.
        shape: not square if so given; the smaller size is ``n``.

    Raises:
        TypeError: ``val`` is not a tensor.
        AssertionError: it has another number of dimensions, or does not fit the shape.
    """
    check_tensor("val", val)
    if val.dim() not in (1, 2) or (shape is not None and len(val) != min(shape)):
        raise AssertionError(
            "val must be [n] or [n, heads], with n the smaller size of the shape, "
            f"got shape {list(val.shape)} for a matrix of shape {shape}"
        )
    shape = (len(val), len(val)) if shape is None else (int(shape[0]), int(shape[1]))
    return SparseMatrix(diagonal(shape, val.device), val)


def identity(
    shape: Shape,
    d: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> SparseMatrix:
    """A diagonal matrix of ones.

    Args:
        shape: numbers of rows and columns.
        d: number of heads; default: values have none.
        dtype: of the values.
        device: of the matrix.
    """
    size = (min(shape),) if d is None else (min(shape), d)
    return diag(torch.ones(size, dtype=dtype, device=device), shape)
