"""The protocol of modes: which mode computes what, and why not another one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgraph.dist as fgd
from fastgraph import ops
from fastgraph.dist.operators import modes
from fastgraph.dist.operators.cost import Cluster, Cost, Distribution, Layer
from fastgraph.dist.operators.grid.computing import Grid
from fastgraph.dist.operators.heads.exchange import everywhere
from fastgraph.dist.operators.heads.graph import whole_graph
from fastgraph.dist.operators.planner import mode_of
from fastgraph.dist.operators.protocol import OPERATIONS, Mode, Operation, Relation
from fastgraph.dist.operators.rank_graph import local_rows
from fastgraph.dist.ranks.mesh import Mesh
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.layout import Layout
from fastgraph.dist.tensor.sharded import ShardedTensor
from fastgraph.dist.tensor.table import NoRuleError
from fastgraph.ops.spmm import SPMM
from tests.dist.graphs import NUM_FEATURES, NUM_NODES, PARTITIONS, graph

SUM, ATTENTION = Operation("weighted_sum"), Operation("attention", heads=2)


class Gathered(Mode):
    """Each rank gathers the rows of all others, and sums those that its own nodes need."""

    name = "gathered"
    operations = frozenset(("weighted_sum",))

    def why_not(self, operation: Operation) -> str | None:
        return "means are not sums" if operation.reduce == "mean" else None

    def cost(self, layer: Layer, rows: Distribution, cluster: Cluster) -> Cost | None:
        return None

    def weighted_sum(
        self, relation: Relation, x: Tensor, weight: Tensor | None, reduce: str
    ) -> ShardedTensor:
        if weight is not None:
            raise NoRuleError
        graph, destinations = whole_graph(*relation), relation.destinations
        edges = graph.edges_of(numbered=False)
        rows = everywhere(local_rows(x, relation.sources), relation.sources)
        out = SPMM(rows, edges.index, edges.ptr, None, destinations.n, reduce, False)
        start = sum(destinations.counts[: WORLD.rank])
        return ShardedTensor(out[start : start + destinations.mine], destinations, 0)


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(WORLD, "size", 2)
    monkeypatch.setitem(modes.BY_NAME, Gathered.name, Gathered())
    fgd.COUNTS.reset()
    yield
    fgd.COUNTS.reset()


def on_this_rank() -> dict[str, Any]:
    """A layer by a mode of somebody else beside one process, and how calls were computed."""
    torch.set_default_dtype(torch.float64)
    modes.BY_NAME[Gathered.name] = Gathered()
    given = graph()
    parts = PARTITIONS["uneven"](WORLD.size)
    data = fgd.shard(given, parts=parts, mode=Gathered.name)
    fgd.COUNTS.reset()
    results = []
    for d in (given, data):
        x = d.x.detach().requires_grad_()
        out = ops.spmm(x, d.edge_index, num_out=NUM_NODES)
        mean = ops.spmm(x, d.edge_index, num_out=NUM_NODES, reduce="mean")
        (grad,) = torch.autograd.grad((out * out).sum() + mean.sum(), [x])
        results.append([fgd.whole(each).detach() for each in (out, mean, grad)])
    score = torch.ones(2, 1, NUM_FEATURES)
    ops.gat_with_scores(data.x[:, None, :], score, data.edge_index)
    deviations = [float((a - b).abs().max()) for a, b in zip(*results, strict=True)]
    return {
        "deviations": deviations,
        "sums": dict(fgd.COUNTS.aggregation),
        "attention": dict(fgd.COUNTS.attention),
        "gathers": dict(fgd.COUNTS.gathers),
    }


@pytest.fixture(scope="module")
def found(world_size: int, once_on_ranks: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = once_on_ranks(on_this_rank, world_size)
    return found


def test_a_mode_of_somebody_else(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert max(of_rank["deviations"]) < 1e-12
        assert of_rank["sums"] == {"gathered": 1, "halo: means are not sums": 1}
        assert of_rank["attention"] == {"halo": 1}
        assert not of_rank["gathers"]


def rows(mode: str, mesh: Mesh | None = None) -> Layout:
    found = Layout(torch.arange(3), 6, [3, 3])
    found.mode, found.mesh = mode, mesh
    return found


def relation(sources: Layout, destinations: Layout | None = None) -> Relation:
    return Relation(torch.zeros(2, 1).long(), sources, destinations or sources)


def counted() -> dict[str, int]:
    return dict(fgd.COUNTS.attention + fgd.COUNTS.aggregation)


@pytest.mark.usefixtures("two_ranks")
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
        ("grid", SUM, "grid", {"grid": 1}),
        ("grid", Operation("normalised_sum"), "grid", {"grid": 1}),
        ("grid", Operation("extremum", "max", "split"), "grid", {"grid": 1}),
        ("grid", Operation("extremum", "max", "winner"), "grid", {"grid": 1}),
        ("grid", ATTENTION, "grid", {"grid": 1}),
        ("grid", Operation("products", "sum"), "grid", {"grid": 1}),
        (
            "grid",
            Operation("products", "mean"),
            "halo",
            {"halo: products are divided by degrees": 1},
        ),
        ("grid", Operation("softmax"), "grid", {"grid": 1}),
        ("grid", Operation("program"), "grid", {"grid": 1}),
        ("gathered", SUM, "gathered", {"gathered": 1}),
        ("gathered", Operation("weighted_sum", "mean"), "halo", {"halo: means are not sums": 1}),
        ("gathered", ATTENTION, "halo", {"halo": 1}),
        ("gathered", Operation("softmax"), "halo", {}),
        ("auto", Operation("softmax"), "halo", {}),
        ("auto", SUM, "halo", {}),  # of which nobody says what it costs
    ],
)
def test_which_mode_computes_an_operation(
    mode: str, operation: Operation, computed_by: str, counts: dict[str, int]
) -> None:
    assert mode_of(operation, relation(rows(mode))).name == computed_by
    assert counted() == counts


@pytest.mark.usefixtures("two_ranks")
def test_a_mode_overrides_the_operations_that_it_names() -> None:
    for mode in modes.BY_NAME.values():
        for operation in OPERATIONS:
            is_its_own = getattr(type(mode), operation) is not getattr(Mode, operation)
            names = operation in mode.operations
            assert is_its_own == (names and mode.why_not(Operation(operation, heads=2)) is None)


@pytest.mark.usefixtures("two_ranks")
def test_one_rank_has_nothing_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WORLD, "size", 1)
    assert mode_of(SUM, relation(rows("grid"))) is modes.HALO
    assert mode_of(ATTENTION, relation(rows("heads"))) is modes.HALO
    assert counted() == {"halo": 1}


@pytest.mark.usefixtures("two_ranks")
def test_aggregating_nodes_decide_unless_they_want_the_halo() -> None:
    assert mode_of(ATTENTION, relation(rows("heads"), rows("grid"))).name == "grid"
    assert mode_of(ATTENTION, relation(rows("grid"), rows("heads"))).name == "heads"
    assert mode_of(SUM, relation(rows("grid"), rows("heads"))).name == "grid"
    found = mode_of(SUM, relation(rows("grid", (1, 2)), rows("halo")))
    assert isinstance(found, Grid) and found.mesh == (1, 2)
