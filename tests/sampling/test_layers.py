"""One layer: which edges may be drawn, how many, how often, and that a seed repeats them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from fastgraph.sampling import LayerSample, sample_layer
from tests.sampling.oracle import Columns

WIDTHS = tuple(itertools.product((torch.int32, torch.int64), repeat=2))


def graph(num_nodes: int, most: int, seed: int) -> Columns:
    """Nodes without edges, with few and with many, self-loops and repeated edges."""
    generator = torch.Generator().manual_seed(seed)
    degrees = torch.randint(0, most + 1, (num_nodes,), generator=generator)
    degrees[::7] = 0
    degrees[1] = 40 * most
    colptr = torch.cat([degrees.new_zeros(1), degrees.cumsum(0)])
    row = torch.randint(num_nodes, (int(colptr[-1]),), generator=generator)
    weight = torch.randint(0, 3, (len(row),), generator=generator).double()
    return Columns(colptr, row, weight)


def types_of(columns: Columns, num_types: int, dtype: torch.dtype) -> Tensor:
    """Types that ascend among the edges of each destination; the last never occurs."""
    types = torch.arange(len(columns.row)) * 7919 % (num_types - 1)
    order = (columns.dst * num_types + types).argsort()
    return types[order].to(dtype)


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("num_types", [1, 4])
def test_which_edges_and_how_many(
    widths: tuple[torch.dtype, ...], by_layer: bool, replace: bool, weighted: bool, num_types: int
) -> None:
    columns = graph(60, 9, num_types)
    types = types_of(columns, num_types, torch.uint8) if num_types > 1 else None
    weight = columns.weight if weighted else None
    seed = torch.cat([torch.randperm(60), torch.tensor([1, 1, 5])])
    for fanout in (0, 1, 3, 40, -1):
        fanouts = [fanout, 2, -1, 5][:num_types]
        sample = sample_layer(
            columns.colptr.to(widths[0]),
            columns.row.to(widths[1]),
            seed.to(widths[1]),
            fanouts,
            edge_type=types,
            edge_weight=weight,
            replace=replace,
            by_layer=by_layer,
        )
        assert sample.colptr.dtype == sample.edge.dtype == widths[0]
        assert torch.equal(sample.row, columns.row[sample.edge.long()].to(widths[1]))
        bounds = sample.colptr.tolist()
        assert bounds[0] == 0 and bounds[-1] == len(sample.edge)
        for i, node in enumerate(seed.tolist()):
            drawn = sample.edge[bounds[i] : bounds[i + 1]].tolist()
            every = range(int(columns.colptr[node]), int(columns.colptr[node + 1]))
            of_type = [e for e in every if weight is None or weight[e] > 0]
            expected = []
            for kind, most in enumerate(fanouts):
                may = [e for e in of_type if types is None or types[e] == kind]
                got = [e for e in drawn if types is None or types[e] == kind]
                assert set(got) <= set(may)
                if most < 0 or (not replace and most >= len(may)):
                    assert sorted(got) == may
                elif replace:
                    assert len(got) == (most if may else 0)
                else:
                    assert len(set(got)) == len(got) == most
                expected += got
            assert drawn == expected  # types ascend


@pytest.mark.parametrize("by_layer", [False, True])
def test_edges_in_their_order(by_layer: bool) -> None:
    columns = graph(30, 20, 3)
    drawn = sample_layer(
        columns.colptr, columns.row, torch.arange(30), [5], by_layer=by_layer, ascending=True
    )
    for part in drawn.edge.split(drawn.colptr.diff().tolist()):
        assert torch.equal(part, part.sort().values)


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("by_layer", [False, True])
def test_a_seed_repeats_it_on_any_number_of_threads(by_layer: bool, replace: bool) -> None:
    columns = graph(3000, 60, 4)
    seed = torch.arange(3000)

    def sample(threads: int, random_seed: int) -> LayerSample:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return sample_layer(
                *(columns.colptr, columns.row, seed, [9]),
                replace=replace,
                by_layer=by_layer,
                random_seed=random_seed,
            )
        finally:
            torch.set_num_threads(before)

    one = sample(1, 5)
    for threads in (2, 4):
        assert all(torch.equal(a, b) for a, b in zip(one, sample(threads, 5), strict=True))
    assert not torch.equal(one.edge, sample(1, 6).edge)


def chi_square(counts: Tensor, expected: Tensor) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def limit(degrees_of_freedom: int) -> float:
    """Exceeded by a right sampler about once in a million (Wilson and Hilferty, 1931)."""
    d = degrees_of_freedom
    return d * (1 - 2 / (9 * d) + 4.75 * math.sqrt(2 / (9 * d))) ** 3


@pytest.mark.parametrize("population", [12, 300])
@pytest.mark.parametrize("fanout", [1, 5])
@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("replace", [False, True])
def test_every_edge_is_as_likely(
    population: int, fanout: int, by_layer: bool, replace: bool
) -> None:
    colptr, row = torch.tensor([0, population]), torch.arange(population) * 3
    runs = 4000
    counts = torch.zeros(population, dtype=torch.float64)
    for run in range(runs):
        sample = sample_layer(
            *(colptr, row, torch.tensor([0]), [fanout]),
            replace=replace,
            by_layer=by_layer,
            random_seed=run,
        )
        counts += torch.bincount(sample.edge, minlength=population)
    assert counts.sum() == runs * fanout
    expected = torch.full_like(counts, runs * fanout / population)
    assert chi_square(counts, expected) < limit(population - 1)


@pytest.mark.parametrize("by_layer", [False, True])
def test_the_first_draw_is_by_weight(by_layer: bool) -> None:
    weight = torch.tensor([0.0, 1, 2, 3, 4, 5, 0.5])
    colptr, row = torch.tensor([0, 7]), torch.arange(7)
    runs = 20000
    counts = torch.zeros(7, dtype=torch.float64)
    for run in range(runs):
        drawn = sample_layer(
            *(colptr, row, torch.tensor([0]), [1]),
            edge_weight=weight,
            by_layer=by_layer,
            replace=not by_layer,
            random_seed=run,
        )
        counts[drawn.edge] += 1
    assert counts[0] == 0
    if by_layer:
        # The least of u / w: not in proportion to w, but its distribution is known.
        x = torch.linspace(0, 1, 200_001, dtype=torch.float64)[:-1] + 2.5e-6
        w = weight.double()[1:, None]
        alive = (1 - w * x / 5).clamp(min=0)  # all are decided before u / w = 1 / 5
        density = torch.stack(
            [
                (w[i] / 5) * (w[i] * x / 5 < 1) * alive[torch.arange(6) != i].prod(0)
                for i in range(6)
            ]
        ).mean(1)
        expected = density / density.sum() * runs
    else:
        expected = weight.double()[1:] / weight.sum() * runs
    assert chi_square(counts[1:], expected) < limit(5)


def test_seeds_draw_alike_by_layers() -> None:
    """All seeds have the same neighbours here, so that by layers they draw the same ones."""
    row = torch.arange(50).repeat(20)
    colptr = torch.arange(0, 1001, 50)
    seed = torch.arange(20)
    for replace in (False, True):
        alike = sample_layer(colptr, row, seed, [6], by_layer=True, replace=replace)
        assert len(alike.row.view(20, 6).unique(dim=0)) == 1
    apart = sample_layer(colptr, row, seed, [6])
    assert len(apart.row.view(20, 6).sort().values.unique(dim=0)) > 10


def test_a_seed_that_comes_twice_draws_twice() -> None:
    colptr, row = torch.tensor([0, 1000]), torch.arange(1000)
    drawn = sample_layer(colptr, row, torch.tensor([0, 0]), [20], random_seed=1)
    assert drawn.edge[:20].tolist() != drawn.edge[20:].tolist()


def test_nothing_to_sample() -> None:
    none = torch.empty(0, dtype=torch.int64)
    for seed, colptr in ((none, torch.tensor([0])), (torch.tensor([0, 0]), torch.tensor([0, 0]))):
        sample = sample_layer(colptr, none, seed, [3], edge_type=none)
        assert sample.colptr.tolist() == [0] * (len(seed) + 1)
        assert sample.edge.numel() == sample.row.numel() == 0


COLPTR, ROW, SEED = torch.tensor([0, 2, 4]), torch.tensor([0, 1, 0, 1]), torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"seed": torch.tensor([2])}, IndexError, "seed holds node 2 at position 0"),
        ({"seed": torch.tensor([-1])}, IndexError, "seed holds node -1"),
        ({"seed": SEED.int()}, TypeError, "seed must be int64, got int32"),
        ({"seed": SEED[None]}, ValueError, "seed must have 1 dimension"),
        ({"colptr": torch.tensor([0, 5, 4])}, ValueError, "colptr must ascend"),
        ({"colptr": torch.tensor([0, 2, 5])}, ValueError, "colptr must run from 0 to 4"),
        ({"colptr": [0, 2, 4]}, TypeError, "colptr must be a tensor, got list"),
        ({"row": ROW.double()}, TypeError, "row must be int32 or int64"),
        ({"fanouts": [-2]}, ValueError, r"fanouts must be in \[-1, 2\^31\), got -2"),
        ({"fanouts": [2.5]}, TypeError, "fanouts must hold ints, got 2.5"),
        ({"fanouts": [2**64]}, ValueError, r"fanouts must be in \[-1, 2\^31\), got"),
        ({"fanouts": 2}, TypeError, "fanouts must be a sequence of ints, got 2"),
        ({"replace": "no"}, TypeError, "replace must be a bool, got 'no'"),
        ({"by_layer": 1}, TypeError, "by_layer must be a bool, got 1"),
        ({"fanouts": [1, 1]}, ValueError, "fanouts must have one value where edges have no types"),
        ({"edge_type": torch.tensor([0, 0, 0, 1])}, IndexError, "edge_type holds 1 at position 3"),
        ({"edge_type": torch.tensor([0, 0, 0])}, ValueError, r"edge_type must have shape \[4\]"),
        ({"edge_type": torch.zeros(4)}, TypeError, "edge_type must be of integers, got float32"),
        ({"edge_weight": torch.tensor([1.0, 1, 1, -1])}, ValueError, "must be finite and at least"),
        ({"edge_weight": torch.ones(3)}, ValueError, r"edge_weight must have shape \[4\]"),
        ({"edge_weight": torch.ones(4).half()}, TypeError, "edge_weight must be float32"),
        ({"random_seed": 0.5}, TypeError, "random_seed must be an int"),
    ],
)
def test_what_is_refused(changed: dict[str, object], error: type[Exception], text: str) -> None:
    call = {"colptr": COLPTR, "row": ROW, "seed": SEED, "fanouts": [1]} | changed
    with pytest.raises(error, match=text):
        sample_layer(**call)  # type: ignore[arg-type]


def test_types_that_do_not_ascend_read_nothing_else() -> None:
    """More runs of a type than nodes of a chunk."""
    row = torch.zeros(10_000, dtype=torch.int64)
    sample = sample_layer(
        *(torch.tensor([0, 10_000]), row, torch.tensor([0]), [1, 1]),
        edge_type=torch.arange(10_000) % 2,
    )
    assert set(sample.edge.tolist()) <= set(range(10_000))
