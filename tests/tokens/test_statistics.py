"""How often nodes are sampled, by chi-square tests of samples with fixed seeds."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fastgraph.tokens import local_nodes
from tests.sampling.test_statistics import assert_as_expected

TRIALS = 20_000
NEAR, FAR = 4, 9


def alike() -> Tensor:
    """Edges by which each of many nodes has the nodes 0 to 12 in one or two hops.

    Four are one hop away; of nine that are two hops away, some are on one path and some on four,
    and the second of the four is two hops away, too.
    """
    paths = torch.tensor(
        [[NEAR + far, near] for far in range(FAR) for near in range(NEAR) if near <= far] + [[1, 0]]
    ).t()
    centres = torch.arange(NEAR + FAR, NEAR + FAR + TRIALS)
    near = torch.arange(NEAR).repeat(TRIALS)
    return torch.cat([paths, torch.stack([near, centres.repeat_interleave(NEAR)])], 1)


def drawn(k: int, **options: object) -> Tensor:
    """The nodes that each of many nodes draws, [trials, k - 1]."""
    nodes = torch.arange(NEAR + FAR, NEAR + FAR + TRIALS)
    return local_nodes(alike(), k, nodes=nodes, seed=k, **options)[:, 1:].long()


def assert_even_alone_and_in_pairs(rows: Tensor, size: int) -> None:
    assert_as_expected(
        torch.bincount(rows.flatten(), minlength=size), torch.full((size,), 1 / size)
    )
    ordered = rows.sort(1).values
    places = torch.combinations(torch.arange(rows.shape[1]))
    pairs = ordered[:, places[:, 0]] * size + ordered[:, places[:, 1]]
    possible = torch.combinations(torch.arange(size))
    count = torch.bincount(pairs.flatten(), minlength=size**2)
    count = count[possible[:, 0] * size + possible[:, 1]]
    assert int(count.sum()) == pairs.numel()
    assert_as_expected(count, torch.full((len(possible),), 1 / len(possible)))


@pytest.mark.parametrize("k", [3, 6, 12, 13])
def test_nodes_and_pairs_are_as_likely_as_others(k: int) -> None:
    assert_even_alone_and_in_pairs(drawn(k), NEAR + FAR)


@pytest.mark.parametrize("k", [3, 4, 11])
def test_each_set_is_as_likely_as_another(k: int) -> None:
    sets = (1 << drawn(k)).sum(1)
    possible = [sum(1 << n for n in one) for one in itertools.combinations(range(13), k - 1)]
    count = torch.tensor([int((sets == one).sum()) for one in possible])
    assert int(count.sum()) == TRIALS
    assert_as_expected(count, torch.full((len(possible),), 1 / len(possible)))


def test_each_order_of_what_is_first_is_as_likely_as_another() -> None:
    first = drawn(8)[:, :2]
    count = torch.bincount(first[:, 0] * 13 + first[:, 1], minlength=13 * 13).view(13, 13)
    assert int(count.diagonal().sum()) == 0
    others = count[~torch.eye(13, dtype=torch.bool)]
    assert_as_expected(others, torch.full((156,), 1 / 156))


def test_seeds_of_one_node_are_as_different_as_nodes() -> None:
    edge_index, node = alike(), torch.tensor([20])
    rows = torch.cat([local_nodes(edge_index[:, :200], 4, nodes=node, seed=s) for s in range(3000)])
    assert_even_alone_and_in_pairs(rows[:, 1:].long(), 13)


@pytest.mark.parametrize("k", [20, 60])
def test_draws_with_replacement_are_independent(k: int) -> None:
    rows = drawn(k)
    even = torch.full((13 * 13,), 1 / 169)
    for a, b in ((0, 1), (k - 3, k - 2), (3, 4), (0, k // 2)):
        assert_as_expected(torch.bincount(rows[:, a] * 13 + rows[:, b], minlength=169), even)


@pytest.mark.parametrize(("size", "k"), [(9, 4), (9, 9), (9, 12)])
def test_nodes_without_neighbours_draw_from_all(size: int, k: int) -> None:
    none = torch.empty(2, 0, dtype=torch.int64)
    rows = torch.cat(
        [local_nodes(none, k, num_nodes=size, seed=s)[:, 1:].long() for s in range(1500)]
    )
    if k <= size:
        assert bool((rows.sort(1).values.diff(dim=1) > 0).all())
        assert_even_alone_and_in_pairs(rows, size)
    else:
        pairs = rows[:, 0] * size + rows[:, 1]
        count = torch.bincount(pairs, minlength=size**2)
        assert_as_expected(count, torch.full((size**2,), size**-2.0))


@pytest.mark.parametrize("k", [4, 9])
def test_entries_of_the_release_are_as_likely_as_others(k: int) -> None:
    rows = drawn(k, variant="release")
    # Node 1 is in both lists, 13 + 1 entries.
    weight = torch.ones(13)
    weight[1] = 2
    assert_as_expected(torch.bincount(rows.flatten(), minlength=13), weight / 14)
    twice = (rows == 1).sum(1) == 2
    chance = (k - 1) * (k - 2) / (14 * 13)
    count = torch.tensor([int(twice.sum()), int((~twice).sum())])
    assert_as_expected(count, torch.tensor([chance, 1 - chance]))


def test_hubs_are_thinned_evenly() -> None:
    # Many hubs with one list.
    hubs = torch.arange(40, 40 + 4000)
    edge_index = torch.stack([torch.arange(40).repeat(4000), hubs.repeat_interleave(40)])
    rows = local_nodes(edge_index, 11, nodes=hubs, hub_cap=10)[:, 1:].long()
    kept = torch.zeros(4000, 40, dtype=torch.bool).scatter_(1, rows, True)
    assert bool((kept.sum(1) == 10).all())
    assert_even_alone_and_in_pairs(kept.nonzero()[:, 1].view(4000, 10), 40)
