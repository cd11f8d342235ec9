"""Our sampler in the words of pyg-lib and torch-sparse, whose functions PyG calls.

Arguments and results are theirs: types of edges are strings, nodes of disjoint samples come beside
the number of their sample, and what was drawn is named by places in ``row``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from fastgraph import sampling
from fastgraph.pyg.adjacency import plain, row_pointers

Types = Mapping[str, Tensor]
"""Tensors of types of edges, whose names are joined by ``__``, or of types of nodes."""

_SEPARATOR = "__"

Function = TypeVar("Function", bound=Callable[..., Any])


def of_plain(function: Function) -> Function:
    """The function of the tensors that PyG's ``Index`` and ``EdgeIndex`` wrap."""

    @wraps(function)
    def of_any(*args: Any, **kwargs: Any) -> Any:
        return function(
            *(_unwrapped(value) for value in args),
            **{name: _unwrapped(value) for name, value in kwargs.items()},
        )

    return of_any  # type: ignore[return-value]


def _unwrapped(value: Any) -> Any:
    if isinstance(value, Tensor):
        return plain(value)
    if isinstance(value, Mapping):
        return {key: _unwrapped(item) for key, item in value.items()}
    return value


@of_plain
def neighbor_sample(
    rowptr: Tensor,
    col: Tensor,
    seed: Tensor,
    num_neighbors: Sequence[int],
    node_time: Tensor | None = None,
    edge_time: Tensor | None = None,
    seed_time: Tensor | None = None,
    edge_weight: Tensor | None = None,
    csc: bool = False,
    replace: bool = False,
    directed: bool = True,
    disjoint: bool = False,
    temporal_strategy: str = "uniform",
    return_edge_id: bool = True,
) -> tuple[Any, ...]:
    """``pyg::neighbor_sample``: row, column, nodes, edges, and how many each hop has found."""
    sample = sampling.neighbor_sample(
        rowptr,
        col,
        seed.to(col.dtype),
        num_neighbors,
        node_time=node_time,
        edge_time=edge_time,
        seed_time=seed_time,
        edge_weight=edge_weight,
        replace=bool(replace),
        directed=bool(directed),
        disjoint=bool(disjoint),
        temporal_strategy=temporal_strategy,
        return_edge_id=return_edge_id,
    )
    ends = (sample.row, sample.col) if csc else (sample.col, sample.row)
    return (
        *ends,
        sample.node if sample.batch is None else torch.stack([sample.batch, sample.node], dim=1),
        sample.edge,
        sample.num_sampled_nodes,
        sample.num_sampled_edges,
    )


