"""Another partition for a program that runs, by what was measured of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from fastgraph.dist.balance.balance import Balance, by_speed
from fastgraph.dist.balance.shares import capped
from fastgraph.dist.graphs.partition import PartitionError, check_weights, partition
from fastgraph.dist.graphs.relayout import Moved, Placement, bytes_of_rows, move, obstacle
from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.agreement import on_first_rank
from fastgraph.dist.ranks.devices import devices, in_use
from fastgraph.dist.ranks.phases import THRESHOLD
from fastgraph.dist.ranks.world import WORLD, RanksDivergedError

if TYPE_CHECKING:
    from torch_geometric.data import Data, HeteroData


@dataclass(frozen=True)
class Rebalanced:
    """The result of :func:`rebalance`.

    Attributes:
        weights: the share of the work of each rank from now on.
        moved: how many sharded tensors have other rows; 0 if all stays as it is.
        left: how many tensors of nodes and edges stay in the layout before.
    """

    weights: tuple[float, ...]
    moved: int
    left: int


def rebalance(
    data: Data | HeteroData,
    balance: Balance | None = None,
    *,
    weights: Sequence[float] | None = None,
    method: str = "metis",
    threshold: float = THRESHOLD,
) -> Rebalanced:
    """Partition a sharded graph anew, and give its rows to other ranks. All ranks must call it.

    Call it between the epochs of a training. The rows of all sharded tensors of nodes and edges
    that the program holds are exchanged inside them: features, labels, masks, edges, parameters
    with a row for each node, their gradients and the state of their optimizer. Replicated
    parameters and the state of an optimizer stay as they are, on every rank. Results do not change,
    other than by the order of sums.

    What a model has computed before stays where it was, and so do selections of rows; either can be
    used further, at the cost of an exchange. While it works rank 0 holds all edges.

    Args:
        data: what :func:`fastgraph.dist.shard` or :func:`fastgraph.dist.load_shards` returned.
        balance: what :func:`fastgraph.dist.measured` has measured. A rank gets work by what it did
            in a second of computing, and not more than its memory holds.
        weights: the share of the work of each rank, instead.
        method: see :func:`fastgraph.dist.partition`.
        threshold: nothing is done if the slowest rank takes at most so many times the mean of all.

    Raises:
        ValueError: an argument that cannot be used.
        RanksDivergedError: the program has not made the same sharded tensors on all ranks, so that
            nobody knows which belong together.
        ModuleNotFoundError: ``pymetis`` is not installed.
        PartitionError: METIS failed.
        MemoryError: with ``balance``, memory does not allow for other shares.
    """
    if (balance is None) == (weights is None):
        raise ValueError("either balance or weights must be given, and not both")
    if not threshold >= 1:
        raise ValueError(f"threshold must be at least 1, got {threshold}")
    placement = Placement.of(data)
    if placement.fixed:
        raise ValueError(f"data must be a graph of PyG: {placement.fixed}")
    if balance is not None:
        if not balance.measured:
            raise ValueError("balance must be complete: use it after the block that is measured")
        if (balance.nodes, balance.edges) != placement.counts():
            raise ValueError("balance must be of this graph as it is sharded now")
        if balance.imbalance <= threshold:
            return Rebalanced(by_work(balance), 0, 0)
        weights = capped(by_speed(balance.speeds()), highest_shares(balance))
    assert weights is not None
    shares = check_weights(weights, WORLD.size).tolist()
    reason = obstacle()
    if reason is not None:
        raise RanksDivergedError(reason)
    moved = partition_anew(placement, shares, method)
    return Rebalanced(tuple(shares), moved.tensors, moved.left)


def by_work(balance: Balance) -> tuple[float, ...]:
    """The shares of the work that ranks have."""
    return tuple(work / max(sum(balance.work), 1) for work in balance.work)


def highest_shares(balance: Balance) -> list[float]:
    """The share of the work for which each rank has memory. All ranks must call it.

    What a rank needs for its rows, and has needed at most for an epoch beside what it needs now, is
    taken to follow its share.
    """
    now, peak, space = in_use()
    rows = bytes_of_rows()
    used = transport.gather_objects((now, space, rows, max(peak - now, 0)))
    shares = []
    for device, own, (now, space, rows, more) in zip(
        devices(), by_work(balance), used, strict=True
    ):
        free = min(device.limit - space, device.memory - now) + rows
        needed = (rows + more) / own if own else 0.0
        shares.append(min(1.0, free / needed) if needed else 1.0)
    return shares


def partition_anew(placement: Placement, shares: Sequence[float], method: str) -> Moved:
    """Move the rows of a graph to where a new partition wants them. All ranks must call it."""
    edges = placement.joint_edges()
    sizes = [rows.n for rows in placement.nodes]

    def found() -> Tensor:
        return partition(edges, sum(sizes), WORLD.size, weights=shares, method=method)

    errors = (ValueError, ModuleNotFoundError, PartitionError)
    owner = on_first_rank(found, errors)
    return move(placement, list(owner.split(sizes)))
