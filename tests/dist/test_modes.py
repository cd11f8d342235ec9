"""The protocol of modes: which mode computes what, and why not another one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import fastgraph.dist as fgd
from fastgraph.dist.operators import modes
from fastgraph.dist.operators.cost import Cluster, Cost, Distribution, Layer
from fastgraph.dist.operators.grid.computing import Grid
from fastgraph.dist.operators.planner import mode_of
from fastgraph.dist.operators.protocol import OPERATIONS, Mode, Operation, Relation
from fastgraph.dist.ranks.mesh import Mesh
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.layout import Layout
from fastgraph.dist.tensor.sharded import ShardedTensor

SUM, ATTENTION = Operation("weighted_sum"), Operation("attention", heads=2)


class Sums(Mode):
    """A mode of somebody else, which computes sums and nothing more."""

    name = "sums"
    operations = frozenset(("weighted_sum",))

    def why_not(self, operation: Operation) -> str | None:
        return "means are not sums" if operation.reduce == "mean" else None

    def cost(self, layer: Layer, rows: Distribution, cluster: Cluster) -> Cost | None:
        return None

    def weighted_sum(
        self, relation: Relation, x: Tensor, weight: Tensor | None, reduce: str
    ) -> ShardedTensor:
        return ShardedTensor(x, relation.destinations, 0)


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(WORLD, "size", 2)
    monkeypatch.setitem(modes.BY_NAME, Sums.name, Sums())
    fgd.COUNTS.reset()
    yield
    fgd.COUNTS.reset()


def rows(mode: str, mesh: Mesh | None = None) -> Layout:
    found = Layout(torch.arange(3), 6, [3, 3])
    found.mode, found.mesh = mode, mesh
    return found


def relation(sources: Layout, destinations: Layout | None = None) -> Relation:
    return Relation(torch.zeros(2, 1).long(), sources, destinations or sources)


def counted() -> dict[str, int]:
    return dict(fgd.COUNTS.attention + fgd.COUNTS.aggregation)


@pytest.mark.parametrize(
    ("mode", "operation", "computed_by", "counts"),
    [
        ("halo", SUM, "halo", {}),
        ("halo", ATTENTION, "halo", {"halo": 1}),
        ("heads", SUM, "halo", {}),
        ("heads", ATTENTION, "heads", {"heads": 1}),
        (
            "heads",
            Operation("attention", heads=1),
            "halo",
            {"halo: heads cannot be shared out, there are 1": 1},
        ),
        ("2d", SUM, "2d", {"2d": 1}),
        ("2d", Operation("normalised_sum"), "2d", {"2d": 1}),
        ("2d", Operation("extremum", "max", "split"), "2d", {"2d": 1}),
        (
            "2d",
            Operation("extremum", "max", "winner"),
            "halo",
            {"halo: the gradient of ties goes to one edge of all": 1},
        ),
        ("2d", ATTENTION, "2d", {"2d": 1}),
        ("2d", Operation("products", "sum"), "2d", {"2d": 1}),
        (
            "2d",
            Operation("products", "mean"),
            "halo",
            {"halo: products are divided by degrees": 1},
        ),
        ("2d", Operation("softmax"), "halo", {"halo: each edge gets a softmax of all": 1}),
        ("sums", SUM, "sums", {"sums": 1}),
        ("sums", Operation("weighted_sum", "mean"), "halo", {"halo: means are not sums": 1}),
        ("sums", ATTENTION, "halo", {"halo": 1}),
        ("sums", Operation("softmax"), "halo", {}),
        ("auto", Operation("softmax"), "halo", {}),
        ("auto", SUM, "halo", {}),  # of which nobody says what it costs
    ],
)
def test_which_mode_computes_an_operation(
    mode: str, operation: Operation, computed_by: str, counts: dict[str, int]
) -> None:
    assert mode_of(operation, relation(rows(mode))).name == computed_by
    assert counted() == counts


def test_a_mode_overrides_the_operations_that_it_names() -> None:
    for mode in modes.BY_NAME.values():
        for operation in OPERATIONS:
            is_its_own = getattr(type(mode), operation) is not getattr(Mode, operation)
            names = operation in mode.operations
            # The grid says of softmaxes why it computes none.
            assert is_its_own == (names and mode.why_not(Operation(operation, heads=2)) is None)


def test_one_rank_has_nothing_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WORLD, "size", 1)
    assert mode_of(SUM, relation(rows("2d"))) is modes.HALO
    assert mode_of(ATTENTION, relation(rows("heads"))) is modes.HALO
    assert counted() == {"halo": 1}


def test_aggregating_nodes_decide_unless_they_want_the_halo() -> None:
    assert mode_of(ATTENTION, relation(rows("heads"), rows("2d"))).name == "2d"
    assert mode_of(ATTENTION, relation(rows("2d"), rows("heads"))).name == "heads"
    assert mode_of(SUM, relation(rows("2d"), rows("heads"))).name == "2d"
    found = mode_of(SUM, relation(rows("2d", (1, 2)), rows("halo")))
    assert isinstance(found, Grid) and found.mesh == (1, 2)
