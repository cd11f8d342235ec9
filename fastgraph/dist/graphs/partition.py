"""Partitions of a graph: the owner of each node."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from numbers import Real

import torch
from torch import Tensor

from fastgraph.dist.ranks.own_device import HOST
from fastgraph.layers.arguments import check_integers, check_kinds
from fastgraph.sampling.clusters import Cut, parts_by_metis
from fastgraph.sampling.clusters import PartitionError as PartitionError
from fastgraph.sampling.clusters import symmetric as symmetric

METHODS = ("metis", "even")

NODES_OF_A_CLUSTER = 256
"""By default. Queries, keys and values of one cluster, of a kilobyte each, then fit into the cache
of one core, of a megabyte."""

_MOST = torch.iinfo(torch.int32).max
"""Of entries and of work: METIS, as pymetis has it, counts by 32 bits."""

_LEAST = torch.finfo(torch.float32).tiny
"""The smallest share of a part by METIS, which has them in single precision and fails at 0."""


def partition(
    edge_index: Tensor,
    num_nodes: int,
    num_parts: int,
    *,
    weights: Sequence[float] | None = None,
    method: str = "metis",
) -> Tensor:
    """The part of each node.

    Args:
        edge_index: int64 ``[2, E]``; directions, duplicates and self-loops make no difference to
            which edges are cut.
        num_nodes: the number of nodes.
        num_parts: how many parts there are; some may be empty where nodes are few.
        weights: the share of the work of each part, above 0; default: equal shares. A node counts
            as one and its incoming edges.
        method: ``"metis"``: few edges between parts, by METIS (Karypis and Kumar, SIAM J. Sci.
            Comput. 20, 1998); ``"even"``: consecutive nodes.

    Returns:
        int64 ``[num_nodes]``.

    Raises:
        TypeError: ``edge_index`` is no tensor.
        ValueError: an argument that cannot be used.
        ModuleNotFoundError: ``pymetis`` is not installed.
        PartitionError: METIS failed, or counts no further than the edges of the graph.
    """
    check_integers(num_parts=num_parts)
    check_integers(0, num_nodes=num_nodes)
    check_kinds(Tensor, edge_index=edge_index)
    shares = check_weights(weights, num_parts)
    if method not in METHODS:
        raise ValueError(f"method must be one of {list(METHODS)}, got {method!r}")
    if edge_index.dim() != 2 or edge_index.shape[0] != 2 or edge_index.dtype != torch.int64:
        raise ValueError(
            f"edge_index must be int64 [2, E], got {edge_index.dtype} of shape "
            f"{list(edge_index.shape)}"
        )
    if edge_index.numel() and not (
        int(edge_index.min()) >= 0 and int(edge_index.max()) < num_nodes
    ):
        raise ValueError(
            f"edge_index must name nodes from 0 to {num_nodes - 1}, got {int(edge_index.min())} "
            f"to {int(edge_index.max())}"
        )
    work = torch.bincount(edge_index[1], minlength=num_nodes) + 1
    if method == "even" or num_parts == 1 or num_nodes <= num_parts or not edge_index.numel():
        return _consecutive(work, shares)
    return _by_metis(edge_index, num_nodes, work, shares)


def cluster_order(edge_index: Tensor, num_nodes: int, num_clusters: int | None = None) -> Tensor:
    """The nodes cluster by cluster, a permutation, by a :func:`partition` of METIS.

    Args:
        edge_index: int64 ``[2, E]``.
        num_nodes: the number of nodes.
        num_clusters: default: one for each 256 nodes.

    Raises:
        ModuleNotFoundError: ``pymetis`` is not installed.
        PartitionError: METIS failed, or counts no further than the edges of the graph.
    """
    wanted = num_clusters or max(num_nodes // NODES_OF_A_CLUSTER, 1)
    return partition(edge_index, num_nodes, wanted).argsort(stable=True)


def check_weights(weights: Sequence[float] | None, num_parts: int) -> Tensor:
    """Shares of parts that add up to 1, float64 ``[num_parts]``.

    Raises:
        TypeError: they are no numbers, or not several.
        ValueError: not one for each part, or one that is not above 0.
    """
    if isinstance(weights, str):
        raise ValueError(f"weights must be {num_parts} numbers above 0 here, got {weights!r}")
    if weights is None:
        return torch.full((num_parts,), 1 / num_parts, dtype=torch.float64, device=HOST)
    if not isinstance(weights, Iterable) or not all(map(_is_number, weights := list(weights))):
        raise TypeError(f"weights must be {num_parts} numbers above 0, got {weights!r}")
    shares = torch.tensor([float(w) for w in weights], dtype=torch.float64, device=HOST)
    if len(shares) != num_parts or not bool((shares > 0).all() and shares.isfinite().all()):
        raise ValueError(
            f"weights must be {num_parts} numbers above 0, one for each rank, got {list(weights)}"
        )
    return shares / shares.sum()


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real) and not isinstance(value, bool)


def _consecutive(work: Tensor, shares: Tensor) -> Tensor:
    """Consecutive nodes, cut where the work done before reaches the shares."""
    before = (work.cumsum(0) - work).double() / max(int(work.sum()), 1)
    return torch.bucketize(before, shares.cumsum(0)[:-1], right=True)


def _by_metis(edge_index: Tensor, num_nodes: int, work: Tensor, shares: Tensor) -> Tensor:
    for package in ("numpy", "pymetis"):
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(
                f"partitioning by METIS needs {package}: pip install 'fastgraph[dist]', or choose "
                "the method 'even'",
                name=package,
            )
    if float(shares.min()) < _LEAST:
        raise ValueError(
            f"weights must be at least {_LEAST:g} of their sum for METIS, got {shares.min():g}: "
            "choose the method 'even'"
        )
    starts, neighbours = symmetric(edge_index, num_nodes)
    largest = max(len(neighbours), int(work.sum()))
    if largest > _MOST:
        raise PartitionError(
            f"METIS counts to {_MOST:,}, got {len(neighbours):,} entries of a symmetric graph and "
            f"{int(work.sum()):,} units of work: choose the method 'even'"
        )
    return parts_by_metis([Cut(starts, neighbours, shares, work)], recursive=True)[0]
