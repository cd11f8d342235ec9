"""Predictions of a step: numbers of rows, the model of cost, and forecasts for more devices."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastgraph.dist.forecast.dry_run import Step
from fastgraph.dist.forecast.forecast import forecasts, larger_distribution, partition_distribution
from fastgraph.dist.graphs.partition import partition
from fastgraph.dist.operators import cost
from fastgraph.dist.operators.cost import (
    Cluster,
    Cost,
    Distribution,
    Layer,
    RowOperand,
)
from fastgraph.dist.operators.grid.cost import on_grid
from fastgraph.dist.operators.halo.cost import by_halo
from fastgraph.dist.operators.heads.cost import by_heads
from fastgraph.dist.operators.modes import BY_NAME
from fastgraph.dist.ranks import mesh as meshes_of

ANY = Cluster(1e-5, 1e9, 1e-9, 1e-9)


def transformer(channels: int, heads: int, item: int = 4) -> Layer:
    """Queries, keys and values of one layer."""
    x = torch.empty(1, heads, channels // heads, dtype={2: torch.half, 4: torch.float}[item])
    shapes = [("destinations", "heads", "channels"), *[("sources", "heads", "channels")] * 2]
    given = [x.clone().requires_grad_() for _ in range(3)]
    return cost.attention_layer(shapes, given, heads)


def even(nodes: int, edges: int, halo: int, ranks: int) -> Distribution:
    """As many of everything on each rank."""
    own = [nodes // ranks] * ranks
    meshes = dict.fromkeys(meshes_of.meshes(ranks), edges // ranks)
    return Distribution(own, own, [edges // ranks] * ranks, [halo] * ranks, [halo] * ranks, meshes)


def mesh(side: int) -> Tensor:
    """The edges of a square mesh, both ways."""
    at = torch.arange(side * side).view(side, side)
    pairs = [(at[1:], at[:-1]), (at[:, 1:], at[:, :-1])]
    ends = torch.cat([torch.stack([a.flatten(), b.flatten()]) for a, b in pairs], 1)
    return torch.cat([ends, ends.flip(0)], 1)


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_heads_send_less_beyond_so_many_rows_of_a_halo(ranks: int) -> None:
    layer, nodes = transformer(128, 64), 6400
    limit = 2 * (ranks - 1) / ranks * nodes / ranks
    for halo, fewer in ((math.floor(limit) - 1, "halo"), (math.ceil(limit) + 1, "heads")):
        rows = even(nodes, 10 * nodes, halo, ranks)
        modes = {"halo": by_halo(layer, rows, ANY), "heads": by_heads(layer, rows, ANY)}
        assert min(modes, key=lambda name: modes[name].sent) == fewer


def test_volumes() -> None:
    layer, rows = transformer(128, 8), even(800, 8000, 30, 4)
    forward_and_back = 2 * 128 * 4  # bytes of a row
    assert by_halo(layer, rows, ANY).sent == forward_and_back * 2 * 30
    found = by_heads(layer, rows, ANY)
    assert found is not None and found.sent == forward_and_back * 4 * 800 // 4 * 3 // 4
    # Of queries 3 of 4 rows are sent for one that is replicated over a row of the grid, ...
    grid = on_grid(layer, rows._replace(blocks={(2, 2): 2000}), ANY)
    statistics = 8 * 4  # bytes of one for each head of a row
    assert grid is not None and grid.mesh == (2, 2)
    assert grid.sent == 200 * (forward_and_back * 4 + 3 * statistics)
    many = even(800, 8000, 30, 16)
    grid = on_grid(layer, many._replace(blocks={(4, 4): 500}), ANY)
    assert grid is not None and grid.messages < by_halo(layer, many, ANY).messages


def test_uneven_heads_are_more_work() -> None:
    rows = even(600, 6000, 5, 3)
    fitting, uneven = (by_heads(transformer(12, heads), rows, ANY) for heads in (3, 4))
    assert fitting is not None and uneven is not None
    assert fitting.work == by_halo(transformer(12, 3), rows, ANY).work == 2000 * 12
    assert uneven.work == 6000 * 2 * 3
    assert by_heads(transformer(12, 1), rows, ANY) is None


def test_latency_counts() -> None:
    few, many = Cost(4, 12, 0.0, 1.0), Cost(9, 27, 0.0, 1.0)
    layer, without = transformer(12, 3), ANY._replace(latency=0.0)
    assert layer.seconds(few, ANY) < layer.seconds(many, ANY)
    assert layer.seconds(many, without) == layer.seconds(few, without)


def test_rows_are_those_that_edges_need() -> None:
    torch.manual_seed(0)
    ends = torch.stack([torch.randint(30, (90,)), torch.randint(20, (90,))])
    sources, destinations = torch.randint(3, (30,)), torch.randint(3, (20,))
    found = partition_distribution(ends, sources, destinations, 3)
    needed = {
        (int(destinations[target]), int(source))
        for source, target in ends.T.tolist()
        if sources[source] != destinations[target]
    }
    for rank in range(3):
        assert found.receives[rank] == sum(at == rank for at, _ in needed)
        assert found.sends[rank] == sum(int(sources[source]) == rank for _, source in needed)
        assert found.edges[rank] == int((destinations[ends[1]] == rank).sum())
    assert found.blocks[3, 1] == max(found.edges)


def test_halos_of_a_mesh_go_on_as_they_went() -> None:
    pytest.importorskip("pymetis")
    side = 64
    edges, known = mesh(side), {}
    for ranks in (8, 16, 64):
        owner = partition(edges, side * side, ranks)
        known[ranks] = partition_distribution(edges, owner, owner, ranks)
    measured = known.pop(64)
    found = larger_distribution(known, 64)
    assert max(found.receives) == pytest.approx(max(measured.receives), rel=0.2)
    assert sum(found.sources) == side * side and len(found.sources) == 64
    assert max(found.edges) == pytest.approx(max(measured.edges), rel=0.1)


def test_what_is_shared_is_shared_by_more() -> None:
    """Four ranks on two cores work half as fast as two, and eight a quarter; links stay."""
    known = {2: Cluster(1e-4, 2e7, 1e-9, 1e-9), 4: Cluster(1e-4, 2e7, 2e-9, 1e-9)}
    assert cost.extrapolated_cluster(known, 8)[:4] == pytest.approx((1e-4, 2e7, 4e-9, 1e-9))
    known[4] = known[4]._replace(memory=2.0**33, paces=(1.0,) * 4)
    assert cost.extrapolated_cluster(known, 8)[4:] == (2.0**33, ())
    with pytest.raises(ValueError, match="two numbers of ranks or more"):
        cost.extrapolated_cluster({2: ANY}, 8)


def test_nothing_is_expected_to_get_faster() -> None:
    known = {2: Cluster(1e-4, 1e7, 1e-9, 1e-9), 4: Cluster(5e-5, 2e7, 1e-9, 1e-9)}
    assert cost.extrapolated_cluster(known, 8)[:4] == pytest.approx(known[4][:4])


def test_forecasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pymetis")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    layer = transformer(64, 8)._replace(work=1e-9)
    edges = mesh(40)
    calls = [("TransformerConv", layer, 0)] * 2
    step = Step([(edges, 1600, 1600)], calls, [], rest=0.5, saved=1600, parameters=[400])
    devices = [8, 1, 16, 2, 32, 2]
    one, *others = forecasts(step, ANY, devices, seconds=0.0)
    assert [one.devices, *(found.devices for found in others)] == [1, 2, 8, 16, 32]
    work = 2 * edges.shape[1] * 64 * 1e-9
    assert one.auto.seconds == pytest.approx(3 * (0.5 + work)) and one.auto.sent == 0
    for fewer, more in itertools.pairwise([one, *others]):
        assert fewer.auto.seconds > more.auto.seconds
    assert [found.has_extrapolated_halos for found in others] == [False, False, False, True]
    for found in others:
        assert found.auto.seconds <= min(total.seconds for total in found.modes.values())
        # A mesh has few rows of a halo.
        assert found.modes["heads"].sent > found.modes["halo"].sent
    (again,) = forecasts(step, ANY, [8])
    assert again == others[1]  # by the rows that are kept
    random = torch.randint(1600, (2, 50_000), generator=torch.Generator().manual_seed(0))
    step = step._replace(graphs=[(random, 1600, 1600)])
    for memory, layers in ((math.inf, ["heads"] * 2), (2**20, ["grid"] * 2)):
        (found,) = forecasts(step, ANY._replace(memory=memory), [8])
        assert found.auto.layers == layers  # heads hold all edges


# anemoi-core, pull request 366: seconds of a training step of a weather model with graph
# transformers as encoder and decoder, by heads and by edges, which is by halo. N320 has 542,080
# points (arXiv 2406.01465) and an octahedral grid of n latitudes 4 n (n + 9); the hidden grid of
# N320 is O96. Assumed: a hidden grid of O320 for O1280; 1,024 channels, 16 heads, two bytes; three
# hidden nodes for each point in the decoder, points within 0.6 spacings of a hidden node in the
# encoder; consecutive points, as bands of latitudes, on each GPU; four A100 in a node, whose
# all-to-all reaches 100 GB/s, and 12.5 GB/s of InfiniBand for each between nodes.
PUBLISHED = {
    "n320": (542_080, 4 * 96 * 105, 4, 100e9, 0.6948, 0.6341),
    "o1280": (4 * 1280 * 1289, 4 * 320 * 329, 16, 12.5e9, 4.7438, 3.6075),
}


def mapper(ends: int, hidden: int, ranks: int, *, is_encoder: bool) -> tuple[Layer, Distribution]:
    """One of the two layers between points and the hidden grid."""
    spacing = math.sqrt(4 * math.pi / hidden)  # on a sphere with a radius of 1
    reach = (0.6 if is_encoder else 1.0) * spacing
    edges = round(ends * (math.pi * 0.6**2 if is_encoder else 3))
    sources, destinations = (ends, hidden) if is_encoder else (hidden, ends)
    strip = round(sources * reach / 2)  # along one border of a band, at the equator
    halos = [strip if rank in (0, ranks - 1) else 2 * strip for rank in range(ranks)]
    rows = Distribution(
        [sources // ranks] * ranks,
        [destinations // ranks] * ranks,
        [edges // ranks] * ranks,
        halos,
        halos,
        {},
    )
    row = 1024 * 2
    places = ("destinations", "sources", "sources", "edges")
    operands = tuple(RowOperand(place, True, row, True, i) for i, place in enumerate(places))
    return Layer(operands, 16, 64, row), rows


@pytest.mark.parametrize("grid", PUBLISHED)
def test_weather_models_want_halos(grid: str) -> None:
    points, hidden, ranks, bandwidth, heads, edges = PUBLISHED[grid]
    machine = Cluster(2e-5, bandwidth, 1e-12, 1e-12)
    seconds = {"halo": 0.0, "heads": 0.0}
    for is_encoder in (True, False):
        layer, rows = mapper(points, hidden, ranks, is_encoder=is_encoder)
        for name in seconds:
            mode = BY_NAME[name].cost(layer, rows, machine)
            assert mode is not None
            seconds[name] += layer.seconds(mode, machine)
    gain = seconds["heads"] - seconds["halo"]
    # All else in a step is alike. Bandwidths are assumed, and what overlaps is not modelled.
    assert (heads - edges) / 3 < gain < 3 * (heads - edges)


@pytest.mark.parametrize("degree", [50, 500])
def test_long_sequences_with_dense_attention_want_heads(degree: int) -> None:
    """As in TorchGT (SC 2024): 64 k tokens, 64 channels in 8 heads, 8 GPUs on PCIe 4."""
    tokens, ranks = 2**16, 8
    outside = tokens - tokens // ranks
    # Of a graph that nothing is known of: rows that none of the edges of a rank starts from.
    halo = round(outside * (1 - (1 - 1 / tokens) ** (degree * tokens // ranks)))
    rows = even(tokens, degree * tokens, halo, ranks)
    machine = Cluster(3e-5, 1.2e10, 5e-12, 5e-12)
    layer = transformer(64, 8)
    seconds = {}
    for name in ("halo", "heads"):
        mode = BY_NAME[name].cost(layer, rows, machine)
        assert mode is not None
        seconds[name] = layer.seconds(mode, machine)
    assert cost.fastest(seconds) == "heads"


def test_work_is_that_of_the_slowest_rank() -> None:
    rows = even(800, 8000, 30, 2)._replace(edges=[6000, 2000])
    layer, machine = transformer(64, 8), ANY._replace(paces=(0.25, 1.0))
    assert by_halo(layer, rows, ANY).work == 6000 * 64
    assert by_halo(layer, rows, machine).work == 2000 * 64
    shared = [by_heads(layer, rows, one) for one in (ANY, machine)]
    assert [mode and mode.work for mode in shared] == [4000 * 64] * 2


def test_a_mode_needs_memory() -> None:
    layer, modes = transformer(64, 8), {"halo": Cost(0, 0, 9.0, 9.0, memory=100.0)}
    modes["heads"] = Cost(0, 0, 1.0, 1.0, memory=200.0)
    for memory, name in ((math.inf, "heads"), (3200.0, "heads"), (3199.0, "halo")):
        assert cost.chosen(layer, modes, ANY._replace(memory=memory)) == name
    modes["heads"] = modes["heads"]._replace(memory=50.0)
    assert cost.chosen(layer, modes, ANY._replace(memory=1.0)) == "heads"


def test_small_layers_send_and_compute_little() -> None:
    layer = transformer(64, 8)
    row = 2 * 64 * 4  # of keys and values
    assert cost.is_small(layer, 8, 2**16 // row - 1, 2**16 // 64 - 1)
    assert not cost.is_small(layer, 8, 2**16 // row, 0)
    assert not cost.is_small(layer, 8, 0, 2**16 // 64)
    assert not cost.is_small(layer, 9, 0, 0)
    rows = even(800, 8000, 30, 4)._replace(edges=[1000, 3000, 2000, 2000])
    assert (rows.busiest, rows.excess) == (60, 1000)


def test_the_simpler_of_modes_that_take_as_much() -> None:
    assert cost.fastest({"halo": 1.0, "heads": 0.97, "grid": 0.96}) == "halo"
    assert cost.fastest({"halo": 1.0, "heads": 0.92, "grid": 0.9}) == "heads"
    assert cost.fastest({"grid": 0.0}) == "grid"


def test_devices_work_at_their_own_pace() -> None:
    line = {2: 1.0, 4: 2.0, 8: 4.0}
    for at, expected in itertools.chain(line.items(), [(16, 8.0)]):
        assert cost.line(line, at) == pytest.approx(expected)
    assert cost.line({2: 2.0, 4: 1.0}, 64) == 0.5  # not below half of what was seen
