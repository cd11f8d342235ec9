"""Blocks of ``dgl.dataloading.NeighborSampler`` by our sampler, beside DGL's."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgraph
from tests.dgl.graphs import dgl, graph
from tests.graphs import random_edges
from tests.sampling.test_layers import chi_square, limit

from dgl.dataloading import (  # isort: skip
    DataLoader,
    MultiLayerFullNeighborSampler,
    NeighborSampler,
    as_edge_prediction_sampler,
)

pytestmark = pytest.mark.usefixtures("dgl_sampling")

NAME = "dgl.NeighborSampler"


@pytest.fixture
def threads() -> Any:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_unless_it_is_asked_for_blocks_are_dgls(
    monkeypatch: pytest.MonkeyPatch, threads: Any
) -> None:
    monkeypatch.delenv("FASTGRAPH_DGL_SAMPLING")
    threads(1)  # each of DGL's threads draws from a generator of its own, on rows that vary
    g, drawn = whole(), []
    for switch in (fastgraph.disable, fastgraph.enable):
        switch()
        dgl.seed(3)
        drawn.append(NeighborSampler([2, 3]).sample_blocks(g, torch.arange(20))[0])
    assert torch.equal(*drawn)
    assert NAME not in {row.layer for row in fastgraph.status().rows}


def whole(dtype: torch.dtype = torch.int64) -> Any:
    edges = torch.cat([random_edges(100, 100, 900), torch.stack([torch.arange(100)] * 2)], dim=1)
    made = graph(edges[:, edges[1] != 7].to(dtype), 100)  # one node has no edges
    made.ndata["x"] = torch.arange(100.0)
    made.edata["w"] = torch.arange(float(made.num_edges()))
    return made


def check(g: Any, seeds: Tensor, fanouts: list[int], replace: bool, found: Any) -> None:
    """Blocks hold edges of the graph, as many as they should, with its features."""
    inputs, outputs, blocks = found
    assert torch.equal(outputs, seeds) and torch.equal(inputs, blocks[0].srcdata[dgl.NID])
    dst = seeds
    for block, fanout in zip(reversed(blocks), reversed(fanouts), strict=True):
        assert block.is_block and block.idtype == g.idtype
        assert torch.equal(block.dstdata[dgl.NID], dst)
        src = block.srcdata[dgl.NID]
        assert torch.equal(src[: len(dst)], dst) and len(src.unique()) == len(src)
        ids = block.edata[dgl.EID]
        ends = g.find_edges(ids)
        here = block.edges(order="eid")
        assert torch.equal(src[here[0].long()], ends[0])
        assert torch.equal(dst[here[1].long()], ends[1])
        assert set(src.tolist()) == {*dst.tolist(), *ends[0].tolist()}
        assert torch.equal(block.edata["w"], g.edata["w"][ids.long()])
        assert torch.equal(block.srcdata["x"], g.ndata["x"][src.long()])
        assert torch.equal(block.dstdata["x"], g.ndata["x"][dst.long()])
        degrees = g.in_degrees(dst)
        if replace and fanout >= 0:
            expected = torch.where(degrees > 0, fanout, 0)
        else:
            expected = degrees if fanout < 0 else degrees.clamp(max=fanout)
            assert len(ids.unique()) == len(ids)
        assert torch.equal(block.in_degrees().long(), expected.long())
        dst = src


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("formats", [("coo", "csr", "csc"), ("csc",)], ids=str)
def test_blocks(dtype: torch.dtype, replace: bool, formats: tuple[str, ...]) -> None:
    g = whole(dtype)
    restricted = g.formats(list(formats))
    seeds = torch.tensor([99, 7, 0, 50], dtype=dtype)
    fanouts = [2, -1, 3]
    sampler = NeighborSampler(fanouts, replace=replace)
    found = sampler.sample_blocks(restricted, seeds)
    check(g, seeds, fanouts, replace, found)
    assert fastgraph.status().row(NAME).routed == 1
    fastgraph.disable()
    theirs = sampler.sample_blocks(restricted, seeds)
    check(g, seeds, fanouts, replace, theirs)
    for ours, block in zip(found[2], theirs[2], strict=True):
        for kind in ("srcdata", "dstdata", "edata"):
            assert set(getattr(ours, kind)) == set(getattr(block, kind))


def test_all_neighbours() -> None:
    g = whole()
    seeds = torch.arange(40)
    sampler = MultiLayerFullNeighborSampler(2)
    ours = sampler.sample_blocks(g, seeds)[2]
    check(g, seeds, [-1, -1], False, sampler.sample_blocks(g, seeds))
    fastgraph.disable()
    for a, b in zip(ours, sampler.sample_blocks(g, seeds)[2], strict=True):
        assert sorted(a.edata[dgl.EID].tolist()) == sorted(b.edata[dgl.EID].tolist())


def test_dgls_seed_repeats_them_on_any_number_of_threads(threads: Any) -> None:
    g, sampler = whole(), NeighborSampler([3, 3])

    def edges(number: int) -> list[list[int]]:
        threads(number)
        dgl.seed(5)
        drawn = [sampler.sample_blocks(g, torch.arange(60))[2] for _ in range(2)]
        return [block.edata[dgl.EID].tolist() for blocks in drawn for block in blocks]

    first = edges(1)
    assert first[:2] != first[2:]
    assert all(edges(number) == first for number in (2, 4))
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    edges(1)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("fanouts", [[3], [3, 3]], ids=str)
def test_few_seeds_are_sampled_on_any_number_of_threads(
    threads: Any, count: int, fanouts: list[int]
) -> None:
    threads(count)
    g = graph(random_edges(2000, 2000, 9000), 2000)
    NeighborSampler(fanouts).sample_blocks(g, torch.arange(5))
    row = fastgraph.status().row(NAME)
    assert (row.routed, row.fell_back) == (1, 0)


def test_inclusion_is_uniform() -> None:
    g = graph(torch.stack([torch.arange(30), torch.zeros(30, dtype=torch.int64)]), 30)
    counts = torch.zeros(30, dtype=torch.float64)
    for _ in range(1500):
        block = NeighborSampler([4]).sample_blocks(g, torch.tensor([0]))[2][0]
        counts[block.edata[dgl.EID]] += 1
    assert chi_square(counts, torch.full_like(counts, 200.0)) < limit(29)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("form", ["tensor", "dict", "nothing", "all", "searched"])
def test_edges_to_exclude(dtype: torch.dtype, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """DGL leaves them out of those that were drawn, and nodes that only they lead from."""
    if form == "searched":
        monkeypatch.setattr("fastgraph.dgl.blocks._MOST_MARKS", 0)
    g, seeds = whole(dtype), torch.tensor([99, 7, 0, 50], dtype=dtype)
    torch.manual_seed(2)
    excluded: Any = torch.randperm(g.num_edges())[:500].to(dtype)
    if form in ("nothing", "all"):
        excluded = torch.arange(0 if form == "nothing" else g.num_edges()).to(dtype)
    given = {("_N", "_E", "_N"): excluded} if form == "dict" else excluded
    rest = dgl.remove_edges(g, excluded.long() if dtype == torch.int64 else excluded)
    full = NeighborSampler([-1, -1])
    ours = full.sample_blocks(g, seeds, given)
    check(rest, seeds, [-1, -1], False, renumbered(ours, rest))
    fastgraph.disable()
    theirs = full.sample_blocks(g, seeds, given)
    for a, b in zip(ours[2], theirs[2], strict=True):
        assert sorted(a.srcdata[dgl.NID].tolist()) == sorted(b.srcdata[dgl.NID].tolist())
    fastgraph.enable()
    for block in NeighborSampler([2, 3]).sample_blocks(g, seeds, given)[2]:
        assert not torch.isin(block.edata["w"], g.edata["w"][excluded.long()]).any()
        rows = block.edges()[0]
        used = {*rows.tolist(), *range(block.num_dst_nodes())}
        assert used == set(range(block.num_src_nodes()))
        assert torch.equal(block.edata["w"], g.edata["w"][block.edata[dgl.EID].long()])
    assert fastgraph.status().row(NAME).routed == 2


def renumbered(found: Any, g: Any) -> Any:
    """The same blocks, with the numbers that edges have in a graph that has some of them."""
    order = g.edata["w"].argsort()
    for block in found[2]:
        places = torch.searchsorted(g.edata["w"][order], block.edata["w"])
        block.edata[dgl.EID] = order[places].to(g.idtype)
    return found


def test_as_many_edges_are_left_where_some_are_excluded_as_by_dgl() -> None:
    g = graph(torch.stack([torch.arange(10), torch.zeros(10, dtype=torch.int64)]), 10)
    sampler, drawn = NeighborSampler([4]), torch.zeros(5, dtype=torch.float64)
    for _ in range(2100):
        block = sampler.sample_blocks(g, torch.tensor([0]), torch.arange(5))[2][0]
        drawn[block.num_edges()] += 1
    expected = 2100 / 210 * torch.tensor([5.0, 50, 100, 50, 5], dtype=torch.float64)
    assert chi_square(drawn, expected) < limit(4)  # hypergeometric


FORMATS = [("coo", "csr", "csc"), ("csc",)]


@pytest.mark.parametrize("kind", ["mask", "float32", "float64"])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("formats", FORMATS, ids=str)
@pytest.mark.parametrize("share", [0.6, 0.0])
def test_by_probabilities_or_a_mask(
    kind: str, replace: bool, formats: tuple[str, ...], share: float
) -> None:
    """Edges of no chance are never drawn, and all others where there are too few."""
    g = whole()
    torch.manual_seed(1)
    chances = (torch.rand(g.num_edges()) + 0.1) * (torch.rand(g.num_edges()) >= share)
    is_mask = kind == "mask"
    g.edata["p"] = chances > 0 if is_mask else chances.to(getattr(torch, kind))
    degrees = torch.zeros(100, dtype=torch.int64).index_add_(0, g.edges()[1], (chances > 0).long())
    ends, g = g.edges(), g.formats(list(formats))
    seeds = torch.randperm(100)[:80]
    for fanout in (1, 4, -1, 60):
        sampler = NeighborSampler(
            [3, fanout], replace=replace, **({"mask": "p"} if is_mask else {"prob": "p"})
        )
        drawn = []
        for switch in (fastgraph.enable, fastgraph.disable):
            switch()
            _, _, (first, block) = sampler.sample_blocks(g, seeds)
            ids = block.edata[dgl.EID]
            assert bool((chances[ids] > 0).all()) and bool(
                (chances[first.edata[dgl.EID]] > 0).all()
            )
            here = block.edges(order="eid")
            assert torch.equal(block.srcdata[dgl.NID][here[0]], ends[0][ids])
            assert torch.equal(block.dstdata[dgl.NID][here[1]], ends[1][ids])
            assert torch.equal(block.edata["p"], g.edata["p"][ids])
            drawn.append(block.in_degrees())
            assert replace or len(ids.unique()) == len(ids)
        assert torch.equal(*drawn)
        if not replace and fanout >= 0:
            assert torch.equal(drawn[0], degrees[seeds].clamp(max=fanout))
    fastgraph.enable()
    assert fastgraph.status().row(NAME).routed == 4


@pytest.mark.parametrize("replace", [False, True])
def test_inclusion_is_in_proportion_to_probabilities(replace: bool) -> None:
    g = graph(torch.stack([torch.arange(10), torch.zeros(10, dtype=torch.int64)]), 10)
    g.edata["p"] = torch.arange(10.0)
    counts, sampler = torch.zeros(10, dtype=torch.float64), NeighborSampler([1], prob="p")
    sampler.replace = replace
    for _ in range(2000):
        counts[sampler.sample_blocks(g, torch.tensor([0]))[2][0].edata[dgl.EID]] += 1
    assert counts[0] == 0
    expected = 2000 * g.edata["p"][1:].double() / g.edata["p"].sum()
    assert chi_square(counts[1:], expected) < limit(8)


def test_edits_of_a_mask_are_seen() -> None:
    """Also those that torch does not count, and where it is another graph's, too."""
    g, h = (graph(torch.tensor([[0, 1, 2], target]), 3) for target in ([0, 0, 0], [1, 1, 1]))
    mask = torch.tensor([True, False, False])
    g.edata["m"] = h.edata["m"] = mask
    sampler = NeighborSampler([-1], mask="m")

    def drawn(g: Any, seed: int) -> list[int]:
        ids: Tensor = sampler.sample_blocks(g, torch.tensor([seed]))[2][0].edata[dgl.EID]
        return sorted(ids.tolist())

    for _ in range(2):
        assert drawn(g, 0) == [0] and drawn(g, 1) == []
        assert drawn(h, 1) == [0] and drawn(h, 0) == []
    mask[1] = True
    assert drawn(g, 0) == [0, 1]
    mask.numpy()[2] = True
    assert drawn(g, 0) == [0, 1, 2]
    g.edata["m"] = ~mask
    assert drawn(g, 0) == []
    assert fastgraph.status().row(NAME).fell_back == 0


