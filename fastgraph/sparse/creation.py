"""How sparse matrices are made: of indices, of other matrices, of graphs of PyG and DGL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastgraph.sparse.groups import Groups
from fastgraph.sparse.pattern import Pattern, Shape, from_compressed, from_indices
from fastgraph.sparse.sparse_matrix import SparseMatrix

if TYPE_CHECKING:
    from dgl import DGLGraph


def spmatrix(
    indices: Tensor, val: Tensor | None = None, shape: Shape | None = None
) -> SparseMatrix:
    """The matrix with these entries, in any order, duplicates included.

    Args:
        indices: int64 or int32 ``[2, nnz]``, rows and columns; kept, not copied.
        val: ``[nnz]``, or ``[nnz, heads]`` for one matrix for each head; default: ones in
            torch's default dtype.
        shape: numbers of rows and columns; default: just large enough.

    Raises:
        TypeError: an argument is no tensor.
        AssertionError: ``val`` has another number of dimensions.
        RuntimeError: an argument has the wrong shape, dtype or device.
        IndexError: an index lies outside the shape.
    """
    return _with_values(from_indices(indices, shape), val)


def from_coo(
    row: Tensor, col: Tensor, val: Tensor | None = None, shape: Shape | None = None
) -> SparseMatrix:
    """:func:`spmatrix` of rows and columns one by one, ``[nnz]`` each.

    Raises:
        AssertionError: there are not as many rows as columns, or as for :func:`spmatrix`.
        RuntimeError, IndexError: as for :func:`spmatrix`.
    """
    if row.shape != col.shape:
        raise AssertionError(
            f"row and col must have one shape, got {list(row.shape)} and {list(col.shape)}"
        )
    return spmatrix(torch.stack([row, col]), val, shape)


def from_csr(
    indptr: Tensor, indices: Tensor, val: Tensor | None = None, shape: Shape | None = None
) -> SparseMatrix:
    """The matrix with these entries, grouped by row.

    Args:
        indptr: int64 or int32 ``[rows + 1]``, where rows begin and end.
        indices: int64 or int32 ``[nnz]``, columns, in any order within a row.
        val: as for :func:`spmatrix`.
        shape: as for :func:`spmatrix`.

    Raises:
        TypeError, AssertionError, RuntimeError, IndexError: as for :func:`spmatrix`.
    """
    return _with_values(from_compressed(indptr, indices, shape, 0), val)


def from_csc(
    indptr: Tensor, indices: Tensor, val: Tensor | None = None, shape: Shape | None = None
) -> SparseMatrix:
    """The matrix with these entries, grouped by column.

    Args:
        indptr: int64 or int32 ``[columns + 1]``, where columns begin and end.
        indices: int64 or int32 ``[nnz]``, rows, in any order within a column.
        val: as for :func:`spmatrix`.
        shape: as for :func:`spmatrix`.

    Raises:
        TypeError, AssertionError, RuntimeError, IndexError: as for :func:`spmatrix`.
    """
    return _with_values(from_compressed(indptr, indices, shape, 1), val)


def val_like(mat: SparseMatrix, val: Tensor) -> SparseMatrix:
    """The matrix with entries where ``mat`` has them, and these values.

    Args:
        mat: any matrix.
        val: ``[nnz]`` or ``[nnz, heads]``, in the order of ``mat.val``.

    Raises:
        TypeError: ``val`` is not a tensor.
        AssertionError: it has another number of dimensions.
        RuntimeError: there is not one for each entry, on the same device.
    """
    return SparseMatrix(mat.pattern, val)


def _with_values(pattern: Pattern, val: Tensor | None) -> SparseMatrix:
    if val is None:
        ones = torch.ones_like(pattern.row, dtype=torch.get_default_dtype())
        return SparseMatrix(pattern, ones, is_ones=not ones.is_inference())
    return SparseMatrix(pattern, val)


def from_torch_sparse(torch_sparse_tensor: Tensor) -> SparseMatrix:
    """The matrix of torch's in COO, CSR or CSC, whose tensors it keeps without a copy.

    A last dense dimension, if there is one, is that of heads. The values keep their gradient, but
    for those of COO that is not coalesced, which torch does not give away.

    Raises:
        AssertionError: another layout, or several dense dimensions.
        RuntimeError: batches, or COO that is not coalesced and requires a gradient.
    """
    matrix = torch_sparse_tensor
    if matrix.layout is torch.sparse_coo:
        if matrix.requires_grad and not matrix.is_coalesced():
            raise RuntimeError(
                "torch_sparse_tensor must be coalesced where it requires a gradient, but it is not"
            )
        val = matrix.values() if matrix.is_coalesced() else matrix._values()
        return spmatrix(matrix._indices(), val, _shape_of(matrix))
    if matrix.layout is torch.sparse_csr:
        ptr, indices = matrix.crow_indices(), matrix.col_indices()
        return from_csr(ptr, indices, matrix.values(), _shape_of(matrix))
    if matrix.layout is torch.sparse_csc:
        ptr, indices = matrix.ccol_indices(), matrix.row_indices()
        return from_csc(ptr, indices, matrix.values(), _shape_of(matrix))
    raise AssertionError(
        f"torch_sparse_tensor must be in COO, CSR or CSC, got layout {matrix.layout}"
    )


def _shape_of(matrix: Tensor) -> Shape:
    return matrix.shape[0], matrix.shape[1]


def to_torch_sparse_coo(spmat: SparseMatrix) -> Tensor:
    """Torch's matrix in COO, with the same tensors; ``[n, m, heads]`` where values have heads."""
    return torch.sparse_coo_tensor(spmat.indices(), spmat._val, _full_shape(spmat))


