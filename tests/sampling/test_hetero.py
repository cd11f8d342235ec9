"""Samples of several types of edges beside the definition."""

from __future__ import annotations

import pytest
import torch

from fastgraph.sampling import hetero_neighbor_sample
from tests.sampling.oracle import Call, check, random_columns

SIZES = {"paper": 20, "author": 12, "venue": 5}
RELATIONS = {
    ("author", "writes", "paper"): 70,
    ("paper", "cites", "paper"): 60,
    ("paper", "by", "author"): 50,
    ("venue", "shows", "paper"): 30,  # no edges lead to venues
}


def academic(generator: torch.Generator):
    return {
        relation: random_columns(SIZES[relation[0]], SIZES[relation[2]], size, generator)
        for relation, size in RELATIONS.items()
    }


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("directed", [True, False])
@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("temporal", ["", "node", "edge", "both"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("seeds", [("paper",), ("author", "paper"), ("venue", "author"), ()])
def test_a_sample_is_what_the_definition_allows(
    replace, directed, disjoint, temporal, weighted, seeds
):
    generator = torch.Generator().manual_seed(1)
    graph = academic(generator)
    fanouts = {relation: [3, 2, 1] for relation in graph}
    fanouts["paper", "cites", "paper"] = [0, -1, 2]
    call = Call(
        graph,
        {kind: torch.randint(SIZES[kind], (4,), generator=generator) for kind in seeds}
        or {"paper": torch.empty(0, dtype=torch.int64)},
        fanouts,
        replace=replace,
        directed=directed,
        disjoint=disjoint or bool(temporal),
    )
    if temporal in ("node", "both"):
        call.node_time["author"] = torch.randint(5, (12,), generator=generator)
        columns = graph["author", "writes", "paper"]
        parts = columns.row.split(columns.colptr.diff().tolist())
        columns.row = torch.cat([part[call.node_time["author"][part].argsort()] for part in parts])
    if temporal in ("edge", "both"):
        columns = graph["paper", "by", "author"]
        times = torch.randint(5, (50,), generator=generator)
        parts = times.split(columns.colptr.diff().tolist())
        columns.time = torch.cat([part.sort().values for part in parts])
    if temporal:
        call.seed_time = {
            kind: torch.randint(5, (len(nodes),), generator=generator)
            for kind, nodes in call.seed.items()
        }
    if weighted:
        graph["author", "writes", "paper"].weight = torch.rand(70, generator=generator)
    check(call, call.run(3))


def test_one_list_of_fanouts_is_for_all_types():
    graph = academic(torch.Generator().manual_seed(1))
    call = Call(graph, {"paper": torch.tensor([3, 4])}, {r: [2, 3] for r in graph})
    ours = hetero_neighbor_sample(
        {r: c.colptr for r, c in graph.items()},
        {r: c.row for r, c in graph.items()},
        call.seed,
        [2, 3],
        random_seed=5,
        num_nodes={"venue": 5},
    )
    theirs = call.run(5)
    for relation in graph:
        assert torch.equal(ours.edge[relation], theirs.edge[relation])


def test_large_samples_are_the_same_on_few_and_on_many_threads():
    generator = torch.Generator().manual_seed(2)
    sizes = {"a": 2000, "b": 700}
    graph = {
        (src, "to", dst): random_columns(sizes[src], sizes[dst], 20_000, generator)
        for src in sizes
        for dst in sizes
    }
    call = Call(graph, {"a": torch.arange(300)}, {r: [8, 8] for r in graph})
    before = torch.get_num_threads()
    samples = []
    for threads in (1, 2, 4, 5, 8):
        torch.set_num_threads(threads)
        samples.append(call.run(1))
    torch.set_num_threads(before)
    check(call, samples[0])
    for other in samples[1:]:
        for relation in graph:
            assert torch.equal(samples[0].row[relation], other.row[relation])
            assert torch.equal(samples[0].edge[relation], other.edge[relation])
        for kind in sizes:
            assert torch.equal(samples[0].node[kind], other.node[kind])


def test_without_types_of_edges():
    sample = hetero_neighbor_sample({}, {}, {"a": torch.tensor([4, 2])}, {})
    assert sample.node["a"].tolist() == [4, 2]
    assert sample.num_sampled_nodes == {"a": [2]}
    assert sample.row == {}


def test_types_that_lack_something_are_named():
    graph = academic(torch.Generator().manual_seed(1))
    colptr = {r: c.colptr for r, c in graph.items()}
    row = {r: c.row for r, c in graph.items()}
    seed = {"paper": torch.tensor([0])}
    relation = ("venue", "shows", "paper")
    with pytest.raises(ValueError, match=r"row must have every type.*venue"):
        hetero_neighbor_sample(colptr, {r: v for r, v in row.items() if r != relation}, seed, [1])
    with pytest.raises(ValueError, match=r"num_neighbors must have every type.*venue"):
        hetero_neighbor_sample(colptr, row, seed, {r: [1] for r in colptr if r != relation})
    with pytest.raises(ValueError, match="as many hops everywhere"):
        hetero_neighbor_sample(colptr, row, seed, {r: [1] * (1 + (r == relation)) for r in colptr})
    with pytest.raises(IndexError, match=r"seed\['paper'\] holds node 20 at position 1"):
        hetero_neighbor_sample(colptr, row, {"paper": torch.tensor([0, 20])}, [1])
    with pytest.raises(IndexError, match=r"row\[\('venue', 'shows', 'paper'\)\] holds node"):
        hetero_neighbor_sample(
            colptr, row, {"paper": torch.arange(20)}, [-1], num_nodes={"venue": 1}
        )
    with pytest.raises(ValueError, match=r"seed_time\['paper'\] must be given"):
        hetero_neighbor_sample(
            colptr, row, seed, [1], disjoint=True, node_time={"venue": torch.zeros(5).long()}
        )
    with pytest.raises(ValueError, match=r"node_time\['paper'\] must have shape \[20\]"):
        hetero_neighbor_sample(
            colptr, row, seed, [1], disjoint=True, node_time={"paper": torch.zeros(5).long()}
        )
    counts = colptr | {relation: colptr[relation][:-1].clone()}
    with pytest.raises(ValueError, match=r"colptr\[\('venue', 'shows', 'paper'\)\] must have one"):
        hetero_neighbor_sample(counts, row, seed, [1])
