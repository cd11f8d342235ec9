"""The volumes of halo and grid, counted without ranks: the closed form for random graphs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fastgraph.dist.operators import cost
from fastgraph.dist.operators.grid.cost import exchanged, volume
from fastgraph.dist.operators.halo.cost import rows_of_halo
from fastgraph.dist.ranks.mesh import usual_mesh
from fastgraph.edge_programs.program import parse
from fastgraph.ops.edge_program import with_records

NODES = 7200


def random_graph(degree: float, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, NODES, (2, round(NODES * degree)), generator=g)


def equal_at(ranks: int) -> float:
    """The mean degree at which both send alike: 1 - exp(-x) = 2 (sqrt(p) - 1) / (p - 1)."""
    return -ranks * math.log(1 - 2 * (math.isqrt(ranks) - 1) / (ranks - 1))


def mean_rows(degree: float, ranks: int) -> tuple[float, float]:
    """Rows that a rank sends for a sum by halo and on a grid, forward, mean over ranks."""
    owner = torch.arange(NODES) * ranks // NODES
    halo = rows_of_halo(random_graph(degree, ranks), owner, owner, ranks)
    assert sum(halo.sends) == sum(halo.receives)
    counts = torch.bincount(owner, minlength=ranks).tolist()
    layer = cost.sum_layer(torch.empty(1, 1, dtype=torch.float64))
    grid = volume(usual_mesh(ranks), exchanged(layer), counts, counts)
    return sum(halo.sends) / ranks, sum(grid.sent) / 8 / ranks


@pytest.mark.parametrize(("ranks", "degree"), [(4, 4.4), (9, 6.2), (16, 8.2)])
def test_halo_and_grid_send_alike_at_the_degree_of_the_closed_form(
    ranks: int, degree: float
) -> None:
    assert equal_at(ranks) == pytest.approx(degree, abs=0.05)
    halo, grid = mean_rows(equal_at(ranks), ranks)
    assert grid == 2 * NODES * (math.isqrt(ranks) - 1) / ranks
    assert halo == pytest.approx(grid, rel=0.02)
    assert mean_rows(0.8 * degree, ranks)[0] < 0.9 * grid
    assert mean_rows(1.25 * degree, ranks)[0] > 1.1 * grid


@pytest.mark.parametrize("ranks", [4, 9, 16])
def test_the_halo_is_that_of_the_closed_form(ranks: int) -> None:
    for degree in (1.0, 5.0, 30.0):
        halo, _ = mean_rows(degree, ranks)
        expected = NODES * (ranks - 1) / ranks * (1 - math.exp(-degree / ranks))
        assert halo == pytest.approx(expected, rel=0.02)


def test_rows_of_the_halo_by_hand() -> None:
    owner = torch.tensor([0, 0, 1, 2])
    # Node 0 goes to ranks 1 and 2, there twice; node 3 to rank 0; an edge within a rank is no halo.
    edges = torch.tensor([[0, 0, 0, 3, 1], [2, 3, 3, 1, 0]])
    assert rows_of_halo(edges, owner, owner, 3) == ([2, 0, 1], [1, 1, 1])
    assert rows_of_halo(edges[:, :0], owner, owner, 3) == ([0, 0, 0], [0, 0, 0])


def test_one_program_exchanges_three_rows_where_two_operators_exchange_four() -> None:
    k = 16
    x = torch.empty(1, k)
    program = parse(f"y = row {k}\nx = gathered {k}\nt0 = dot y x 1\nt1 = mul t0 x\nsum t1")
    fused = exchanged(cost.program_layer(with_records(program), [x, x])).forward
    assert fused == (4 * k, 4 * k, 4 * k)
    by_sum = exchanged(cost.sum_layer(x)).forward  # after products, which gather both ends
    assert sum(by_sum) + 2 * 4 * k == 4 * 4 * k
