"""Walks, subgraphs, relabelling, negatives and clusters beside plain Python."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from fastgraph.sampling import (
    cluster,
    negative_sample,
    random_walk,
    subgraph,
    unique_and_compact,
)
from tests.sampling.oracle import random_columns

DTYPES = [
    (torch.int64, torch.int64),
    (torch.int32, torch.int32),
    (torch.int64, torch.int32),
    (torch.int32, torch.int64),
]


@pytest.fixture
def graph():
    return random_columns(40, 40, 300, torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("pointer", "index"), DTYPES)
@pytest.mark.parametrize(("p", "q"), [(1.0, 1.0), (0.5, 2.0)])
@pytest.mark.parametrize("length", [0, 1, 7])
def test_walks_follow_edges_and_stay_where_none_leads_on(graph, pointer, index, p, q, length):
    rowptr, col = graph.colptr.to(pointer), graph.row.to(index)
    seed = torch.arange(40).repeat(3).to(index)
    nodes, edges = random_walk(
        rowptr, col, seed, length, p=p, q=q, return_edge_id=True, random_seed=1
    )
    assert edges is not None
    assert (nodes.dtype, edges.dtype) == (index, pointer)
    assert torch.equal(nodes[:, 0], seed)
    assert nodes.shape == (120, length + 1)
    before, after = nodes[:, :-1].long(), nodes[:, 1:].long()
    stays = edges < 0
    degree = graph.colptr.diff()
    assert torch.equal(stays, degree[before] == 0)
    assert torch.equal(before[stays], after[stays])
    taken = edges[~stays].long()
    assert torch.equal(graph.dst[taken], before[~stays])
    assert torch.equal(graph.row[taken], after[~stays])
    alone, none = random_walk(rowptr, col, seed, length, p=p, q=q, random_seed=1)
    assert none is None
    assert torch.equal(alone, nodes)


@pytest.mark.parametrize("threads", [2, 4])
def test_walks_and_negatives_are_the_same_on_any_number_of_threads(graph, threads):
    def drawn():
        walk = random_walk(graph.colptr, graph.row, torch.arange(40).repeat(50), 9, p=2, q=0.5)[0]
        return walk, negative_sample(graph.colptr, graph.row, 3000)

    before = torch.get_num_threads()
    results = []
    for count in (1, threads):
        torch.set_num_threads(count)
        torch.manual_seed(3)
        results.append(drawn())
    torch.set_num_threads(before)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize(("pointer", "index"), DTYPES)
@pytest.mark.parametrize("nodes", [[], [20], [20, 3, 20, 0, 7], list(range(39, -1, -1))])
def test_a_subgraph_has_the_edges_between_its_nodes(graph, pointer, index, nodes):
    rowptr, col, edge = subgraph(
        graph.colptr.to(pointer), graph.row.to(index), torch.tensor(nodes, dtype=index)
    )
    assert edge is not None
    assert (rowptr.dtype, col.dtype, edge.dtype) == (pointer, index, pointer)
    expected, starts = [], [0]
    for node in nodes:
        for e in range(int(graph.colptr[node]), int(graph.colptr[node + 1])):
            if int(graph.row[e]) in nodes:
                expected.append((nodes.index(int(graph.row[e])), e))
        starts.append(len(expected))
    assert rowptr.tolist() == starts
    assert list(zip(col.tolist(), edge.tolist(), strict=True)) == expected
    named = torch.tensor(nodes, dtype=index)
    none = subgraph(graph.colptr.to(pointer), graph.row.to(index), named, return_edge_id=False)
    assert none[2] is None


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("largest", [10, 2**22, 2**31 - 1])
def test_distinct_values_are_numbered_as_they_come(dtype, largest):
    generator = torch.Generator().manual_seed(0)
    ids = [
        torch.randint(largest - 9, largest, (size,), generator=generator).to(dtype)
        for size in (0, 1, 30, 200)
    ]
    unique, positions = unique_and_compact(ids)
    expected = list(dict.fromkeys(torch.cat(ids).tolist()))
    assert unique.tolist() == expected
    assert unique.dtype == dtype
    for given, found in zip(ids, positions, strict=True):
        assert found.dtype == dtype
        assert torch.equal(unique[found.long()], given)


@pytest.mark.parametrize(("pointer", "index"), DTYPES)
def test_negatives_are_no_edges_and_no_loops(graph, pointer, index):
    rowptr, col = graph.colptr.to(pointer), graph.row.to(index)
    src, dst = negative_sample(rowptr, col, 500, random_seed=1)
    assert src.dtype == index
    edges = set(zip(graph.row.tolist(), graph.dst.tolist(), strict=True))
    pairs = set(zip(src.tolist(), dst.tolist(), strict=True))
    assert not pairs & edges
    assert not any(a == b for a, b in pairs)
    assert len(src) == 500


def test_a_complete_graph_has_no_negatives():
    colptr = torch.tensor([0, 2, 4])
    row = torch.tensor([0, 1, 0, 1])
    assert negative_sample(colptr, row, 10, num_src=2).shape == (2, 0)
    assert negative_sample(colptr, row, 0).shape == (2, 0)


@pytest.mark.skipif(importlib.util.find_spec("pymetis") is None, reason="needs pymetis")
@pytest.mark.parametrize("recursive", [False, True])
def test_clusters_cut_few_edges(recursive):
    """Four groups of nodes with many edges within and few between."""
    generator = torch.Generator().manual_seed(0)
    group = torch.arange(80) % 4
    dst = torch.randint(80, (1200,), generator=generator).sort().values
    src = group[dst] + 4 * torch.randint(20, (1200,), generator=generator)
    src[::40] = torch.randint(80, (30,), generator=generator)
    colptr = torch.zeros(81, dtype=torch.int64)
    colptr[1:] = torch.bincount(dst, minlength=80).cumsum(0)
    parts = cluster(colptr, src, 4, recursive=recursive)
    assert parts.dtype == torch.int64
    assert len(torch.stack([group, parts]).unique(dim=1).t()) == 4


def test_clusters_of_little():
    none = torch.empty(0, dtype=torch.int64)
    assert cluster(torch.tensor([0]), none, 3).tolist() == []
    assert cluster(torch.tensor([0, 0, 0]), none, 1).tolist() == [0, 0]
    assert cluster(torch.zeros(5).long(), none, 2).tolist() == [0, 0, 1, 1]
    assert len(set(cluster(torch.zeros(3).long(), none, 5).tolist())) == 2
