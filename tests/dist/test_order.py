"""Rows of a rank in the order of clusters, of which programs see nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GCNConv, GRUAggregation

import fastgraph.dist as fgd
from fastgraph.dist.graphs import partition
from fastgraph.dist.ranks.world import WORLD

CLUSTERS, SIZE = 12, 20


def graph() -> tuple[Data, Tensor]:
    """Cliques in a ring, with their nodes at random, and the clique of each node."""
    g = torch.Generator().manual_seed(0)
    number = torch.randperm(CLUSTERS * SIZE, generator=g).view(CLUSTERS, SIZE)
    inner = [torch.cartesian_prod(own, own) for own in number]
    ring = torch.stack([number[:, 0], number.roll(1, 0)[:, 1]], 1)
    index = torch.cat([*inner, ring, ring.flip(1)]).t().contiguous()
    cluster = torch.empty(number.numel(), dtype=torch.int64)
    cluster[number] = torch.arange(CLUSTERS)[:, None].expand(-1, SIZE)
    return Data(torch.randn(number.numel(), 8, generator=g), index), cluster


def on_this_rank() -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    partition.NODES_OF_A_CLUSTER = SIZE
    data, cluster = graph()
    data.x = data.x.double()
    torch.manual_seed(0)
    conv = GCNConv(8, 3)
    changes, outs = [], []
    for order in (None, "cluster"):
        sharded = fgd.shard(data, order=order)
        own = cluster[sharded.x.rows.position]
        changes.append(int((own.diff() != 0).sum()))
        outs.append(fgd.whole(conv(sharded.x, sharded.edge_index)).detach())
        assert torch.equal(fgd.whole(sharded.x), data.x)
        assert torch.equal(fgd.whole(sharded.x[5:90]), data.x[5:90])
        assert torch.equal(fgd.whole(sharded.x[cluster == 3]), data.x[cluster == 3])
    expected = conv(data.x, data.edge_index).detach()
    outs.append(expected + aggregated_in_order())
    return {
        "changes": changes,
        "off": max(float((out - expected).abs().max()) for out in outs),
        "errors": [error_of(*given) for given in wrong()],
        **of_some_ranks(data),
        **rebalanced(data, cluster),
    }


def aggregated_in_order() -> Tensor:
    """How far aggregations that go by the order of rows are off, whose groups ascend."""
    groups = torch.arange(8) // 4
    data = Data(torch.arange(8.0).view(8, 1), torch.zeros(2, 0, dtype=torch.int64), groups=groups)
    aggregate = GRUAggregation(1, 1)
    expected = aggregate(data.x, groups, dim_size=8).detach()
    reverse = torch.arange(8).flip(0)
    sharded = fgd.shard(data, parts=torch.zeros(8, dtype=torch.int64), order=reverse)
    found = fgd.whole(aggregate(sharded.x, sharded.groups, dim_size=8)).detach()
    return (found - expected).abs().max()


def of_some_ranks(data: Data) -> dict[str, list[str]]:
    """Errors where a rank gives another order than those before it."""
    is_last = WORLD.rank == WORLD.size - 1
    twice = torch.zeros(CLUSTERS * SIZE, dtype=torch.int64)
    given = (["cluster", None], ["cluster", twice], [twice, 3])
    return {"of some ranks": [error_of(data, others[is_last]) for others in given]}


def rebalanced(data: Data, cluster: Tensor) -> dict[str, Any]:
    """Rows that were given to other ranks between two steps."""
    outs, grads, changes = [], [], []
    for order in (None, "cluster"):
        torch.manual_seed(0)
        conv, table = GCNConv(8, 3), torch.nn.Embedding(len(cluster), 8)
        sharded = fgd.shard(data, order=order)
        optimizer = torch.optim.Adam([*conv.parameters(), *table.parameters()], lr=0.1)
        for weights in (None, [1.0, *[5.0] * (WORLD.size - 1)], [1.0] * WORLD.size):
            if weights is not None:
                assert fgd.rebalance(sharded, weights=weights).moved
                own = cluster[sharded.x.rows.position]
                changes.append(int((own.diff() != 0).sum()))
            optimizer.zero_grad()
            out = conv(sharded.x + table.weight, sharded.edge_index)
            out[cluster < 5].square().mean().backward()
            optimizer.step()
        assert torch.equal(fgd.whole(sharded.x), data.x)
        outs.append(fgd.whole(out).detach())
        grads.append(fgd.whole(table.weight.grad))
    off = max(float((a - b).abs().max()) for a, b in (outs, grads))
    return {"rebalanced off": off, "rebalanced changes": (max(changes[:2]), max(changes[2:]))}


def wrong() -> list[tuple[Any, Any]]:
    data, _ = graph()
    hetero = HeteroData()
    hetero["a"].x, hetero["b"].x = torch.zeros(3, 1), torch.zeros(4, 1)
    twice = torch.zeros(CLUSTERS * SIZE, dtype=torch.int64)
    return [(data, "degree"), (data, twice), (data, twice[1:]), (data, 3), (hetero, "cluster")]


def error_of(data: Any, order: Any) -> str:
    try:
        fgd.shard(data, order=order)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def found(world_size: int, once_on_ranks: Any) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = once_on_ranks(on_this_rank, world_size)
    return results


def test_rows_are_cluster_by_cluster(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        before, after = of_rank["changes"]
        assert before > 5 * after and after < CLUSTERS


def test_programs_see_the_order_of_the_graph(found: list[dict[str, Any]]) -> None:
    assert max(of_rank["off"] for of_rank in found) < 1e-13


def test_rows_keep_their_order_on_other_ranks(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert of_rank["rebalanced off"] < 1e-12
        without, after = of_rank["rebalanced changes"]
        assert without > 5 * after


def test_an_order_of_some_ranks_is_an_error_of_all(found: list[dict[str, Any]]) -> None:
    ranks, size = len(found), CLUSTERS * SIZE
    kinds = ", ".join([*["'cluster'"] * (ranks - 1), "None"])
    permutation = f"order must be a permutation of {size} nodes, got other numbers"
    for of_rank in found:
        assert of_rank["of some ranks"] == [
            f"order must be the same on all ranks, got {kinds}",
            permutation,
            permutation,
        ]


def test_a_wrong_order_is_an_error(found: list[dict[str, Any]]) -> None:
    size = CLUSTERS * SIZE
    for of_rank in found:
        assert of_rank["errors"] == [
            "order must be 'cluster', a permutation or None, got 'degree'",
            f"order must be a permutation of {size} nodes, got other numbers",
            f"order must be int64 [{size}], got torch.int64 of shape [{size - 1}]",
            "order: expected a Tensor, got 3",
            "order must be None for 2 types of nodes, got 'cluster'",
        ]
