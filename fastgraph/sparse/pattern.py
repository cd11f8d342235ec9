"""The pattern of a sparse matrix: where its entries are, apart from their values."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fastgraph.graphs.edges import Edges, Grouped
from fastgraph.graphs.graph import Graph, normal_mode
from fastgraph.ops.library import is_defined_by
from fastgraph.sparse.groups import Groups, one_group

Shape = tuple[int, int]
_Result = TypeVar("_Result")


class Compressed(NamedTuple):
    """Entries grouped by row (CSR), or by column (CSC).

    Attributes:
        ptr: ``[rows + 1]``, where the entries of each row begin and end.
        indices: ``[nnz]``, the column of each entry.
        value_indices: ``[nnz]``, the number of each entry, by which its value is found; ``None``
            stands for the identity.
    """

    ptr: Tensor
    indices: Tensor
    value_indices: Tensor | None


def _views(given: Tensor | Compressed) -> Tensor | Compressed:
    """The same indices, whatever memory their owner gives the tensors later."""
    if isinstance(given, Compressed):
        return Compressed(*(None if part is None else _view(part) for part in given))  # type: ignore[arg-type]
    return _view(given)


def _view(indices: Tensor) -> Tensor:
    return indices.detach() if type(indices) is Tensor else indices


class Coalesced(NamedTuple):
    """A pattern in ascending order without duplicates, and how it came about.

    Attributes:
        pattern: the result.
        order: the entries of the original in ascending order.
        groups: which of these belong to one entry of the result; ``None`` if each does to its own.
    """

    pattern: Pattern
    order: Groups
    groups: Groups | None

    def values(self, val: Tensor) -> Tensor:
        """The values of the result; those of duplicates are added."""
        val = self.order.gather(val)
        return val if self.groups is None else self.groups.sum(val)


def _once(make: Callable[[Any], _Result]) -> Callable[[Any], _Result]:
    """The getter of a view that is made when it is first asked for.

    It is made outside inference mode, so that it serves training, too, and an error once the
    indices were edited.
    """
    name = make.__name__

    @wraps(make)
    def get(pattern: Pattern) -> _Result:
        pattern.check_unedited()
        views = pattern._views
        if name not in views:
            with normal_mode(), torch.no_grad():
                view = make(pattern)
            pattern._watch(view)
            views[name] = view
        found: _Result = views[name]
        return found

    return get


class Pattern:
    """An immutable pattern, numbered: value ``e`` of a matrix is that of entry ``e``.

    Views of it, by row, by column, or as operators take it, are made when they are first needed and
    shared by all matrices with this pattern, and by their transposes. Made by
    :func:`from_indices`, :func:`from_compressed` and :func:`diagonal`.

    Attributes:
        shape: numbers of rows and columns.
        nnz: number of entries, duplicates included.
        is_diagonal: true if it was made as a diagonal; others are not looked at.
        is_sharded: true if its indices are a tensor of a subclass that says itself what operators
            do, of which no rank has all. Then entries are not sorted here.
        reused: the structures of expressions of values that several products have used.
        in_vain: the forms of scores that waited, and were computed by separate operators.
    """

    def __init__(
        self,
        shape: Shape,
        given: Tensor | Compressed,
        *,
        is_diagonal: bool = False,
        base: Pattern | None = None,
    ) -> None:
        self.shape = shape
        self.is_diagonal = is_diagonal
        self._given = _views(given)
        self._base = base
        self._views: dict[str, Any] = {}
        self._versions: list[tuple[Tensor, int]] = []
        self.reused: set[str] = set() if base is None else base.reused
        self.in_vain: set[str] = set() if base is None else base.in_vain
        self._watch(self._given)
        self.is_sharded = isinstance(given, Tensor) and is_defined_by(given)
        self.nnz = given.shape[1] if isinstance(given, Tensor) else given.indices.shape[0]

    def __getstate__(self) -> dict[str, Any]:
        """Without views, and as no transpose of another."""
        given = self.indices if self._base is not None else self._given
        return {"shape": self.shape, "given": given, "is_diagonal": self.is_diagonal}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def device(self) -> torch.device:
        """Where the indices are."""
        return (self._given if isinstance(self._given, Tensor) else self._given.indices).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of indices: int64 or int32."""
        return (self._given if isinstance(self._given, Tensor) else self._given.indices).dtype

    def _watch(self, view: object) -> None:
        """Have :meth:`check_unedited` look at these indices, if they are some, from now on."""
        parts = view if isinstance(view, Compressed) else (view,)
        tensors = [part for part in parts if isinstance(part, Tensor)]
        self._versions += [(t, t._version) for t in tensors if not t.is_inference()]

    def check_unedited(self) -> None:
        """The tensors that the pattern was made of, and that it gave out, are what they were.

        Raises:
            RuntimeError: one of them was edited in place.
        """
        if self.is_edited:
            raise RuntimeError(
                "the indices of a sparse matrix were edited in place after it was made of them "
                "or had given them out"
            )

    @property
    def is_edited(self) -> bool:
        """True once :meth:`check_unedited` raises."""
        return any(tensor._version != version for tensor, version in self._versions)

    @property
    def source(self) -> tuple[tuple[Tensor, ...], tuple[object, ...]]:
        """The tensors that the pattern was made of, and all else that says where entries are."""
        base = self if self._base is None else self._base
        given = base._given
        parts = (given,) if isinstance(given, Tensor) else given
        tensors = tuple(part for part in parts if part is not None)
        return tensors, (self.shape, base is self, len(parts), len(tensors))

    def transposed(self) -> Pattern:
        """Rows and columns exchanged; it shares all views with this one."""
        if self._base is not None:
            return self._base
        shape = self.shape[1], self.shape[0]
        return Pattern(shape, self._given, is_diagonal=self.is_diagonal, base=self)

    @property
    @_once
    def indices(self) -> Tensor:
        """Rows and columns of all entries, ``[2, nnz]``."""
        if self._base is not None:
            return self._base.indices.flip(0)
        if isinstance(self._given, Tensor):
            return self._given
        ptr, indices, value_indices = self._given
        rows = torch.repeat_interleave(ptr.diff(), output_size=self.nnz).to(indices.dtype)
        stacked = torch.stack([rows, indices])
        if value_indices is None:
            return stacked
        return torch.empty_like(stacked).index_copy_(1, value_indices.long(), stacked)

    @property
    def row(self) -> Tensor:
        """The row of each entry, ``[nnz]``."""
        row: Tensor = self.indices[0]
        return row

    @property
    def col(self) -> Tensor:
        """The column of each entry, ``[nnz]``."""
        col: Tensor = self.indices[1]
        return col

    @property
    @_once
    def rows(self) -> Compressed:
        """Entries by row, in ascending order of their numbers where nothing else was given."""
        if self._base is not None:
            return self._base.columns
        if isinstance(self._given, Compressed):
            return self._given
        return self._as_given(self._grouped.graph, transpose=False)

    @property
    @_once
    def columns(self) -> Compressed:
        """Entries by column."""
        if self._base is not None:
            return self._base.rows
        return self._as_given(self._grouped.graph, transpose=True)

    def gather(self, of_nodes: Tensor, *, is_row: bool) -> Tensor:
        """The value of its row, or of its column, for each entry; see :meth:`Groups.gather`."""
        return (self.by_row if is_row else self.by_column).gather(of_nodes)

    def grouped(self, dim: int) -> Compressed:
        """Entries by row for dimension 0, by column for 1."""
        return self.rows if dim == 0 else self.columns

    def _as_given(self, graph: Graph, *, transpose: bool) -> Compressed:
        csr = graph.grouped(transpose=transpose)
        ids = csr.edge_id
        # Copies: the caller may edit what kernels read backward.
        return Compressed(
            csr.ptr.to(self.dtype, copy=True),
            csr.col.to(self.dtype, copy=True),
            None if ids is None else ids.to(self.dtype, copy=True),
        )

    @property
    @_once
    def _grouped(self) -> Grouped:
        """The edges from columns to rows; of the base only."""
        self.check_whole()
        num_rows, num_cols = self.shape
        if isinstance(self._given, Compressed):
            ptr, indices, ids = self._given
            return Grouped.of(indices.contiguous(), ptr.contiguous(), ids, num_cols, num_rows)
        row, col = self._given
        return Grouped(Graph((col.contiguous(), row.contiguous()), num_cols, num_rows))

    @property
    def edges(self) -> Edges:
        """As operators take it, in which sources are columns and destinations are rows."""
        if self._base is not None:
            return self._base.edges._replace(transpose=True)
        if self.is_sharded:
            return Edges(self._from_columns, None)
        return self._grouped.edges

    @property
    @_once
    def _from_columns(self) -> Tensor:
        """The indices of entries as edges from columns to rows."""
        return self.indices.flip(0)

    def check_whole(self) -> None:
        """Entries can be sorted.

        Raises:
            NotImplementedError: they are shared out to ranks.
        """
        if self.is_sharded:
            raise NotImplementedError(
                "a sparse matrix of sharded indices has no entries by row or column, in ascending "
                "order or without duplicates, as no rank has all of them; make it of "
                "fastgraph.dist.whole(indices) for this"
            )

    @property
    @_once
    def by_row(self) -> Groups:
        """Entries as members of their rows."""
        if self._base is not None:
            return self._base.by_column
        return Groups(self.row.contiguous(), self.shape[0])

    @property
    @_once
    def by_column(self) -> Groups:
        """Entries as members of their columns."""
        if self._base is not None:
            return self._base.by_row
        return Groups(self.col.contiguous(), self.shape[1])

    @property
    @_once
    def all_entries(self) -> Groups:
        """Entries as one group."""
        return one_group(self.nnz, self.device)

    @property
    @_once
    def empty_rows(self) -> Tensor:
        """The numbers of the rows without entries, int64."""
        return _empty(self._ptr)

    @property
    @_once
    def empty_columns(self) -> Tensor:
        """The numbers of the columns without entries, int64."""
        if self._base is not None:
            return self._base.empty_rows
        return _empty(self._grouped.graph.grouped(transpose=True).ptr)

    @property
    @_once
    def is_empty_row(self) -> Tensor:
        """True for the rows without entries, ``[n]``; for indices that are sharded, too."""
        return self.by_row.sum(torch.ones_like(self.row, dtype=torch.int32)) == 0

    @property
    @_once
    def is_empty_column(self) -> Tensor:
        """True for the columns without entries, ``[m]``."""
        return self.by_column.sum(torch.ones_like(self.col, dtype=torch.int32)) == 0

    @property
    @_once
    def ranks(self) -> Tensor:
        """The place of each entry among those of its row, in their order, int32 ``[nnz]``."""
        base = self if self._base is None else self._base
        ptr, ids = self._ptr, base._grouped.graph.grouped(transpose=base is not self).edge_id
        places = torch.arange(self.nnz, dtype=torch.int32, device=self.device)
        places -= torch.repeat_interleave(ptr[:-1], ptr.diff(), output_size=self.nnz)
        if ids is None:
            return places
        return torch.empty_like(places).index_copy_(0, ids.long(), places)

    @property
    def _ptr(self) -> Tensor:
        """Where the entries of each row begin and end, as kernels have them."""
        base = self if self._base is None else self._base
        return base._grouped.graph.grouped(transpose=base is not self).ptr

    @property
    @_once
    def has_duplicate(self) -> bool:
        """True if two entries are in one place."""
        if self._base is not None:
            return self._base.has_duplicate
        if self.is_diagonal or self.nnz < 2:
            return False
        by_column = self._grouped.graph.by_source  # rows ascend in it
        is_equal = by_column.col[1:] == by_column.col[:-1]
        starts = by_column.ptr[1:-1]
        is_equal[starts[(starts > 0) & (starts < self.nnz)] - 1] = False
        return bool(is_equal.any())

    @property
    @_once
    def places(self) -> Tensor:
        """The place of each entry, ``row * columns + column``, int64 ``[nnz]``."""
        return self.row.long() * self.shape[1] + self.col.long()

    @property
    @_once
    def ascending(self) -> tuple[Tensor, Tensor]:
        """The places in ascending order, and the entries in this order, each int64 ``[nnz]``."""
        self.check_whole()
        places, order = torch.sort(self.places, stable=True)
        return places, order

    @property
    @_once
    def coalesced(self) -> Coalesced:
        """The pattern in ascending order, without duplicates."""
        places, order = self.ascending
        distinct, group = torch.unique_consecutive(places, return_inverse=True)
        groups = Groups(group, len(distinct)) if len(distinct) < self.nnz else None
        pattern = from_places(distinct, self.shape, self.dtype)
        return Coalesced(pattern, Groups(order, self.nnz), groups)


