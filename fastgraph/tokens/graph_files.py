"""Graphs as lists of neighbours, in memory or in files that are mapped and never loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastgraph.layers.arguments import checked_path
from fastgraph.sampling.arguments import checked_count
from fastgraph.sampling.native_calls import check_tensors

DIRECTIONS = ("in", "out", "both")
MOST_NODES = 2**31 - 1
_PTRS = {"in": ("colptr",), "out": ("rowptr",), "both": ("colptr", "rowptr")}
_FILES = {"in": ("colptr.npy", "row.npy"), "out": ("rowptr.npy", "col.npy")}


class NeighborLists(NamedTuple):
    """Lists of neighbours: those of node ``i`` are ``neighbors[ptr[i]:ptr[i + 1]]``.

    Attributes:
        ptr: ``[nodes + 1]``, int32 or int64, from 0 to the number of edges.
        neighbors: ``[edges]``, int32 or int64.
    """

    ptr: Tensor
    neighbors: Tensor


class TokenGraph(NamedTuple):
    """A graph by its lists of neighbours, of which one kind may be missing.

    Attributes:
        into: the nodes from which edges lead to each node, as PyG's ``NeighborLoader`` walks.
        out: the nodes to which edges lead from each node.
    """

    into: NeighborLists | None
    out: NeighborLists | None

    def lists(self, direction: str) -> list[NeighborLists]:
        """The lists of a direction: ``"in"``, ``"out"`` or ``"both"``.

        Raises:
            ValueError: it is another one, or the graph has no such lists.
        """
        check_direction(direction)
        found = []
        for name, own in (("in", self.into), ("out", self.out)):
            if direction not in (name, "both"):
                continue
            if own is None:
                raise ValueError(
                    f"direction {direction!r} needs the lists {_FILES[name]} of the graph, which "
                    "has none"
                )
            found.append(own)
        return found


def check_direction(direction: object) -> None:
    """Refuse what is no direction.

    Raises:
        ValueError: it is none.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction must be one of {DIRECTIONS}, got {direction!r}")


def as_lists(graph: Any, direction: str, num_nodes: int | None = None) -> list[NeighborLists]:
    """The lists of neighbours of a graph in any of its forms.

    Args:
        graph: a :class:`TokenGraph`, an ``edge_index`` ``[2, edges]``, or compressed columns
            ``(colptr, row)``; tensors, or arrays of NumPy, which may be mapped.
        direction: see :func:`fastgraph.tokens.local_nodes`.
        num_nodes: of an ``edge_index``; by default one more than its largest node.

    Raises:
        TypeError: it is something else, or its numbers are no integers.
        ValueError: shapes do not fit, ``ptr`` begins or ends elsewhere than the edges, or it has
            no lists for the direction.
        IndexError: an ``edge_index`` names a node that is not there.
    """
    check_direction(direction)
    if isinstance(graph, (Tensor, np.ndarray)):
        graph = graph_of_edges(graph, num_nodes, direction)
    elif num_nodes is not None:
        raise ValueError(f"num_nodes is for an edge_index alone, got {num_nodes}")
    if isinstance(graph, Sequence) and not isinstance(graph, (TokenGraph, str)):
        if len(graph) != 2:
            raise ValueError(f"graph must be a pair (colptr, row), got {len(graph)} items")
        if direction != "in":
            raise ValueError(
                f"direction {direction!r} needs an edge_index, or a TokenGraph with other lists: "
                "(colptr, row) has those of direction 'in' alone"
            )
        graph = TokenGraph(NeighborLists(*graph), None)
    if not isinstance(graph, TokenGraph):
        raise TypeError(
            "graph must be an edge_index, a pair (colptr, row) or a TokenGraph, got "
            f"{type(graph).__name__}"
        )
    found = [
        NeighborLists(_integers("ptr", one.ptr), _integers("neighbors", one.neighbors))
        for one in graph.lists(direction)
    ]
    for name, one in zip(_PTRS[direction], found, strict=True):
        if one.ptr.numel() == 0:
            raise ValueError("ptr must hold at least one value, got none")
        if int(one.ptr[0]) != 0 or int(one.ptr[-1]) != one.neighbors.numel():
            raise ValueError(
                f"{name} must run from 0 to {one.neighbors.numel()}, the number of edges, got "
                f"{int(one.ptr[0])} to {int(one.ptr[-1])}"
            )
    if len({(one.ptr.dtype, one.neighbors.dtype, one.ptr.shape) for one in found}) > 1:
        shapes = [(one.ptr.dtype, one.neighbors.dtype, list(one.ptr.shape)) for one in found]
        raise ValueError(f"graph must have lists of equal dtypes and nodes, got {shapes}")
    return found


