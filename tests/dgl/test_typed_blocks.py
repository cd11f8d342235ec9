"""Blocks of graphs of several types, by our sampler and beside DGL's."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgraph
from tests.dgl.graphs import dgl
from tests.graphs import random_edges
from tests.sampling.test_layers import chi_square, limit

from dgl.dataloading import DataLoader, NeighborSampler  # isort: skip

pytestmark = pytest.mark.usefixtures("dgl_sampling")

NAME = "dgl.NeighborSampler"
SIZES = {"a": 40, "b": 60, "c": 9}
RELATIONS = (("a", "r", "b"), ("b", "s", "a"), ("b", "r", "b"), ("b", "t", "c"), ("c", "u", "b"))
SEEDS = {"b": torch.tensor([59, 3, 8, 17]), "a": torch.tensor([5, 0])}


def typed(dtype: torch.dtype = torch.int64) -> Any:
    edges = {
        kind: tuple(
            random_edges(SIZES[kind[0]], SIZES[kind[2]], 0 if "u" in kind else 300).to(dtype)
        )
        for kind in RELATIONS
    }
    g = dgl.heterograph(edges, SIZES)
    for name, size in SIZES.items():
        g.nodes[name].data["x"] = torch.arange(float(size))
    for kind in RELATIONS:
        g.edges[kind].data["w"] = torch.arange(float(g.num_edges(kind)))
    return g


def check(g: Any, seeds: dict[str, Tensor], hops: list[Any], found: Any) -> None:
    """Blocks hold edges of the graph with its features, and nodes of all types."""
    inputs, outputs, blocks = found
    assert outputs is seeds
    dst = {name: seeds.get(name, torch.empty(0, dtype=g.idtype)) for name in g.ntypes}
    for block, hop in zip(reversed(blocks), reversed(hops), strict=True):
        assert block.is_block and block.idtype == g.idtype
        assert block.srctypes == block.dsttypes == g.ntypes
        assert block.canonical_etypes == g.canonical_etypes
        src, came = block.srcdata[dgl.NID], {name: set[int]() for name in g.ntypes}
        for name in g.ntypes:
            assert torch.equal(block.dstdata[dgl.NID][name], dst[name])
            assert torch.equal(src[name][: len(dst[name])], dst[name])
            assert torch.equal(
                block.srcnodes[name].data["x"], g.nodes[name].data["x"][src[name].long()]
            )
            assert torch.equal(
                block.dstnodes[name].data["x"], g.nodes[name].data["x"][dst[name].long()]
            )
        for kind in g.canonical_etypes:
            ids = block.edges[kind].data[dgl.EID]
            assert len(ids.unique()) == len(ids)
            assert torch.equal(block.edges[kind].data["w"], g.edges[kind].data["w"][ids.long()])
            ends, here = g.find_edges(ids, etype=kind), block.edges(order="eid", etype=kind)
            assert torch.equal(src[kind[0]][here[0].long()], ends[0])
            assert torch.equal(dst[kind[2]][here[1].long()], ends[1])
            came[kind[0]].update(ends[0].tolist())
            fanout = hop if isinstance(hop, int) else hop[kind]
            degrees = g.in_degrees(dst[kind[2]], etype=kind)
            expected = degrees if fanout < 0 else degrees.clamp(max=fanout)
            assert torch.equal(block.in_degrees(etype=kind).long(), expected.long())
        for name in g.ntypes:
            assert set(src[name].tolist()) == {*dst[name].tolist(), *came[name]}
            assert len(src[name].unique()) == len(src[name])
        dst = src
    assert {name: nodes.tolist() for name, nodes in inputs.items()} == {
        name: nodes.tolist() for name, nodes in dst.items()
    }


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("formats", [("coo", "csr", "csc"), ("csc",)], ids=str)
@pytest.mark.parametrize(
    "seeds", [SEEDS, {"b": SEEDS["b"]}, {"c": torch.arange(3), "a": SEEDS["a"][:0]}], ids=str
)
def test_blocks(dtype: torch.dtype, formats: tuple[str, ...], seeds: dict[str, Tensor]) -> None:
    g = typed(dtype)
    restricted = g.formats(list(formats))
    if len(formats) > 1:
        restricted.create_formats_()
    seeds = {name: nodes.to(dtype) for name, nodes in seeds.items()}
    hops = [3, {kind: 2 + (i % 2) for i, kind in enumerate(RELATIONS)}, -1]
    sampler = NeighborSampler(hops)
    check(g, seeds, hops, sampler.sample_blocks(restricted, seeds))
    row = fastgraph.status().row(NAME)
    assert (row.routed, row.fell_back) == (1, 0)
    fastgraph.disable()
    check(g, seeds, hops, sampler.sample_blocks(restricted, seeds))


def test_edges_to_exclude() -> None:
    g = typed()
    excluded = {RELATIONS[0]: torch.arange(0, 300, 2), RELATIONS[2]: torch.arange(250)}
    blocks = NeighborSampler([3, -1]).sample_blocks(g, SEEDS, excluded)[2]
    for block in blocks:
        used = {name: set(range(block.num_dst_nodes(name))) for name in g.ntypes}
        for kind in RELATIONS:
            ids = block.edges[kind].data[dgl.EID]
            assert not torch.isin(ids, excluded.get(kind, ids[:0])).any()
            src, dst = block.edges(order="eid", etype=kind)
            ends = g.find_edges(ids, etype=kind)
            assert torch.equal(block.srcnodes[kind[0]].data[dgl.NID][src], ends[0])
            assert torch.equal(block.dstnodes[kind[2]].data[dgl.NID][dst], ends[1])
            used[kind[0]].update(src.tolist())
        for name, found in used.items():
            assert found == set(range(block.num_src_nodes(name)))
    assert fastgraph.status().row(NAME).routed == 1
    fastgraph.disable()
    theirs = NeighborSampler([-1]).sample_blocks(g, SEEDS, excluded)[2][0]
    for kind in RELATIONS:
        ours, whole = (b.edges[kind].data[dgl.EID].sort().values for b in (blocks[1], theirs))
        assert torch.equal(ours, whole)


def test_a_layer_computes_on_them_as_on_dgls() -> None:
    g, sampler = typed(), NeighborSampler([-1])
    outs = []
    for switch in (fastgraph.enable, fastgraph.disable):
        switch()
        block = sampler.sample_blocks(g, SEEDS)[2][0]
        torch.manual_seed(0)
        layer = dgl.nn.HeteroGraphConv(
            {kind[1]: dgl.nn.GraphConv(1, 4, allow_zero_in_degree=True) for kind in RELATIONS}
        ).double()
        x = {name: block.srcnodes[name].data["x"].double()[:, None] for name in g.ntypes}
        outs.append(layer(block, (x, {name: x[name][: block.num_dst_nodes(name)] for name in x})))
    torch.testing.assert_close(*outs)


def test_dgls_seed_repeats_them_and_replacement() -> None:
    g, sampler = typed(), NeighborSampler([4, 4], replace=True)

    def ids() -> list[list[int]]:
        blocks = sampler.sample_blocks(g, SEEDS)[2]
        return [b.edges[kind].data[dgl.EID].tolist() for b in blocks for kind in RELATIONS]

    dgl.seed(5)
    first = [ids(), ids()]
    dgl.seed(5)
    assert [ids(), ids()] == first and first[0] != first[1]
    block = sampler.sample_blocks(g, SEEDS)[2][1]
    degrees = g.in_degrees(SEEDS["b"], etype=RELATIONS[0])
    expected = torch.where(degrees > 0, 4, 0)
    assert torch.equal(block.in_degrees(etype=RELATIONS[0]).long(), expected)


NONE = dict(zip(RELATIONS, (3, 2, 0, 1, 0), strict=True))
OTHER = dict(zip(RELATIONS, (0, 2, 0, 4, -1), strict=True))


@pytest.mark.parametrize("fanouts", [[NONE], [2, OTHER], [NONE, 3, OTHER]], ids=["1", "2", "3"])
@pytest.mark.parametrize("seeds", [SEEDS, {"b": SEEDS["b"]}, {"c": torch.arange(3)}], ids=str)
def test_nothing_is_drawn_along_a_type(fanouts: list[Any], seeds: dict[str, Tensor]) -> None:
    g = typed()
    check(g, seeds, fanouts, NeighborSampler(fanouts).sample_blocks(g, seeds))
    row = fastgraph.status().row(NAME)
    assert (row.routed, row.fell_back) == (1, 0)
    fastgraph.disable()
    check(g, seeds, fanouts, NeighborSampler(fanouts).sample_blocks(g, seeds))


@pytest.mark.parametrize("kind", ["mask", "float32", "float64", "mixed"])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("is_excluding", [False, True])
def test_by_probabilities_or_a_mask(kind: str, replace: bool, is_excluding: bool) -> None:
    """Some types of edges have none, one has none that may be drawn."""
    g = typed()
    torch.manual_seed(1)
    kinds = ("float64", "mask", "float32") if kind == "mixed" else (kind,) * 3
    chances = {relation: torch.ones(g.num_edges(relation)) for relation in RELATIONS}
    for number, (relation, of_one) in enumerate(zip(RELATIONS[:3], kinds, strict=True)):
        found = torch.rand(300) * (torch.rand(300) > 0.4) * (number != 1)
        chances[relation] = found
        dtype = torch.bool if of_one == "mask" else getattr(torch, of_one)
        g.edges[relation].data["p"] = found.to(dtype)
    excluded = {RELATIONS[2]: torch.arange(0, 300, 3)} if is_excluding else None
    seeds = {"b": torch.randperm(60)[:50], "a": torch.arange(40), "c": torch.arange(9)}
    for fanout in (1, 4, -1, 60):
        name = {"mask": "p"} if kind == "mask" else {"prob": "p"}
        sampler = NeighborSampler([2, fanout], replace=replace, **name)
        drawn: list[dict[Any, Tensor]] = []
        for switch in (fastgraph.enable, fastgraph.disable):
            switch()
            _, _, (first, block) = sampler.sample_blocks(g, seeds, excluded)
            drawn.append({})
            for relation in RELATIONS:
                ids = block.edges[relation].data[dgl.EID]
                earlier = first.edges[relation].data[dgl.EID]
                assert bool((chances[relation][ids] > 0).all())
                assert bool((chances[relation][earlier] > 0).all())
                here, ends = block.edges(order="eid", etype=relation), g.find_edges(ids, relation)
                assert torch.equal(block.srcnodes[relation[0]].data[dgl.NID][here[0]], ends[0])
                assert torch.equal(block.dstnodes[relation[2]].data[dgl.NID][here[1]], ends[1])
                assert torch.equal(
                    block.edges[relation].data["w"], g.edges[relation].data["w"][ids]
                )
                assert replace or len(ids.unique()) == len(ids)
                drawn[-1][relation] = block.in_degrees(etype=relation)
        for relation in RELATIONS:
            ours, theirs = (one[relation] for one in drawn)
            is_left_to_chance = is_excluding and relation == RELATIONS[2] and fanout >= 0
            assert is_left_to_chance or torch.equal(ours, theirs)
    fastgraph.enable()
    row = fastgraph.status().row(NAME)
    assert (row.routed, row.fell_back) == (4, 0)


def test_inclusion_is_in_proportion_in_each_type() -> None:
    star = torch.stack([torch.arange(10), torch.zeros(10, dtype=torch.int64)])
    g = dgl.heterograph({("a", "r", "b"): tuple(star), ("b", "s", "b"): tuple(star)})
    chances = {"r": torch.arange(10.0), "s": torch.tensor([0.0, 3.0] * 5).double()}
    counts = {kind: torch.zeros(10, dtype=torch.float64) for kind in chances}
    for kind, values in chances.items():
        g.edges[kind].data["p"] = values
    sampler = NeighborSampler([1], prob="p")
    for _ in range(1500):
        block = sampler.sample_blocks(g, {"b": torch.tensor([0])})[2][0]
        for kind, count in counts.items():
            count[block.edges[kind].data[dgl.EID]] += 1
    for kind, count in counts.items():
        some = chances[kind] > 0
        assert not count[~some].any()
        expected = 1500 * chances[kind][some].double() / chances[kind].sum()
        assert chi_square(count[some], expected) < limit(int(some.sum()) - 1)


@pytest.mark.parametrize("wrong", [-1.0, float("nan")])
def test_probabilities_that_are_none_are_named(wrong: float) -> None:
    g = typed()
    g.edges[RELATIONS[1]].data["p"] = torch.full((300,), wrong)
    with pytest.raises(ValueError, match=f"prob must be at least 0 and finite .* got {wrong}"):
        NeighborSampler([2], prob="p").sample_blocks(g, SEEDS)


def test_inclusion_is_uniform_in_each_type() -> None:
    star = torch.stack([torch.arange(20), torch.zeros(20, dtype=torch.int64)])
    g = dgl.heterograph({("a", "r", "b"): tuple(star), ("b", "s", "b"): tuple(star)})
    counts = {kind: torch.zeros(20, dtype=torch.float64) for kind in g.canonical_etypes}
    for _ in range(1000):
        block = NeighborSampler([4]).sample_blocks(g, {"b": torch.tensor([0])})[2][0]
        for kind, count in counts.items():
            count[block.edges[kind].data[dgl.EID]] += 1
    for count in counts.values():
        assert chi_square(count, torch.full_like(count, 200.0)) < limit(19)


@pytest.mark.parametrize("seeds", [torch.arange(6), {"n": torch.arange(6)}], ids=["tensor", "dict"])
def test_one_type_of_nodes_and_two_of_edges(seeds: Any) -> None:
    edges = {("n", kind, "n"): tuple(random_edges(30, 30, 90)) for kind in ("p", "q")}
    g = dgl.heterograph(edges, {"n": 30})
    found = NeighborSampler([{"p": 1, "q": -1}]).sample_blocks(g, seeds)
    assert found[1] is seeds and torch.equal(found[0], found[2][0].srcdata[dgl.NID])
    degrees = g.in_degrees(torch.arange(6), etype="p").clamp(max=1)
    assert torch.equal(found[2][0].in_degrees(etype="p"), degrees)
    assert torch.equal(found[2][0].in_degrees(etype="q"), g.in_degrees(torch.arange(6), etype="q"))
    assert fastgraph.status().row(NAME).routed == 1


@pytest.mark.filterwarnings("ignore:Dataloader CPU affinity")
def test_a_loader() -> None:
    g, nodes = typed(), {"b": torch.arange(60), "a": torch.arange(40)}
    seen: dict[str, list[int]] = {"a": [], "b": []}
    for batch in DataLoader(g, nodes, NeighborSampler([2, 3]), batch_size=16, shuffle=True):
        check(g, batch[1], [2, 3], batch)
        for name, seeds in batch[1].items():
            seen[name] += seeds.tolist()
    assert {name: sorted(found) for name, found in seen.items()} == {
        name: found.tolist() for name, found in nodes.items()
    }
    assert fastgraph.status().row(NAME).fell_back == 0


@pytest.mark.parametrize(
    ("options", "seeds", "reason"),
    [
        ({"prob": "missing"}, SEEDS, "probabilities that edges do not have"),
        ({"mask": "x2"}, SEEDS, "neither one float nor one bool"),
        ({"fanouts": [dict.fromkeys(RELATIONS[1:], 2)]}, SEEDS, "fanouts of other types"),
        ({"fanouts": [{kind[1]: 2 for kind in RELATIONS}]}, SEEDS, "several types of edges have"),
        ({"fanouts": [dict.fromkeys(RELATIONS, 0)]}, SEEDS, "a fanout of 0 for all edges"),
        ({"fanouts": [{**NONE, RELATIONS[1]: 0}]}, SEEDS, "a fanout of 0 for all edges"),
        ({}, {"d": torch.arange(2)}, "seeds of no type"),
        ({}, torch.arange(2), "nobody has named"),
        ({}, {"b": torch.tensor([1, 1])}, "come twice"),
        ({}, {"b": torch.arange(0)}, "no seeds"),
    ],
)
def test_what_is_left_to_dgl(options: Any, seeds: Any, reason: str) -> None:
    g = typed()
    g.edges[RELATIONS[1]].data["x2"] = torch.ones(300, dtype=torch.int8)
    with contextlib.suppress(dgl.DGLError):  # that of a wrong call
        NeighborSampler(**{"fanouts": [2], **options}).sample_blocks(g, seeds)
    row = fastgraph.status().row(NAME)
    assert (row.routed, row.fell_back) == (0, 1)
    assert reason in next(iter(row.reasons))


def test_types_of_which_dgl_has_grouped_some_are_left_to_it() -> None:
    g = typed()
    g.in_degrees(etype=RELATIONS[0])
    g.adj_tensors("csc", etype=RELATIONS[0])
    NeighborSampler([2]).sample_blocks(g, SEEDS)
    assert "has grouped some" in next(iter(fastgraph.status().row(NAME).reasons))


def test_seeds_that_are_no_nodes_are_named() -> None:
    with pytest.raises(IndexError, match=r"seed_nodes\['c'\] must be in \[0, 9\), got 9"):
        NeighborSampler([2]).sample_blocks(typed(), {"c": torch.tensor([9])})