def _empty(ptr: Tensor) -> Tensor:
    return (ptr.diff() == 0).nonzero().squeeze(1)


def from_places(places: Tensor, shape: Shape, dtype: torch.dtype) -> Pattern:
    """The pattern with an entry in each of these places, ``row * columns + column``, in order."""
    columns = max(shape[1], 1)
    indices = torch.stack([places // columns, places % columns])
    return Pattern(shape, indices.to(dtype))


def from_indices(indices: Tensor, shape: Shape | None) -> Pattern:
    """The pattern of entries in any order, duplicates included.

    Args:
        indices: int64 or int32 ``[2, nnz]``, rows and columns; kept, not copied.
        shape: default: just large enough.

    Raises:
        TypeError: indices are no tensor, or a size is no integer.
        RuntimeError: wrong dtype or shape, or no entries and no shape.
        IndexError: an index lies outside the shape.
    """
    _check_indices("indices", indices, 2)
    if indices.shape[0] != 2:
        raise RuntimeError(f"indices must be [2, nnz], got shape {list(indices.shape)}")
    if shape is None and indices.numel() > 0:
        row, column = indices.amax(1).tolist()
        shape = row + 1, column + 1
    shape = _checked_shape(shape)
    _check_range("row", indices[0], shape[0])
    _check_range("column", indices[1], shape[1])
    return Pattern(shape, indices)


def from_compressed(ptr: Tensor, indices: Tensor, shape: Shape | None, dim: int) -> Pattern:
    """The pattern of entries that are grouped by row, for dimension 0, or by column, for 1.

    Args:
        ptr: int64 or int32 ``[rows + 1]``, ascending, where rows, or columns, begin and end.
        indices: int64 or int32 ``[nnz]``, columns, or rows.
        shape: default: just large enough.
        dim: of which dimension ``ptr`` is.

    Raises:
        TypeError: indices are no tensor, or a size is no integer.
        RuntimeError: wrong dtype or shape, or no entries and no shape.
        IndexError: an index lies outside the shape.
    """
    _check_indices("indptr", ptr, 1)
    _check_indices("indices", indices, 1)
    if ptr.device != indices.device:
        raise RuntimeError(
            f"indptr and indices must be on one device, got {ptr.device} and {indices.device}"
        )
    if ptr.numel() == 0:
        raise RuntimeError("indptr must be [rows + 1], got no elements")
    if shape is None and indices.numel() > 0:
        sizes = len(ptr) - 1, int(indices.max()) + 1
        shape = sizes if dim == 0 else sizes[::-1]
    shape = _checked_shape(shape)
    _check_range("column" if dim == 0 else "row", indices, shape[1 - dim])
    if len(ptr) != shape[dim] + 1:
        raise RuntimeError(
            f"indptr must have {shape[dim] + 1} elements for shape {shape}, got {len(ptr)}"
        )
    if ptr[0] != 0 or ptr[-1] != len(indices) or (ptr.diff() < 0).any():
        raise RuntimeError(
            f"indptr must rise from 0 to the number of entries, {len(indices)}, without falling"
        )
    compressed = Compressed(ptr, indices, None)
    return Pattern(shape, compressed) if dim == 0 else Pattern(shape[::-1], compressed).transposed()


def diagonal(shape: Shape, device: torch.device) -> Pattern:
    """The pattern of a diagonal matrix of this shape."""
    with normal_mode():
        numbers = torch.arange(min(shape), device=device)
        return Pattern(shape, torch.stack([numbers, numbers]), is_diagonal=True)


def _check_indices(name: str, indices: Tensor, dim: int) -> None:
    check_tensor(name, indices)
    if indices.dtype not in (torch.int64, torch.int32):
        raise RuntimeError(f"{name} must be int64 or int32, got {indices.dtype}")
    if indices.dim() != dim:
        expected = "[2, nnz]" if dim == 2 else "one-dimensional"
        raise RuntimeError(f"{name} must be {expected}, got shape {list(indices.shape)}")


def check_tensor(name: str, value: object) -> None:
    """An argument is a tensor.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")


def _checked_shape(shape: Shape | None) -> Shape:
    if shape is None:
        raise RuntimeError("shape must be given for a matrix without entries, got None")
    if not isinstance(shape, tuple | list) or len(shape) != 2:
        raise RuntimeError(f"shape must have two sizes, got {shape}")
    shape = operator.index(shape[0]), operator.index(shape[1])
    if min(shape) < 0:
        raise RuntimeError(f"shape must have sizes >= 0, got {shape}")
    return shape


def _check_range(name: str, indices: Tensor, size: int) -> None:
    if indices.numel() == 0:
        return
    if is_defined_by(indices):  # which know the two, and would gather all for the pair
        low, high = int(indices.min()), int(indices.max())
    else:
        low, high = map(int, torch.aminmax(indices))
    if low < 0 or high >= size:
        raise IndexError(
            f"indices hold {name} {low if low < 0 else high}, expected 0 <= {name} < {size}"
        )
