"""How often edges are drawn, by chi-square tests of samples with fixed seeds."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from fastgraph.sampling import negative_sample, neighbor_sample, random_walk

TRIALS = 20_000


def assert_as_expected(count: Tensor, probability: Tensor) -> None:
    """Counts of independent trials are not further from these than in one of ten million cases."""
    total = int(count.sum())
    expected = probability * total
    assert bool((count[probability == 0] == 0).all())
    kept = probability > 0
    statistic = float(((count[kept] - expected[kept]) ** 2 / expected[kept]).sum())
    # The cube root of chi-square is nearly normal (Wilson and Hilferty, PNAS 1931).
    freedom = int(kept.sum()) - 1
    spread = 2 / (9 * freedom)
    assert ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread) < 5.2


def drawn(degree: int, fanout: int, weight: Tensor | None = None, **options) -> Tensor:
    """The places of the edges that each of many nodes with as many edges draws."""
    colptr = torch.arange(TRIALS + 1) * degree
    row = torch.zeros(TRIALS * degree, dtype=torch.int64)
    sample = neighbor_sample(
        colptr,
        row,
        torch.arange(TRIALS),
        [fanout],
        edge_weight=None if weight is None else weight.repeat(TRIALS),
        random_seed=degree * 100 + fanout,
        **options,
    )
    assert sample.edge is not None
    return (sample.edge % degree).view(TRIALS, -1)


@pytest.mark.parametrize(("degree", "fanout"), [(5, 2), (6, 5), (7, 1), (40, 33), (100, 20)])
def test_each_edge_is_as_likely_as_another(degree, fanout):
    edges = drawn(degree, fanout)
    assert bool((edges.sort(1).values.diff(dim=1) > 0).all())
    # Counts of one sample depend on each other, which makes the statistic smaller.
    count = torch.bincount(edges.flatten(), minlength=degree)
    assert_as_expected(count, torch.full((degree,), 1 / degree))


@pytest.mark.parametrize(("degree", "fanout"), [(5, 2), (6, 3), (4, 3)])
def test_each_set_of_edges_is_as_likely_as_another(degree, fanout):
    sets = (1 << drawn(degree, fanout)).sum(1)
    possible = [sum(1 << e for e in one) for one in itertools.combinations(range(degree), fanout)]
    count = torch.tensor([int((sets == one).sum()) for one in possible])
    assert int(count.sum()) == TRIALS
    assert_as_expected(count, torch.full((len(possible),), 1 / len(possible)))


@pytest.mark.parametrize("fanout", [2, 50])
def test_draws_with_replacement_are_independent(fanout):
    edges = drawn(5, fanout, replace=True)
    pairs = edges[:, 0] * 5 + edges[:, 1]
    assert_as_expected(torch.bincount(pairs, minlength=25), torch.full((25,), 1 / 25))
    last = edges[:, -2] * 5 + edges[:, -1]
    assert_as_expected(torch.bincount(last, minlength=25), torch.full((25,), 1 / 25))


WEIGHT = torch.tensor([1.0, 0.0, 3.0, 0.5, 2.5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_by_weight_with_replacement(dtype):
    edges = drawn(5, 3, WEIGHT.to(dtype), replace=True)
    of_one = WEIGHT / WEIGHT.sum()
    for d in range(3):
        assert_as_expected(torch.bincount(edges[:, d], minlength=5), of_one)


def test_draws_by_weight_without_replacement():
    edges = drawn(5, 2, WEIGHT)
    of_one = WEIGHT / WEIGHT.sum()
    # The second is drawn among those that are left.
    pairs = of_one[:, None] * WEIGHT / (WEIGHT.sum() - WEIGHT)[:, None]
    pairs.fill_diagonal_(0)
    count = torch.bincount(edges[:, 0] * 5 + edges[:, 1], minlength=25)
    assert_as_expected(count, pairs.flatten())


def test_hops_and_relations_draw_differently():
    """Nodes with as many edges draw other ones in the next hop, and for other seeds."""
    degree, length = 8, 5
    colptr = torch.arange(length * TRIALS // 4 + 1) * degree
    row = (torch.arange(len(colptr) - 1) + TRIALS // 4).clamp(max=len(colptr) - 2)
    row = row.repeat_interleave(degree)
    sample = neighbor_sample(
        colptr, row, torch.arange(TRIALS // 4), [1, 1], random_seed=0, replace=True
    )
    first, second = (sample.edge % degree).split(TRIALS // 4)
    count = torch.bincount(first * degree + second, minlength=degree**2)
    assert_as_expected(count, torch.full((degree**2,), 1 / degree**2))


def graph_of(edges: list[tuple[int, int]], num_nodes: int) -> tuple[Tensor, Tensor]:
    source, target = torch.tensor(sorted(edges)).t().contiguous()
    counts = torch.bincount(source, minlength=num_nodes)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]), target


@pytest.mark.parametrize(("p", "q"), [(1.0, 1.0), (0.25, 4.0), (4.0, 0.25), (1e9, 1e9)])
def test_steps_of_walks(p, q):
    """From 0 by 1: back to 0, to 2, a neighbour of 0, or to 3 and 4, which are not."""
    edges = [(0, 1), (0, 2), (1, 0), (1, 2), (1, 3), (1, 4), (2, 0), (3, 1), (4, 1)]
    rowptr, col = graph_of(edges, 5)
    nodes, _ = random_walk(
        rowptr, col, torch.zeros(2 * TRIALS, dtype=torch.int64), 2, p=p, q=q, random_seed=1
    )
    third = nodes[nodes[:, 1] == 1, 2]
    weight = torch.tensor([1 / p, 0.0, 1.0, 1 / q, 1 / q], dtype=torch.float64)
    if p > 1e6:
        assert bool((third == 2).all())
    else:
        assert_as_expected(torch.bincount(third, minlength=5), weight / weight.sum())


def test_a_step_that_is_hardly_ever_accepted_is_taken_at_once():
    rowptr, col = graph_of([(0, 1), (1, 0), (0, 2), (2, 0)], 3)
    nodes, _ = random_walk(rowptr, col, torch.zeros(100).long(), 5, p=1e12, q=1.0, random_seed=1)
    assert bool((nodes[:, 2] == 0).all())  # the only way from 1 and from 2
    assert bool((nodes[:, 3] == 3 - nodes[:, 1]).all())  # never back


def test_each_pair_without_an_edge_is_as_likely_as_another():
    colptr, row = graph_of([(0, 1), (0, 2), (1, 0), (3, 3), (3, 0)], 4)
    pairs = negative_sample(colptr, row, TRIALS, num_src=5, random_seed=2)
    possible = torch.ones(5, 4)
    for v in range(4):
        possible[row[colptr[v] : colptr[v + 1]], v] = 0
    count = torch.bincount(pairs[0] * 4 + pairs[1], minlength=20)
    assert_as_expected(count, (possible / possible.sum()).flatten())
