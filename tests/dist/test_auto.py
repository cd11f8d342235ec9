"""The mode that nobody has asked for: what is chosen, when nothing is, and that runs agree."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from torch import nn

import fastgraph
import fastgraph.dist as fgd
from fastgraph.dist.operators import cost, links, planner
from fastgraph.dist.operators.cost import Cluster
from fastgraph.dist.operators.halo import exchange as overlap
from fastgraph.dist.ranks.world import WORLD
from tests.dist import test_fused, test_models
from tests.dist.graphs import NUM_EDGES, NUM_NODES, PARTITIONS, graph
from tests.dist.test_overlap import ring

D, H, C = 8, 4, 2

BY_BYTES = Cluster(latency=0.0, bandwidth=1.0, work=0.0, sums=0.0)
"""Ranks to which nothing takes time but what they send."""


@contextlib.contextmanager
def planned(ranks: Cluster | None, **changes: Any) -> Iterator[None]:
    """Even small graphs, by ranks of which this is known."""
    with pytest.MonkeyPatch.context() as patch, fastgraph.enabled():
        patch.setattr(cost, "LEAST_BYTES", 0)
        patch.setattr(planner, "_said", set())
        patch.setattr(links, "KNOWN", {} if ranks is None else {WORLD.size: ranks})
        for name, value in changes.items():
            patch.setattr(links, name, value)
        yield


def shard(data: Any, **options: Any) -> Any:
    return fgd.shard(data, parts=PARTITIONS["uneven"](WORLD.size), **options)


def small() -> dict[str, Any]:
    """The bytes sent in the default mode, and by halo."""
    found: dict[str, Any] = {}
    with fastgraph.enabled():
        for name, options in {"halo": {"mode": "halo"}, "usual": {}}.items():
            data = shard(graph(), **options)
            of_layers = [test_models.train(layer, data).losses for layer in ("GAT", "GCN")]
            fgd.COUNTS.reset()
            of_layers += [test_models.train(layer, data).losses for layer in ("GCN", "GAT")]
            found[name] = of_layers, fgd.COUNTS.calls.copy(), fgd.COUNTS.sent.copy()
        found["counted"] = set(fgd.COUNTS.attention)
    return found | {"measured": dict(links.KNOWN)}


def runs() -> list[Any]:
    """A training, and the same one started again, which must not measure anew."""
    found = []

    def measure() -> Cluster:
        raise AssertionError("measured again")

    for changes in ({}, {"measure": measure}):
        with planned(None, **changes):
            run = test_models.train("Transformer", shard(graph()))
            found.append((run, links.of_ranks()))
    return found


def others() -> dict[str, Any]:
    """Attention among nodes without near ones, to which heads send less, if there is memory."""
    torch.manual_seed(1)
    given = graph()
    given.edge_index = torch.randint(NUM_NODES, (2, 10 * NUM_EDGES))
    del given.edge_attr, given.edge_weight
    layer = nn.ModuleList([gnn.TransformerConv(D, C, H)])
    expected = layer[0](given.x, given.edge_index).detach()
    found: dict[str, Any] = {}

    def result(data: Any) -> tuple[str, list[str]]:
        fgd.COUNTS.reset()
        out = fgd.whole(layer[0](data.x, data.edge_index).detach())
        return test_fused.difference([expected], [out]), list(fgd.COUNTS.attention)

    with planned(BY_BYTES):
        data = shard(given)
        found["before"] = result(data)
        fgd.rebalance(data, weights=[2, *[1] * (WORLD.size - 1)], method="even")
        found["moved"] = result(data)
    with planned(BY_BYTES._replace(memory=32.0)), contextlib.redirect_stderr(io.StringIO()) as said:
        found["no memory"] = result(shard(given))
    with planned(BY_BYTES):
        case, by = test_fused.CASES["GATv2, pair"], PARTITIONS["uneven"](WORLD.size)
        found["pair"] = test_fused.compared(case, test_fused.bipartite, test_fused.shards(by)).error
    return found | {"said": said.getvalue()}


def overlapping() -> tuple[dict[str, int], dict[str, int]]:
    """A halo that was chosen travels while others would."""
    data = fgd.shard(ring(), parts=torch.arange(90) * WORLD.size // 90)
    fgd.COUNTS.reset()
    with planned(BY_BYTES), pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "LEAST_BYTES", 0)
        gnn.GCNConv(6, 6)(data.x, data.edge_index).sum().backward()
    return dict(fgd.COUNTS.aggregation), dict(fgd.COUNTS.halo)


def on_this_rank() -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    WORLD.random = "exact"
    return {
        "small": small(),
        "runs": runs(),
        "others": others(),
        "overlapping": overlapping(),
    }


@pytest.fixture(scope="module")
def found(world_size: int, once_on_ranks: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = once_on_ranks(on_this_rank, world_size)
    return found


def test_small_layers_are_by_halo_and_cost_nothing(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        small = of_rank["small"]
        assert small["usual"] == small["halo"]
        assert small["usual"][1]["all_to_all"] > 0
        assert small["counted"] == {"halo: small"} and not small["measured"]


def test_a_run_that_is_started_again_has_the_same_bits(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        (first, ranks), (second, again) = of_rank["runs"]
        assert first.losses == second.losses and ranks == again
        assert all(map(torch.equal, first.state, second.state))
        assert ranks == found[0]["runs"][0][1]


def test_layers_are_computed_as_is_fastest(found: list[dict[str, Any]]) -> None:
    chosen = "heads: fastest" if len(found) > 2 else "halo: fastest"
    for rank, of_rank in enumerate(found):
        others = of_rank["others"]
        assert others["before"] == others["moved"] == ("", [chosen])
        assert others["no memory"] == ("", ["halo: fastest"]) and others["pair"] == ""
        assert ("beyond halo's is no memory" in others["said"]) == (rank == 0)


def test_a_halo_that_was_chosen_travels_meanwhile(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        sums, halo = of_rank["overlapping"]
        assert sums == {"halo: fastest": 1} and halo == {"rows without the halo": 1}