def graph_of_edges(
    edge_index: Tensor | np.ndarray, num_nodes: int | None = None, direction: str = "both"
) -> TokenGraph:
    """The lists of neighbours of edges, in memory, int64 and int32.

    Args:
        edge_index: ``[2, edges]``, sources and destinations, int32 or int64.
        num_nodes: by default one more than the largest node.
        direction: which lists are made.

    Raises:
        TypeError: the numbers are no integers.
        ValueError: another shape, or 2^31 nodes and more.
        IndexError: a node is negative, or not below ``num_nodes``.
    """
    edges = _integers("edge_index", edge_index, dims=2)
    if edges.shape[0] != 2:
        raise ValueError(f"edge_index must have shape [2, edges], got {list(edges.shape)}")
    low, high = (int(edges.min()), int(edges.max())) if edges.numel() else (0, -1)
    size = high + 1 if num_nodes is None else checked_count("num_nodes", num_nodes)
    if size > MOST_NODES:
        raise ValueError(f"num_nodes must be less than 2^31, got {size}")
    if low < 0 or high >= size:
        raise IndexError(f"edge_index must hold nodes in [0, {size}), got {low} to {high}")
    source, target = edges
    return TokenGraph(
        _sorted_lists(source, target, size) if direction in ("in", "both") else None,
        _sorted_lists(target, source, size) if direction in ("out", "both") else None,
    )


def _sorted_lists(other: Tensor, node: Tensor, size: int) -> NeighborLists:
    order = node.argsort(stable=True)
    ptr = torch.zeros(size + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(node, minlength=size), 0, out=ptr[1:])
    return NeighborLists(ptr, other[order].to(torch.int32))


def write_graph(folder: Path | str, graph: TokenGraph) -> None:
    """Write the lists of a graph as ``.npy`` files, which :func:`open_graph` maps.

    Args:
        folder: which is made; ``colptr.npy`` and ``row.npy`` are the lists ``into`` nodes,
            ``rowptr.npy`` and ``col.npy`` those ``out`` of nodes.
        graph: see :func:`graph_of_edges`.

    Raises:
        FileExistsError: the folder is there.
    """
    folder = checked_path(folder=folder)
    folder.mkdir(parents=True)
    for direction, own in (("in", graph.into), ("out", graph.out)):
        if own is not None:
            for name, values in zip(_FILES[direction], own, strict=True):
                np.save(folder / name, values.numpy())


def open_graph(folder: Path | str) -> TokenGraph:
    """The graph in a folder of ``.npy`` files, mapped: pages are read when they are looked at.

    Args:
        folder: with ``colptr.npy`` and ``row.npy``, ``rowptr.npy`` and ``col.npy``, or all four;
            int32 or int64.

    Raises:
        FileNotFoundError: one of a pair is missing, or all are.
        ValueError: a file is cut off, or is no ``.npy``.
        TypeError: a file has no integers.
    """
    folder = checked_path(folder=folder)
    found: list[NeighborLists | None] = []
    for names in _FILES.values():
        there = [(folder / name).is_file() for name in names]
        if any(there) and not all(there):
            raise FileNotFoundError(f"{folder}: expected {names[0]} and {names[1]}, got one alone")
        found.append(
            NeighborLists(*(map_file(folder / name) for name in names)) if all(there) else None
        )
    if found == [None, None]:
        raise FileNotFoundError(
            f"{folder}: expected colptr.npy and row.npy, or rowptr.npy and col.npy, got neither"
        )
    return TokenGraph(*found)


def map_file(file: Path, dims: int = 1) -> Tensor:
    """The integers of an ``.npy`` file, mapped.

    Raises:
        ValueError: it is cut off, or something else.
        TypeError: it holds no int32 or int64 of this machine.
    """
    try:
        values = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{file}: expected a whole .npy file: {error}") from error
    if not isinstance(values, np.ndarray):
        raise ValueError(f"{file}: expected an .npy file, got an archive of them")
    return _integers(str(file), values, dims=dims)


class _Writable:
    """Memory of an array that torch takes without a warning that it may be written."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        interface = values.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def _integers(name: str, values: Tensor | np.ndarray, dims: int = 1) -> Tensor:
    """A tensor of integers over the same memory."""
    if isinstance(values, np.ndarray):
        if values.dtype not in (np.int32, np.int64) or not values.dtype.isnative:
            raise TypeError(f"{name} must be int32 or int64, got {values.dtype}")
        if not values.flags.c_contiguous:
            raise ValueError(f"{name} must be contiguous, got strides {values.strides}")
        values = torch.from_numpy(np.asarray(_Writable(values)) if values.size else values.copy())
    if values is None:
        raise TypeError(f"{name} must be a tensor, got None")
    check_tensors(**{name: values})
    if values.dtype not in (torch.int32, torch.int64):
        got = str(values.dtype).removeprefix("torch.")
        raise TypeError(f"{name} must be int32 or int64, got {got}")
    if values.dim() != dims:
        raise ValueError(f"{name} must have {dims} dimensions, got shape {list(values.shape)}")
    return values
