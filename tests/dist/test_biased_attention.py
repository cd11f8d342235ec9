"""Attention with a bias on sharded tensors, by every mode, beside one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.utils import softmax

import fastgraph.dist as fgd
from fastgraph import ops
from fastgraph.dist.operators.modes import BY_NAME
from fastgraph.dist.ranks.world import WORLD
from tests.dist.graphs import NUM_EDGES, NUM_NODES, PARTITIONS
from tests.dist.test_fused import HALVES, Found, by_halves, of_operator, shards


def biased(d: Any, **options: Any) -> Tensor:
    """The output, to which what comes of the weights is added."""
    inputs = [d.x.view(-1, 2, 4) + i for i in range(3)]
    out, alpha, _ = ops.attention(*inputs, d.edge_index, need_weights=True, **options)
    assert alpha is not None
    return out + (alpha * d.edge_attr[:, :2]).sum(0).mean()


def with_dropout(d: Any) -> Tensor:
    """By the formula where there is one process: there, operators drop by other numbers."""
    bias = d.edge_attr[:, :2]
    if isinstance(d.x, fgd.ShardedTensor):
        return biased(d, bias=bias, dropout=0.4)
    query, key, value = (d.x.view(-1, 2, 4) + i for i in range(3))
    src, dst = d.edge_index
    score = (query[dst] * key[src]).sum(-1) / 2 + bias
    alpha = nn.functional.dropout(softmax(score, dst, num_nodes=NUM_NODES), 0.4)
    out = torch.zeros_like(query).index_add(0, dst, alpha.unsqueeze(-1) * value[src])
    return out + (alpha * bias).sum(0).mean()


CALLS: dict[str, Callable[[Any], Tensor]] = {
    "of edges": lambda d: biased(d, bias=d.edge_attr[:, :2]),
    "hidden edges": lambda d: biased(
        d, bias=d.edge_attr[:, :2].masked_fill((d.edge_attr < 0.5)[:, :2], -torch.inf)
    ),
    "a table": lambda d: biased(
        d,
        bias=d.x.sum(0).view(4, 2),  # so that the gradient of the table is looked at
        bias_index=(4 * d.edge_attr[:, 0].detach()).to(torch.uint8),
    ),
    "types that are whole": lambda d: biased(
        d,
        bias=torch.arange(8.0).view(4, 2).sin(),
        bias_index=torch.arange(NUM_EDGES) % 4,
        transpose=True,
    ),
    "dropout": with_dropout,
}


def compare_on_this_rank() -> dict[str, Found]:
    torch.set_default_dtype(torch.float64)
    WORLD.random = "exact"
    found = {}
    for (layout, parts), mode in itertools.product(PARTITIONS.items(), BY_NAME):
        by_halves(HALVES[layout])
        shard = shards(parts(WORLD.size), mode=mode)
        for name, call in CALLS.items():
            found[f"{name}, {layout}, {mode}"] = of_operator(call, shard)
    return found


@pytest.fixture(scope="module")
def found(world_size: int, once_on_ranks: Any) -> list[dict[str, Found]]:
    results: list[dict[str, Found]] = once_on_ranks(compare_on_this_rank, world_size)
    return results


@pytest.mark.parametrize("mode", BY_NAME)
@pytest.mark.parametrize("layout", PARTITIONS)
@pytest.mark.parametrize("name", CALLS)
def test_ranks_have_what_one_process_has(
    found: list[dict[str, Found]], name: str, layout: str, mode: str
) -> None:
    for rank, of_rank in enumerate(found):
        result = of_rank[f"{name}, {layout}, {mode}"]
        assert not result.error, f"rank {rank}: {result.error}"
        assert not result.gathers
