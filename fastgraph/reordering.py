"""``reorder``: a graph with its nodes numbered so that neighbours are near each other in memory."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastgraph.dist.graphs.partition import cluster_order, symmetric
from fastgraph.graphs.ranks import are_on_ranks, decided, whole
from fastgraph.layers.arguments import check_integers

if TYPE_CHECKING:
    from torch_geometric.data import Data

ORDERS = ("cluster", "rcm", "degree")


class Reordered(NamedTuple):
    """A graph with its nodes in another order.

    Attributes:
        data: the graph.
        permutation: int64 ``[num_nodes]``, the old number of each node: ``old_x[permutation]`` is
            ``data.x``.
        inverse: int64 ``[num_nodes]``, the new number of each node: ``out[inverse]`` has the rows
            of an output in the old order.
    """

    data: Data
    permutation: Tensor
    inverse: Tensor


def reorder(
    data: Data, order: str | Tensor = "cluster", *, num_clusters: int | None = None
) -> Reordered:
    """A graph with its nodes in another order, in which attention reads memory more nearly in turn.

    Layers give the same rows, in the new order, but for rounding. Edges keep theirs, and so do
    their features. What has a row for each node (features, labels, masks; arrays and lists, too) is
    brought into the new order, and the numbers of nodes in those tensors which PyG knows to hold
    them (``edge_index``, ``edge_label_index``, ``face``: whatever :meth:`Data.__inc__` counts up by
    nodes) are replaced. PyG cannot tell what else holds numbers of nodes, such as an ``idx`` of a
    split: use ``inverse[idx]``.

    Args:
        data: ``Data`` of PyG, on the CPU.
        order: ``"cluster"``: the parts of a partition by METIS with few edges in between, one after
            the other, those next to each other that were cut last (Karypis and Kumar, SIAM J. Sci.
            Comput. 20, 1998; for transformers: TorchGT, SC 2024, section III-C). ``"rcm"``: reverse
            Cuthill-McKee, for meshes. ``"degree"``: most neighbours first. Or the old number of
            each node, int64 ``[num_nodes]``.
        num_clusters: default: one for each 256 nodes.

    Returns:
        A copy of ``data``, and the permutation.

    Raises:
        TypeError: ``data`` is no ``Data`` of PyG, a batch, or holds a sparse matrix of the graph.
        ValueError: an argument that cannot be used.
        ModuleNotFoundError: ``pymetis`` (for ``"cluster"``) or SciPy (for ``"rcm"``) is missing.
        fastgraph.dist.PartitionError: METIS failed.
    """
    _check(data)
    num_nodes = int(data.num_nodes)
    permutation = _permutation(data.edge_index, num_nodes, order, num_clusters)
    inverse = torch.empty_like(permutation).scatter_(0, permutation, torch.arange(num_nodes))
    out = data.clone()
    # Asked first, as the answers are found by comparing sizes.
    rows, lists = _of_nodes(out, num_nodes), _lists_of_nodes(out)
    every = permutation.tolist()
    for key, value in data:
        if key in lists:
            moved = [value[node] for node in every]
            out[key] = moved if isinstance(value, list) else tuple(moved)
        elif isinstance(value, np.ndarray) and key in rows:
            out[key] = value.take(every, rows[key])
        elif key in rows:
            out[key] = value.index_select(rows[key], permutation)
        elif _holds_nodes(data, key, value):
            out[key] = inverse[value.long()].to(value.dtype)
    if _is_guessed(data):
        out.num_nodes = num_nodes
    return Reordered(out, permutation, inverse)


def _check(data: Data) -> None:
    from torch_geometric.data import Batch, Data

    if not isinstance(data, Data):
        raise TypeError(f"data must be a Data of PyG, got {type(data).__name__}")
    if isinstance(data, Batch):
        raise TypeError("data must be one graph, got a batch: reorder graphs before PyG joins them")
    if data.num_nodes is None:
        raise ValueError("data must know its number of nodes, got None: set data.num_nodes")
    index = data.get("edge_index")
    if not isinstance(index, Tensor) or index.dim() != 2 or index.shape[0] != 2:
        raise ValueError("data.edge_index must be [2, E]")
    for key, value in data:
        is_sparse = isinstance(value, Tensor) and value.layout != torch.strided
        if is_sparse or type(value).__name__ == "SparseTensor":
            raise TypeError(f"{key} is a sparse matrix: make it of the reordered edge_index")
        if isinstance(value, Tensor) and value.device.type != "cpu":
            raise ValueError(f"{key} must be on the CPU to be reordered, got {value.device}")
        if isinstance(value, Tensor) and _holds_nodes(data, key, value):
            _check_nodes(key, value, int(data.num_nodes))


def _of_nodes(data: Data, num_nodes: int) -> dict[str, int]:
    """The tensors and arrays with a row for each node, sharded ones included, and their dimension.

    Those with several numbers of nodes in a column, such as ``face``, have a column for something
    else, of which there may be as many as nodes.
    """
    found = {}
    for key, value in data:
        if not isinstance(value, Tensor | np.ndarray) or not data.is_node_attr(key):
            continue
        if value.ndim > 1 and _holds_nodes(data, key, value):
            continue
        axis = data.__cat_dim__(key, value, data._store) % value.ndim
        if value.shape[axis] == num_nodes:
            found[key] = axis
    return found


def _is_guessed(data: Data) -> bool:
    """True if PyG takes the largest number in an edge for the last node."""
    from torch_geometric.data.storage import N_KEYS

    return not any(key == "num_nodes" or key in N_KEYS or "node" in key for key, _ in data)


def _lists_of_nodes(data: Data) -> list[str]:
    keys = [key for key, value in data if isinstance(value, list | tuple)]
    return [key for key in keys if data.is_node_attr(key)]


def _holds_nodes(data: Data, key: str, value: object) -> bool:
    """True if a tensor holds numbers of nodes, by the way in which PyG joins graphs."""
    if not isinstance(value, Tensor) or value.dtype not in (torch.int64, torch.int32):
        return False
    return "batch" not in key and data.__inc__(key, value, data._store) == data.num_nodes


def _check_nodes(name: str, value: Tensor, num_nodes: int) -> None:
    """Numbers of nodes are within the graph.

    Raises:
        ValueError: one is not.
    """
    if value.numel() and not (int(value.min()) >= 0 and int(value.max()) < num_nodes):
        raise ValueError(
            f"{name} must name nodes from 0 to {num_nodes - 1}, got {int(value.min())} to "
            f"{int(value.max())}"
        )


def _permutation(
    edge_index: Tensor, num_nodes: int, order: str | Tensor, num_clusters: int | None
) -> Tensor:
    check_integers(or_none=True, num_clusters=num_clusters)
    if num_clusters is not None and order != "cluster":
        raise ValueError(
            f"num_clusters must be with the order 'cluster', got {num_clusters} with {order!r}"
        )
    if isinstance(order, Tensor):
        fits = order.dtype == torch.int64 and order.shape == (num_nodes,)
        if not fits or not torch.equal(order.sort().values, torch.arange(num_nodes)):
            raise ValueError(
                f"order must be a permutation of {num_nodes} nodes, int64 [{num_nodes}], got "
                f"{order.dtype} of shape {list(order.shape)}"
            )
        return order.clone()
    make = partial(_found, whole(edge_index).long(), num_nodes, order, num_clusters)
    # METIS may give other ranks something else.
    return decided(make) if are_on_ranks(edge_index) else make()


def _found(edge_index: Tensor, num_nodes: int, order: str, num_clusters: int | None) -> Tensor:
    """The permutation of an order by name."""
    if order == "cluster":
        return cluster_order(edge_index, num_nodes, num_clusters)
    if order == "rcm":
        return _reverse_cuthill_mckee(edge_index, num_nodes)
    if order == "degree":
        degree = torch.bincount(edge_index.flatten(), minlength=num_nodes)
        return degree.argsort(descending=True, stable=True)
    raise ValueError(f"order must be one of {list(ORDERS)} or a permutation, got {order!r}")


def _reverse_cuthill_mckee(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Nodes by levels of breadth-first searches, last ones first (Cuthill and McKee, 1969)."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    starts, neighbours = symmetric(edge_index, num_nodes)
    entries = np.ones(len(neighbours), dtype=np.int8)
    matrix = csr_array(
        (entries, neighbours.int().numpy(), starts.int().numpy()), (num_nodes, num_nodes)
    )
    return torch.from_numpy(reverse_cuthill_mckee(matrix, symmetric_mode=True).astype(np.int64))
