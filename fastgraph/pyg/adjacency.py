"""The adjacency matrix by which PyG's loaders of subgraphs call torch-sparse."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex, Index

from fastgraph import sampling
from fastgraph.graphs.offsets import offsets_of


def plain(tensor: Tensor) -> Tensor:
    """The tensor that an ``Index`` or an ``EdgeIndex`` wraps, or what is none as it is."""
    return tensor.as_tensor() if isinstance(tensor, (Index, EdgeIndex)) else tensor


class Adjacency:
    """In place of ``torch_sparse.SparseTensor`` in PyG's loaders of subgraphs, and nowhere else.

    It has those methods that ``GraphSAINTSampler``, ``ShaDowKHopSampler`` and the
    ``NeighborSampler`` of ``torch_geometric.loader`` call, with their arguments and results.

    Args:
        row: the row of each entry, ``[entries]``, integers, int64 from here on as nodes of PyG's
            loaders are; or ``rowptr``.
        rowptr: where the entries of each row begin and end, ``[rows + 1]``, as ``row``.
        col: the column of each entry, ``[entries]``, as ``row``.
        value: a value of each entry, ``[entries, ...]``.
        sparse_sizes: the numbers of rows and columns.
        is_sorted: True if entries are sorted by row.
        trust_data: of no effect.
    """

    def __init__(
        self,
        row: Tensor | None = None,
        rowptr: Tensor | None = None,
        col: Tensor | None = None,
        value: Tensor | None = None,
        sparse_sizes: tuple[int, int] | None = None,
        is_sorted: bool = False,
        trust_data: bool = False,
    ) -> None:
        if col is None or (row is None and rowptr is None):
            raise ValueError("an adjacency matrix needs col, and row or rowptr")
        row, rowptr, col = (None if x is None else plain(x).long() for x in (row, rowptr, col))
        assert col is not None
        if sparse_sizes is None:
            sparse_sizes = _extent(row, rowptr), _extent(col, None)
        rows, columns = sparse_sizes
        if row is None:
            assert rowptr is not None
            row = torch.arange(rows).repeat_interleave(rowptr.diff())
        elif not is_sorted:
            order = torch.argsort(row * max(columns, 1) + col, stable=True)
            row, col = row[order], col[order]
            value = None if value is None else value[order]
        self._row, self._col, self._value = row, col, value
        self._sizes = rows, columns
        self._rowptr = rowptr if rowptr is not None else row_pointers(row, rows)

    @property
    def storage(self) -> Adjacency:
        """This matrix, whose tensors torch-sparse keeps in an object of its own."""
        return self

    def row(self) -> Tensor:
        """The row of each entry, ascending."""
        return self._row

    def col(self) -> Tensor:
        """The column of each entry."""
        return self._col

    def rowptr(self) -> Tensor:
        """Where the entries of each row begin and end."""
        return self._rowptr

    def value(self) -> Tensor | None:
        """The value of each entry."""
        return self._value

    def rowcount(self) -> Tensor:
        """How many entries each row has."""
        return self._rowptr.diff()

    def colcount(self) -> Tensor:
        """How many entries each column has."""
        return torch.bincount(self._col, minlength=self._sizes[1])

    def coo(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Row, column and value of each entry, by row."""
        return self._row, self._col, self._value

    def csr(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Where rows begin and end, and column and value of each entry."""
        return self._rowptr, self._col, self._value

    def nnz(self) -> int:
        """How many entries there are."""
        return self._col.numel()

    def sparse_size(self, dim: int) -> int:
        """The number of rows (0) or columns (1)."""
        return self._sizes[dim]

    def sparse_sizes(self) -> tuple[int, int]:
        """The numbers of rows and columns."""
        return self._sizes

    size = sparse_size

    def t(self) -> Adjacency:
        """The transposed matrix."""
        return Adjacency(self._col, None, self._row, self._value, self._sizes[::-1])

    def to(self, *args: Any, **kwargs: Any) -> Adjacency:
        """The same matrix: samplers are on the CPU."""
        return self

    cpu = to

    def set_value(self, value: Tensor | None, layout: str | None = None) -> Adjacency:
        """The matrix with other values."""
        return Adjacency(self._row, self._rowptr, self._col, value, self._sizes, is_sorted=True)

    def set_value_(self, value: Tensor | None, layout: str | None = None) -> Adjacency:
        """Replace the values."""
        self._value = value
        return self

    def saint_subgraph(self, node_idx: Tensor) -> tuple[Adjacency, Tensor]:
        """The entries between some nodes, numbered by their positions, and which these are."""
        rowptr, col, edge = sampling.subgraph(self._rowptr, self._col, plain(node_idx))
        assert edge is not None
        size = node_idx.numel()
        return self._part(rowptr, col, edge, (size, size)), edge

    def random_walk(self, start: Tensor, walk_length: int) -> Tensor:
        """The nodes of a walk from each node, ``[walks, walk_length + 1]``."""
        return sampling.random_walk(self._rowptr, self._col, plain(start), walk_length)[0]

    def sample_adj(
        self, subset: Tensor, num_neighbors: int, replace: bool = False
    ) -> tuple[Adjacency, Tensor]:
        """Entries of some rows, drawn, and the nodes of its columns: these rows, then others."""
        sample = sampling.neighbor_sample(
            self._rowptr, self._col, plain(subset), [num_neighbors], replace=replace
        )
        assert sample.edge is not None
        rowptr = row_pointers(sample.col, subset.numel())
        sizes = subset.numel(), sample.node.numel()
        return self._part(rowptr, sample.row, sample.edge, sizes), sample.node

    def _part(self, rowptr: Tensor, col: Tensor, edge: Tensor, sizes: tuple[int, int]) -> Adjacency:
        value = None if self._value is None else self._value[edge]
        return Adjacency(None, rowptr, col, value, sizes, is_sorted=True)


def _extent(index: Tensor | None, ptr: Tensor | None) -> int:
    if ptr is not None:
        return ptr.numel() - 1
    assert index is not None
    return int(index.max()) + 1 if index.numel() > 0 else 0


def row_pointers(row: Tensor, rows: int) -> Tensor:
    """Where entries of each row begin and end, of the row of each entry, ascending."""
    return offsets_of(torch.bincount(row, minlength=rows))
