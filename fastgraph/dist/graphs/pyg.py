"""Graphs with sharded tensors of nodes and edges: those of PyG, and the way to those of DGL."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from fastgraph.dist.graphs import dgl, pyg_functions
from fastgraph.dist.graphs.owners import (
    agreed_order,
    agreed_parts,
    check_device,
    owner_of_edges,
)
from fastgraph.dist.graphs.protocols import EdgeStore, PygGraph, PygStore, TypeOfNodes
from fastgraph.dist.operators.modes import checked_mode
from fastgraph.dist.ranks.mesh import Mesh
from fastgraph.dist.ranks.own_device import HOST
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor import hooks
from fastgraph.dist.tensor.layout import Layout, know, known, layout_of
from fastgraph.dist.tensor.memo import on_host
from fastgraph.dist.tensor.sharded import ShardedTensor, taken

if TYPE_CHECKING:
    from dgl import DGLGraph
    from torch_geometric.data import Data, HeteroData

Graph = TypeVar("Graph", "Data", "HeteroData", "DGLGraph")


def shard(
    data: Graph,
    *,
    weights: Sequence[float] | None = None,
    method: str = "metis",
    parts: Tensor | None = None,
    mode: str = "auto",
    mesh: Mesh | None = None,
    order: str | Tensor | None = None,
    is_tied: bool = False,
) -> Graph:
    """:func:`fastgraph.dist.shard`, with numbers as shares or none.

    ``is_tied``: the result takes the place of the graph, see
    :func:`fastgraph.dist.tensor.sharded.taken`.
    """
    if not WORLD.is_ready:
        raise RuntimeError("call fastgraph.dist.init() before fastgraph.dist.shard()")
    check_is_graph(data)
    hooks.install()
    pyg_functions.install()
    dgl.install()
    mode = checked_mode(mode, mesh)
    if dgl.is_dgl_graph(data):
        from fastgraph.dist.graphs.dgl import graphs as of_dgl

        if order is not None:
            raise ValueError(f"order must be None for a DGLGraph, got {order!r}")
        return of_dgl.shard(
            data,
            weights=weights,
            method=method,
            parts=parts,
            mode=mode,
            mesh=mesh,
            is_tied=is_tied,
        )
    check_can_be_sharded(data)
    sizes = num_nodes(data)
    edges = functools.partial(joint_edges, data, sizes)
    parts = agreed_parts(edges, sizes, weights, method, parts)
    order = agreed_order(order, edges, sizes)
    return _sharded(data, list(parts.split(sizes)), mode, mesh, is_tied, order)


def shard_as_known(
    data: Graph,
    *,
    weights: Sequence[float] | None = None,
    method: str = "metis",
    mode: str = "auto",
    mesh: Mesh | None = None,
) -> Graph:
    """:func:`shard`, by the partition of a graph of as many nodes if there was one.

    Splits of one graph have their nodes in common.
    """
    if dgl.is_dgl_graph(data):
        from fastgraph.dist.graphs.dgl import graphs as of_dgl

        sizes = of_dgl.num_nodes(data)
    else:
        sizes = num_nodes(data)
    rows = [known(n) for n in sizes]
    owners = [r.owner for r in rows if r is not None]
    if len(owners) == len(rows):
        return shard(data, parts=torch.cat(owners), mode=mode, mesh=mesh, is_tied=True)
    return shard(data, weights=weights, method=method, mode=mode, mesh=mesh, is_tied=True)


def check_is_graph(data: object) -> None:
    """A value is a graph of PyG or DGL.

    Raises:
        TypeError: it is not.
    """
    if dgl.is_dgl_graph(data):
        return
    from torch_geometric.data import Data, HeteroData

    if not isinstance(data, (Data, HeteroData)):
        raise TypeError(
            f"data must be a Data or HeteroData of PyG, or a DGLGraph, got {type(data).__name__}"
        )


def check_can_be_sharded(data: PygGraph) -> None:
    """The tensors of a graph are on the CPU or the device of this rank, and not sharded.

    Raises:
        ValueError: one is not.
    """
    for store in data.stores:
        for key, value in store.items():
            if isinstance(value, Tensor):
                check_device(key, value.device)
            if isinstance(value, ShardedTensor):
                raise ValueError(f"{key} is sharded already")


def num_nodes(data: PygGraph) -> list[int]:
    """The numbers of nodes of all types.

    Raises:
        ValueError: one is not known.
    """
    sizes = [size for store in data.node_stores if (size := store.num_nodes) is not None]
    if len(sizes) < len(data.node_stores):
        raise ValueError("data must know its number of nodes, got None: set data.num_nodes")
    return sizes


def joint_edges(data: PygGraph, sizes: list[int]) -> Tensor:
    """The edges of all types between the nodes of all types, numbered one type after the other."""
    starts: dict[TypeOfNodes, int] = {}
    offset = 0
    for store, size in zip(data.node_stores, sizes, strict=True):
        starts[store._key], offset = offset, offset + size
    found = [torch.empty(2, 0, dtype=torch.int64, device=HOST)]
    for edges in data.edge_stores:
        index = _ends(edges)
        if index is not None:
            source, _, target = edges._key or (None, None, None)
            found.append(
                on_host(index) + torch.tensor([[starts[source]], [starts[target]]], device=HOST)
            )
    return torch.cat(found, 1)


def _ends(store: EdgeStore) -> Tensor | None:
    """The edges of a store as ``edge_index``, which may be in a sparse matrix instead."""
    index: Tensor | None = store.get("edge_index")
    matrix = store.get("adj_t")
    if type(index) is Tensor:
        return index
    if isinstance(matrix, Tensor) and matrix.layout != torch.strided and matrix.dim() == 2:
        index = matrix.to_sparse_coo().coalesce().indices().flip(0)  # rows are destinations
        return index
    return None


def _sharded(
    data: Graph,
    parts: list[Tensor],
    mode: str,
    mesh: Mesh | None,
    is_tied: bool,
    order: Tensor | None,
) -> Graph:
    out = copy.copy(data)
    owners: dict[TypeOfNodes, Tensor] = {}
    for store, owner in zip(out.node_stores, parts, strict=True):
        owners[store._key] = owner
        rows = layout_of(owner, mode, mesh, order)
        know(rows)
        _shard_store(store, store.is_node_attr, rows, is_tied)
    for store in out.edge_stores:
        index = store.get("edge_index")
        if type(index) is Tensor:
            source, _, target = store._key or (None, None, None)
            pair = on_host(index)
            ends = owners[source][pair[0]], owners[target][pair[1]]
            rows = layout_of(owner_of_edges(*ends, mode, mesh))
            if known(rows.n) is None:
                know(rows)
            _shard_store(store, store.is_edge_attr, rows, is_tied)
    return out


def _shard_store(
    store: PygStore, belongs: Callable[[str], bool], rows: Layout, is_tied: bool
) -> None:
    for key, axis in by_row(store, belongs, rows.n).items():
        store[key] = taken(store[key], rows, axis, is_tied=is_tied, name=key)


def by_row(store: PygStore, belongs: Callable[[str], bool], n: int) -> dict[str, int]:
    """The tensors of a store with a row for each of ``n`` nodes or edges, and their dimension.

    Args:
        store: of a graph.
        belongs: ``is_node_attr`` or ``is_edge_attr`` of the store.
        n: how many there are.
    """
    # Asked first, as the answers are found by comparing sizes.
    keys = [key for key, value in store.items() if type(value) is Tensor and belongs(key)]
    found = {}
    for key in keys:
        value = store[key]
        if value.layout != torch.strided or not value.dim():
            continue
        axis = store._parent().__cat_dim__(key, value, store) % value.dim()
        if value.shape[axis] == n:
            found[key] = axis
    return found
