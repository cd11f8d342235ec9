"""Samples beside the definition, for all options that decide which edges may be drawn."""

from __future__ import annotations

import pytest
import torch

from fastgraph.sampling import NeighborSample, neighbor_sample
from tests.sampling.oracle import EDGE, NODE, Call, as_hetero, check, random_columns

FANOUTS = ([3, 2], [-1], [0, 2], [2, 0, 2], [5, -1], [], [40, 1])
"""With more than there are, none, all, and more than are drawn abreast."""


@pytest.fixture(params=[1, 2, 8])  # few and many number nodes in other ways
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def sampled(call: Call, random_seed: int = 5, **options) -> NeighborSample:
    graph = call.graph[EDGE]
    return neighbor_sample(
        graph.colptr,
        graph.row,
        call.seed[NODE],
        call.fanouts[EDGE],
        node_time=call.node_time.get(NODE),
        edge_time=graph.time,
        seed_time=call.seed_time.get(NODE),
        edge_weight=graph.weight,
        replace=call.replace,
        directed=call.directed,
        disjoint=call.disjoint,
        temporal_strategy=call.temporal_strategy,
        random_seed=random_seed,
        **options,
    )


def assert_same(a: NeighborSample, b: NeighborSample) -> None:
    for name, of_a, of_b in zip(a._fields, a, b, strict=True):
        same = torch.equal(of_a, of_b) if isinstance(of_a, torch.Tensor) else of_a == of_b
        assert same, name


I32, I64 = torch.int32, torch.int64
KINDS = ("", "disjoint", "node time", "last by node time", "edge time", "last by edge time")


@pytest.mark.parametrize("fanouts", FANOUTS)
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("directed", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "dtypes",
    [(I64, I64, None), (I32, I32, torch.float32), (I64, I32, None), (I32, I64, torch.float64)],
)
def test_a_sample_is_what_the_definition_allows(fanouts, replace, directed, kind, dtypes):
    for seeds in ([], [3], [7, 7, 2, 7], list(range(15))):
        call = drawn_call(seeds, fanouts, replace, directed, kind, dtypes)
        sample = sampled(call)
        check(call, as_hetero(sample))
        assert sample.row.dtype == sample.col.dtype == sample.node.dtype == dtypes[1]
        assert sample.edge is not None
        assert sample.edge.dtype == dtypes[0]
        assert bool((sample.col.diff() >= 0).all())


def drawn_call(seeds, fanouts, replace, directed, kind, dtypes) -> Call:
    pointer, index, weight = dtypes
    generator = torch.Generator().manual_seed(3)
    graph = random_columns(15, 15, 120, generator)
    call = Call(
        {EDGE: graph},
        {NODE: torch.tensor(seeds, dtype=index)},
        {EDGE: fanouts},
        replace=replace,
        directed=directed,
        disjoint=bool(kind),
        temporal_strategy="last" if "last" in kind else "uniform",
    )
    if "node" in kind:
        call.node_time[NODE] = torch.randint(4, (15,), generator=generator)  # with ties
        by_time = [
            part[call.node_time[NODE][part].argsort(stable=True)]
            for part in graph.row.split(graph.colptr.diff().tolist())
        ]
        graph.row = torch.cat(by_time)
    if "edge" in kind:
        times = torch.randint(9, (120,), generator=generator)
        parts = times.split(graph.colptr.diff().tolist())
        graph.time = torch.cat([part.sort().values for part in parts])
        call.seed_time[NODE] = torch.randint(9, (len(seeds),), generator=generator)
    if weight is not None:
        graph.weight = torch.randint(3, (120,), generator=generator).to(weight)
    graph.colptr, graph.row = graph.colptr.to(pointer), graph.row.to(index)
    return call


@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("replace", [False, True])
def test_large_samples_are_the_same_on_any_number_of_threads(threads, disjoint, replace):
    generator = torch.Generator().manual_seed(0)
    graph = random_columns(3000, 3000, 60_000, generator)
    call = Call(
        {EDGE: graph},
        {NODE: torch.randint(3000, (400,), generator=generator)},
        {EDGE: [15, 7]},
        replace=replace,
        disjoint=disjoint,
    )
    sample = sampled(call)
    torch.set_num_threads(1)
    assert_same(sample, sampled(call))
    if threads == 8:
        check(call, as_hetero(sample))
    call.directed = False
    alone = sampled(call)
    torch.set_num_threads(threads)
    assert_same(sampled(call), alone)


def test_ids_beyond_an_array_give_the_same_sample():
    """Nodes are numbered by an array in small graphs and by a table in large ones."""
    generator = torch.Generator().manual_seed(0)
    graph = random_columns(500, 500, 9000, generator)
    call = Call({EDGE: graph}, {NODE: torch.arange(0, 500, 3)}, {EDGE: [6, 4]})
    small = sampled(call)
    num_nodes = (1 << 22) + 5
    rest = graph.colptr[-1:].expand(num_nodes - 500)
    graph.colptr = torch.cat([graph.colptr, rest])
    assert_same(sampled(call), small)


def test_torch_seeds_repeat_samples_and_differ():
    graph = random_columns(100, 100, 3000, torch.Generator().manual_seed(0))

    def sample():
        return neighbor_sample(graph.colptr, graph.row, torch.arange(50), [4, 4])

    torch.manual_seed(7)
    first, second = sample(), sample()
    torch.manual_seed(7)
    assert_same(first, sample())
    assert first.edge.tolist() != second.edge.tolist()
    explicit = [
        neighbor_sample(graph.colptr, graph.row, torch.arange(50), [4], random_seed=s).edge.tolist()
        for s in (-(2**63), 2**63 - 1, 0, 2**32)
    ]
    assert len({tuple(edges) for edges in explicit}) == 4


def test_samples_of_the_hub_of_a_large_graph():
    """More edges than 16 bits number, by each of the ways to draw."""
    num_edges = 70_000
    colptr = torch.tensor([0, num_edges, num_edges])
    row = torch.ones(num_edges, dtype=torch.int64)
    for fanout in (5, 100, 30_000):
        for replace in (False, True):
            sample = neighbor_sample(
                colptr, row, torch.tensor([0]), [fanout], replace=replace, random_seed=fanout
            )
            edge = sample.edge
            assert len(edge) == fanout
            assert len(edge.unique()) == fanout or replace
            assert int(edge.max()) < num_edges
            if fanout > 5:
                assert int(edge.max()) > 65_536
                assert abs(float(edge.double().mean()) / num_edges - 0.5) < 0.1


def test_without_edge_ids():
    graph = random_columns(10, 10, 60, torch.Generator().manual_seed(0))
    sample = neighbor_sample(graph.colptr, graph.row, torch.tensor([5]), [2], return_edge_id=False)
    assert sample.edge is None


def test_tensors_that_are_not_contiguous_are_refused_or_taken():
    graph = random_columns(10, 10, 60, torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="row must be contiguous"):
        neighbor_sample(graph.colptr, graph.row.repeat_interleave(2)[::2], torch.tensor([5]), [2])
