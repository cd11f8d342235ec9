"""Aggregations of features that stay the same are kept by all ranks, until something is edited."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GraphConv, SAGEConv

import fastgraph
import fastgraph.dist as fgd
from fastgraph.dist.graphs.pyg import shard_as_known
from fastgraph.dist.tensor.layout import only_here
from fastgraph.layers import constant
from tests.dist.comparing import deviation
from tests.dist.graphs import NUM_FEATURES, PARTITIONS, graph

TOLERANCE = 1e-12

D = NUM_FEATURES


def edited(data: Data) -> list[Tensor]:
    """The results of steps between which there are edits, and those without."""
    torch.manual_seed(0)
    mean, total = SAGEConv(D, D), GraphConv(D, D)
    seen = []

    def step() -> None:
        seen.append(mean(data.x, data.edge_index))
        seen.append(total(data.x, data.edge_index, data.edge_weight))
        sum(out.square().mean() for out in seen[-2:]).backward()

    def steps() -> None:
        for _ in range(3):
            step()

    steps()
    data.x[3] += 1
    steps()
    data.edge_weight[7] = 5
    steps()
    data.edge_index[0, 5] = 2
    steps()
    data.x = data.x * 2
    steps()
    with torch.inference_mode():
        steps_of_inference = [mean(data.x, data.edge_index) for _ in range(3)]
    steps()
    with torch.no_grad():
        seen[-2].add_(1)  # which nobody else has
    steps()
    return [*(out.detach() for out in seen), *steps_of_inference, *gradients(mean, total)]


def gradients(*layers: torch.nn.Module) -> list[Tensor]:
    found = [p.grad for layer in layers for p in layer.parameters()]
    return [grad for grad in found if grad is not None]


def edited_where_torch_does_not_count(make: Callable[[Data], Data]) -> list[Tensor]:
    given, layer = graph(), SAGEConv(D, D)
    x, index = given.x, given.edge_index
    data, seen = make(given), []
    with torch.no_grad():
        layer.lin_l.weight.fill_(0.5)
        layer.lin_r.weight.fill_(0.25)
        for edit in (
            lambda: None,
            lambda: x.numpy()[:, 2].fill(3),
            lambda: x.data[5].mul_(2),
            lambda: index.numpy()[:, 9].fill(1),
        ):
            edit()
            seen += [layer(data.x, data.edge_index) for _ in range(3)]
    return seen


def collectives_of(layer: torch.nn.Module, data: Data) -> list[dict[str, int]]:
    found = []
    for _ in range(4):
        fgd.COUNTS.reset()
        layer(data.x, data.edge_index)
        found.append(dict(fgd.COUNTS.calls))
    return found


def difference(found: list[Tensor], expected: list[Tensor]) -> str:
    if len(found) != len(expected):
        return f"{len(found)} values for {len(expected)}"
    texts = (deviation(fgd.whole(a), b, TOLERANCE) for a, b in zip(found, expected, strict=True))
    return "; ".join(f"value {i} {text}" for i, text in enumerate(texts) if text)


def compare_on_this_rank() -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    found: dict[str, Any] = {}
    with fastgraph.enabled(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(constant, "_LEAST_GATHERED", 0)
        world = fgd.init()
        for name, parts in PARTITIONS.items():
            for mode in ("halo", "grid"):
                data = fgd.shard(graph(), parts=parts(world.size), mode=mode)
                found[f"{name}, {mode}"] = difference(edited(data), edited(graph()))
        with only_here():
            torch.manual_seed(0)
            expected = edited_where_torch_does_not_count(lambda data: data)
            torch.manual_seed(0)
            take = lambda data: shard_as_known(data, method="even")  # noqa: E731
            found["not counted"] = difference(edited_where_torch_does_not_count(take), expected)
        data = fgd.shard(graph(), mode="halo")
        with torch.no_grad():
            found["calls"] = collectives_of(SAGEConv(D, D), data)
            room = {"cache_bytes": 0} if world.rank == 1 else {}
            with fastgraph.enabled(**room):
                data = fgd.shard(graph(), mode="halo")
                found["calls without room"] = collectives_of(SAGEConv(D, D), data)
    return found


@pytest.fixture(scope="module")
def found(world_size: int, once_on_ranks: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = once_on_ranks(compare_on_this_rank, world_size)
    return found


@pytest.mark.parametrize("mode", ["halo", "grid"])
@pytest.mark.parametrize("layout", PARTITIONS)
def test_edits_are_seen(found: list[dict[str, Any]], layout: str, mode: str) -> None:
    for of_rank in found:
        assert not of_rank[f"{layout}, {mode}"]


def test_edits_that_torch_does_not_count_are_seen(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert not of_rank["not counted"]


def test_all_ranks_keep_a_result_or_none_does(found: list[dict[str, Any]]) -> None:
    """They ask each other once."""
    for of_rank in found:
        _, second, *later = of_rank["calls without room"]
        assert second == {"all_to_all": 1, "all_reduce": 1}
        assert later == [{"all_to_all": 1}, {"all_to_all": 1}]


def test_what_is_kept_sends_nothing(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        first, second, *later = of_rank["calls"]
        assert first["all_to_all"] >= 1
        assert second == {"all_to_all": 1, "all_reduce": 1}  # whether all ranks have room for it
        assert later == [{}, {}]