@of_plain
def hetero_neighbor_sample(
    node_types: Sequence[str],
    edge_types: Sequence[tuple[str, str, str]],
    rowptr_dict: Types,
    col_dict: Types,
    seed_dict: Types,
    num_neighbors_dict: Mapping[str, Sequence[int]],
    node_time_dict: Types | None = None,
    edge_time_dict: Types | None = None,
    seed_time_dict: Types | None = None,
    edge_weight_dict: Types | None = None,
    csc: bool = False,
    replace: bool = False,
    directed: bool = True,
    disjoint: bool = False,
    temporal_strategy: str = "uniform",
    return_edge_id: bool = True,
) -> tuple[Any, ...]:
    """``pyg::hetero_neighbor_sample``: :func:`neighbor_sample` by types of nodes and edges."""
    named = {_SEPARATOR.join(edge_type): tuple(edge_type) for edge_type in edge_types}
    # In the order of the graph, by which random numbers go: PyG has the types of a store from a
    # set, whose order differs from process to process. Those that have no edges are not there.
    types = {name: named[name] for name in rowptr_dict if name in named}
    dtype = next(iter(col_dict.values())).dtype if col_dict else torch.int64
    seeds = {name: seed.to(dtype) for name, seed in seed_dict.items()}
    if not types:
        return {}, {}, _numbered(seeds, disjoint), {}, {k: [len(v)] for k, v in seeds.items()}, {}

    def by_type(values: Mapping[str, Any] | None) -> dict[Any, Any] | None:
        if values is None:
            return None
        return {edge_type: values[name] for name, edge_type in types.items() if name in values}

    def by_name(values: Mapping[Any, Any] | None) -> dict[str, Any] | None:
        if values is None:
            return None
        return {name: values[edge_type] for name, edge_type in types.items()}

    ends_of_types = {end for source, _, target in types.values() for end in (source, target)}

    def of_types(values: Types | None) -> Types | None:
        """Without types of nodes that no edge and no seed has."""
        if values is None:
            return None
        return {k: v for k, v in values.items() if k in ends_of_types or k in seeds}

    sample = sampling.hetero_neighbor_sample(
        by_type(rowptr_dict) or {},
        by_type(col_dict) or {},
        seeds,
        by_type(num_neighbors_dict) or {},
        node_time=of_types(node_time_dict),
        edge_time=by_type(edge_time_dict),
        seed_time=_of_seeds(seed_time_dict, seeds),
        edge_weight=by_type(edge_weight_dict),
        replace=bool(replace),
        directed=bool(directed),
        disjoint=bool(disjoint),
        temporal_strategy=temporal_strategy,
        return_edge_id=return_edge_id,
    )
    nodes, counts = dict(sample.node), dict(sample.num_sampled_nodes)
    hops = max((len(hop_counts) for hop_counts in counts.values()), default=1)
    batch = sample.batch
    if batch is not None:
        nodes = {name: torch.stack([batch[name], node], dim=1) for name, node in nodes.items()}
    for name in node_types:  # also those that no edge reaches
        if name not in nodes:
            nodes[name] = torch.empty((0,) if batch is None else (0, 2), dtype=dtype)
            counts[name] = [0] * hops
    ends = by_name(sample.row), by_name(sample.col)
    return (
        *(ends if csc else reversed(ends)),
        nodes,
        by_name(sample.edge),
        counts,
        by_name(sample.num_sampled_edges),
    )


def _of_seeds(values: Types | None, seeds: Types) -> Types | None:
    return None if values is None else {k: v for k, v in values.items() if k in seeds}


def _numbered(seeds: Types, disjoint: bool) -> dict[str, Tensor]:
    """Seeds alone, beside the number of their sample where samples are disjoint."""
    if not disjoint:
        return dict(seeds)
    found, first = {}, 0
    for name, seed in seeds.items():
        batch = torch.arange(first, first + len(seed), dtype=seed.dtype)
        found[name] = torch.stack([batch, seed], dim=1)
        first += len(seed)
    return found


def homogeneous_by_nodes(
    colptr: Tensor,
    row: Tensor,
    input_node: Tensor,
    num_neighbors: Sequence[int],
    replace: bool,
    directed: bool,
) -> tuple[Any, ...]:
    """``torch_sparse::neighbor_sample``: nodes, row, column and edges."""
    rows, cols, nodes, edges, *_ = neighbor_sample(
        colptr, row, input_node, num_neighbors, csc=True, replace=replace, directed=directed
    )
    return nodes, rows, cols, edges


def heterogeneous_by_nodes(
    node_types: Sequence[str],
    edge_types: Sequence[tuple[str, str, str]],
    colptr_dict: Types,
    row_dict: Types,
    input_node_dict: Types,
    num_neighbors_dict: Mapping[str, Sequence[int]],
    num_hops: int,
    replace: bool,
    directed: bool,
) -> tuple[Any, ...]:
    """``torch_sparse::hetero_neighbor_sample``: :func:`homogeneous_by_nodes` by types."""
    rows, cols, nodes, edges, *_ = hetero_neighbor_sample(
        node_types,
        edge_types,
        colptr_dict,
        row_dict,
        input_node_dict,
        {name: counts[:num_hops] for name, counts in num_neighbors_dict.items()},
        csc=True,
        replace=replace,
        directed=directed,
    )
    return nodes, rows, cols, edges