def test_edits_of_probabilities_that_nobody_counts_are_seen() -> None:
    g = whole()
    with torch.inference_mode():
        g.edata["p"] = torch.ones(g.num_edges())
        for kept in (g.num_edges(), 50):
            g.edata["p"][kept:] = 0
            _, _, [block] = NeighborSampler([-1], prob="p").sample_blocks(g, torch.arange(100))
            assert block.num_edges() == kept
    _, _, [block] = NeighborSampler([-1], prob="p").sample_blocks(g, torch.arange(100))
    assert block.num_edges() == 50


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_probabilities_that_are_none_are_named(wrong: float) -> None:
    g = whole()
    g.edata["p"] = torch.ones(g.num_edges())
    g.edata["p"][5] = wrong
    with pytest.raises(ValueError, match=f"prob must be at least 0 and finite .* got {wrong}"):
        NeighborSampler([2], prob="p").sample_blocks(g, SEEDS)


@pytest.mark.filterwarnings("ignore:Dataloader CPU affinity")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader(workers: int) -> None:
    g = whole()
    batches = DataLoader(
        g, torch.arange(100), NeighborSampler([2, 3]), batch_size=30, num_workers=workers
    )
    found = sorted(batches, key=lambda batch: int(batch[1][0]))  # workers have every second one
    assert len(found) == 4
    for i, batch in enumerate(found):
        check(g, torch.arange(100)[i * 30 : i * 30 + 30], [2, 3], False, batch)


