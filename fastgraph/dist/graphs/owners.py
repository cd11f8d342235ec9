"""The owner of each node, a rank, on which all ranks agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fastgraph.dist.graphs.partition import check_weights, cluster_order, partition
from fastgraph.dist.operators.modes import BY_NAME, HALO
from fastgraph.dist.ranks.agreement import on_all_ranks, on_first_rank
from fastgraph.dist.ranks.mesh import Mesh
from fastgraph.dist.ranks.own_device import HOST
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.memo import on_host
from fastgraph.layers.arguments import check_kinds


def agreed_parts(
    edges: Callable[[], Tensor],
    sizes: Sequence[int],
    weights: Sequence[float] | None,
    method: str,
    parts: Tensor | None,
) -> Tensor:
    """The rank of each node, int64 ``[num_nodes]``, the same on all ranks.

    Args:
        edges: gives the edges of all types, int64 ``[2, E]``, by joint numbers of nodes.
        sizes: the numbers of nodes of all types.
        weights: see :func:`fastgraph.dist.shard`.
        method: see :func:`fastgraph.dist.shard`.
        parts: see :func:`fastgraph.dist.shard`.

    Raises:
        ValueError: an argument that cannot be used.
    """
    check_weights(weights, WORLD.size)
    if parts is None:
        edge_index, n = edges(), sum(sizes)
        # METIS may give others something else.
        parts = on_first_rank(
            lambda: partition(edge_index, n, WORLD.size, weights=weights, method=method),
            (ValueError, ModuleNotFoundError, RuntimeError),
        )
    _check_parts(parts, sum(sizes))
    return on_host(parts)


def agreed_order(
    order: str | Tensor | None, edges: Callable[[], Tensor], sizes: Sequence[int]
) -> Tensor | None:
    """The order of the local rows of nodes, a permutation of all, the same on all ranks.

    Args:
        order: see :func:`fastgraph.dist.shard`.
        edges: gives the edges, int64 ``[2, E]``.
        sizes: the numbers of nodes of all types, of which there must be one.

    Raises:
        TypeError, ValueError: on all ranks, an argument of one that cannot be used, or arguments of
            several kinds.
    """
    kinds = on_all_ranks(lambda: _kind_of_order(order, sizes), (TypeError, ValueError))
    if len(set(kinds)) > 1:
        raise ValueError(f"order must be the same on all ranks, got {', '.join(kinds)}")
    if order is None:
        return None
    if isinstance(order, Tensor):
        return on_host(order).clone()
    edge_index, (n,) = edges(), sizes
    errors = (ValueError, ModuleNotFoundError, RuntimeError)
    # METIS may give others something else.
    return on_host(on_first_rank(lambda: cluster_order(edge_index, n), errors))


def _kind_of_order(order: str | Tensor | None, sizes: Sequence[int]) -> str:
    """The kind of order that an argument is, if it can be used."""
    if order is None:
        return "None"
    if len(sizes) != 1:
        raise ValueError(f"order must be None for {len(sizes)} types of nodes, got {order!r}")
    (n,) = sizes
    if isinstance(order, str):
        if order != "cluster":
            raise ValueError(f"order must be 'cluster', a permutation or None, got {order!r}")
        return repr(order)
    check_kinds(Tensor, order=order)
    if order.dtype != torch.int64 or order.shape != (n,):
        raise ValueError(
            f"order must be int64 [{n}], got {order.dtype} of shape {list(order.shape)}"
        )
    if not torch.equal(on_host(order).sort().values, torch.arange(n, device=HOST)):
        raise ValueError(f"order must be a permutation of {n} nodes, got other numbers")
    return "a permutation"


def _check_parts(parts: Tensor, n: int) -> None:
    fits = parts.dtype == torch.int64 and parts.shape == (n,)
    if not fits or (n and not (int(parts.min()) >= 0 and int(parts.max()) < WORLD.size)):
        raise ValueError(
            f"parts must be int64 [{n}] with ranks from 0 to {WORLD.size - 1}, got {parts.dtype} "
            f"of shape {list(parts.shape)}"
        )


def owner_of_edges(
    sources: Tensor, destinations: Tensor, mode: str = "halo", mesh: Mesh | None = None
) -> Tensor:
    """The rank that holds each edge; with ``"auto"``, as by halo.

    Args:
        sources: int64 ``[E]``, the rank of the node where each starts.
        destinations: the same for where it leads to.
        mode: of the nodes, see :mod:`fastgraph.dist.operators.modes`.
        mesh: of the grid; ``None``: the most square one.
    """
    return BY_NAME.get(mode, HALO).on(mesh).owner_of_edges(sources, destinations)


def check_device(name: str, device: torch.device) -> None:
    """A tensor of a graph is on the CPU, or on the device of this rank.

    Raises:
        ValueError: it is not.
    """
    if device not in (HOST, WORLD.device):
        allowed = "the CPU" if WORLD.device == HOST else f"the CPU or {WORLD.device}"
        raise ValueError(f"{name} must be on {allowed} to be sharded, got {device}")