@of_plain
def random_walk(
    rowptr: Tensor, col: Tensor, seed: Tensor, walk_length: int, p: float = 1.0, q: float = 1.0
) -> Tensor:
    """``pyg::random_walk``: the nodes of each walk, ``[walks, walk_length + 1]``."""
    device = seed.device  # of a graph on a GPU, as `dropout_path` has it
    walks, _ = sampling.random_walk(
        rowptr.cpu(), col.cpu(), seed.to("cpu", col.dtype), walk_length, p=float(p), q=float(q)
    )
    return walks.to(device)


@of_plain
def partition(
    rowptr: Tensor, col: Tensor, optional_value: Tensor | None, num_parts: int, recursive: bool
) -> Tensor:
    """``torch_sparse::partition``: the part of each node by METIS.

    Raises:
        RuntimeError: edges have weights, on which PyG's callers look elsewhere.
    """
    if optional_value is not None:
        raise RuntimeError("fastgraph's METIS takes no weights of edges")
    return sampling.cluster(rowptr, col, num_parts, recursive=recursive)


class MetisPartition:
    """In place of ``pyg_lib.partition``."""

    @staticmethod
    @of_plain
    def metis(
        rowptr: Tensor,
        col: Tensor,
        num_partitions: int,
        node_weight: Tensor | None = None,
        edge_weight: Tensor | None = None,
        recursive: bool = False,
    ) -> Tensor:
        """The part of each node by METIS.

        Raises:
            NotImplementedError: nodes or edges have weights.
        """
        if node_weight is not None or edge_weight is not None:
            raise NotImplementedError("fastgraph's METIS takes no weights of nodes or edges")
        return sampling.cluster(rowptr, col, num_partitions, recursive=recursive)


@of_plain
def ptr2ind(ptr: Tensor, size: int) -> Tensor:
    """``torch_sparse::ptr2ind``: the group of each of ``size`` rows that ``ptr`` delimits."""
    groups = torch.arange(ptr.numel() - 1, dtype=ptr.dtype, device=ptr.device)
    return groups.repeat_interleave(ptr.diff(), output_size=size)


@of_plain
def ego_k_hop_sample_adj(
    rowptr: Tensor, col: Tensor, idx: Tensor, depth: int, num_neighbors: int, replace: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``torch_sparse::ego_k_hop_sample_adj``: all edges between the nodes around each root.

    Returns:
        ``rowptr`` and ``col`` of all these graphs as one, its nodes, grouped by root and ascending
        within, and its edges, where the nodes of each begin and end, and the position of each root.
    """
    hops = [num_neighbors] * depth
    drawn = sampling.neighbor_sample(
        rowptr, col, idx.to(col.dtype), hops, replace=replace, disjoint=True, return_edge_id=False
    )
    assert drawn.batch is not None
    num_nodes = rowptr.numel() - 1
    keys = drawn.batch.long() * num_nodes + drawn.node
    keys = keys.sort().values  # each node is there once
    batch, nodes = keys // max(num_nodes, 1), keys % max(num_nodes, 1)
    ptr = row_pointers(batch, idx.numel())
    roots = torch.searchsorted(keys, torch.arange(idx.numel()) * num_nodes + idx)

    # Edges of every node that come from a node of the same root.
    begins, degrees = rowptr[nodes], rowptr.diff()[nodes]
    targets = torch.arange(nodes.numel()).repeat_interleave(degrees)
    before = degrees.cumsum(0) - degrees
    edges = torch.arange(targets.numel()) - (before - begins)[targets]
    wanted = batch[targets] * num_nodes + col[edges]
    sources = torch.searchsorted(keys, wanted).clamp_(max=max(keys.numel() - 1, 0))
    kept = keys[sources] == wanted
    return (
        row_pointers(targets[kept], nodes.numel()),
        sources[kept],
        nodes,
        edges[kept],
        ptr,
        roots,
    )