@pytest.mark.filterwarnings("ignore:Dataloader CPU affinity")
def test_edges_to_predict_are_excluded() -> None:
    g = whole()
    sampler = as_edge_prediction_sampler(NeighborSampler([-1]), exclude="self")
    for _, pairs, blocks in DataLoader(g, torch.arange(300), sampler, batch_size=100):
        assert not torch.isin(blocks[0].edata[dgl.EID], pairs.edata[dgl.EID]).any()
        ends = blocks[0].dstdata[dgl.NID]
        assert blocks[0].num_edges() > 300 and pairs.num_nodes() == len(ends)
    row = fastgraph.status().row(NAME)
    assert (row.routed, row.fell_back) == (3, 0)


SEEDS = torch.arange(5)


@pytest.mark.parametrize(
    ("options", "seeds", "excluded", "reason"),
    [
        ({"edge_dir": "out"}, SEEDS, None, "sampling of outgoing edges"),
        ({"prob": "missing"}, SEEDS, None, "probabilities that edges do not have"),
        ({"mask": "x2"}, SEEDS, None, "neither one float nor one bool"),
        ({}, SEEDS, {"_E": SEEDS}, "edges to exclude of no type"),
        ({}, SEEDS, SEEDS[:, None], "edges to exclude that are no numbers"),
        ({}, {"_N": SEEDS}, None, "seeds is a dict"),
        ({}, SEEDS[:0], None, "no seeds"),
    ],
)
def test_what_is_left_to_dgl(options: Any, seeds: Any, excluded: Any, reason: str) -> None:
    g = whole()
    g.edata["x2"] = torch.ones(g.num_edges(), dtype=torch.int8)
    with contextlib.suppress(dgl.DGLError):  # that of a wrong call
        NeighborSampler([2], **options).sample_blocks(g, seeds, excluded)
    row = fastgraph.status().row(NAME)
    assert (row.routed, row.fell_back) == (0, 1)
    assert reason in next(iter(row.reasons))


def test_a_fanout_of_none_is_left_to_dgl() -> None:
    NeighborSampler([2, 0]).sample_blocks(whole(), SEEDS)
    assert "a fanout of 0" in next(iter(fastgraph.status().row(NAME).reasons))


@pytest.mark.parametrize("wrong", [100, -1])
def test_seeds_that_are_no_nodes_are_named(wrong: int) -> None:
    """DGL reads beyond its memory."""
    with pytest.raises(IndexError, match=rf"seed_nodes must be in \[0, 100\), got {wrong}"):
        NeighborSampler([2]).sample_blocks(whole(), torch.tensor([3, wrong]))