def to_torch_sparse_csr(spmat: SparseMatrix) -> Tensor:
    """Torch's matrix in CSR, as :func:`to_torch_sparse_coo`; torch takes no duplicates in it."""
    ptr, indices, numbers = spmat.csr()
    val = spmat._val if numbers is None else Groups(numbers, spmat.nnz).gather(spmat._val)
    return torch.sparse_csr_tensor(ptr, indices, val, _full_shape(spmat))


def to_torch_sparse_csc(spmat: SparseMatrix) -> Tensor:
    """Torch's matrix in CSC, as :func:`to_torch_sparse_csr`."""
    ptr, indices, numbers = spmat.csc()
    val = spmat._val if numbers is None else Groups(numbers, spmat.nnz).gather(spmat._val)
    return torch.sparse_csc_tensor(ptr, indices, val, _full_shape(spmat))


def _full_shape(spmat: SparseMatrix) -> tuple[int, ...]:
    return (*spmat.shape, *spmat._val.shape[1:])


def from_edge_index(
    edge_index: Tensor,
    val: Tensor | None = None,
    num_nodes: int | tuple[int, int] | None = None,
) -> SparseMatrix:
    """The matrix of a graph of PyG, in which row ``i`` has the edges that lead to node ``i``.

    Args:
        edge_index: ``[2, E]``, sources and destinations, or PyG's ``EdgeIndex``, which may know the
            numbers of nodes.
        val: ``[E]`` or ``[E, heads]``, in the order of edges; default: ones.
        num_nodes: number of nodes, or, of a bipartite graph, of sources and of destinations;
            default: just large enough for all of them.

    Raises:
        TypeError, AssertionError, RuntimeError, IndexError: as for :func:`spmatrix`.
    """
    known: tuple[int | None, int | None] = (None, None)
    if hasattr(edge_index, "as_tensor"):  # PyG's EdgeIndex
        index: Any = edge_index
        known, edge_index = index.sparse_size(), index.as_tensor()
    if isinstance(num_nodes, int):
        known = num_nodes, num_nodes
    elif num_nodes is not None:
        known = num_nodes
    size: Shape
    if known[0] is not None and known[1] is not None:
        size = known[0], known[1]
    else:
        most = max([int(edge_index.max()) + 1 if edge_index.numel() else 0, *filter(None, known)])
        size = most if known[0] is None else known[0], most if known[1] is None else known[1]
    return spmatrix(edge_index.flip(0), val, (size[1], size[0]))


def from_dgl(graph: DGLGraph, val: Tensor | None = None, etype: Any = None) -> SparseMatrix:
    """The matrix of a graph of DGL, in which row ``i`` has the edges that lead to node ``i``.

    It is the transpose of ``graph.adj()``, by whose rows sources aggregate.

    Args:
        graph: homogeneous, or with ``etype``.
        val: ``[E]`` or ``[E, heads]``, in the order of edges; default: ones.
        etype: which edges of a heterogeneous graph.

    Raises:
        AssertionError, RuntimeError: as for :func:`spmatrix`.
    """
    source, _, destination = graph.to_canonical_etype(etype)
    row, col = graph.all_edges(etype=etype, order="eid")[::-1]
    return from_coo(row, col, val, (graph.num_nodes(destination), graph.num_nodes(source)))
