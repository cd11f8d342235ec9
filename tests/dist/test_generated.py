"""Graphs that ranks draw together: the same on any number of ranks, each edge with its block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor
from torch_geometric.data import Data

import fastgraph
import fastgraph.dist as fgd
from fastgraph import ops
from fastgraph.dist.graphs import cells, generated
from fastgraph.dist.graphs.generated import GRAPH500
from fastgraph.dist.graphs.owners import owner_of_edges
from fastgraph.dist.ranks.world import WORLD

SCALE, EDGES, NODES = 7, 1500, 101


def drawn(**options: Any) -> dict[str, Any]:
    """Both kinds of graphs, with pieces so small that ranks draw several."""
    generated._PIECE, generated._ROWS = 32, 16
    return {
        "kronecker": fgd.kronecker(SCALE, EDGES, features=3, seed=5, **options),
        "erdos_renyi": fgd.erdos_renyi(NODES, EDGES, features=3, seed=5, **options),
    }


def trained(data: Any) -> list[Tensor]:
    """Losses and parameters of steps, whose norms ranks add up of degrees."""
    torch.manual_seed(0)
    x, edge_index = (data.x.double(), data.edge_index)
    model = gnn.Sequential(
        "x, edge_index",
        [(gnn.GCNConv(3, 4), "x, edge_index -> x"), (gnn.GATConv(4, 2), "x, edge_index -> x")],
    ).double()
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    losses = []
    with fastgraph.enabled():
        for _ in range(3):
            optimizer.zero_grad()
            loss = (model(x, edge_index) - x[:, :2]).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return [*losses, *(w.detach() for w in model.parameters())]


def in_order(edge_index: Tensor) -> Tensor:
    """The edges by destination, which ranks have in another order."""
    places = edge_index[1] * 1000 + edge_index[0]
    return places.sort().values


def on_this_rank() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for mode in ("halo", "grid"):
        fgd.COUNTS.reset()
        drawn(mode=mode)
        found[f"born, {mode}"] = dict(fgd.COUNTS.sent)
        for kind, data in drawn(mode=mode).items():
            local = data.edge_index.local
            found[f"{kind}, {mode}, trained"] = trained(data)
            fgd.COUNTS.reset()
            out = ops.spmm(data.x, data.edge_index, num_out=data.num_nodes)
            far = fgd.COUNTS.plans, fgd.COUNTS.sent["all_to_all"]
            fgd.COUNTS.reset()
            ops.spmm(data.x, data.edge_index, num_out=data.num_nodes)
            again = fgd.COUNTS.plans, fgd.COUNTS.sent["all_to_all"]
            found[f"{kind}, {mode}"] = {
                "edges": in_order(fgd.whole(data.edge_index)),
                "x": fgd.whole(data.x),
                "out": fgd.whole(out),
                "own": local.shape[1],
                "all": data.edge_index.shape[1],
                "rows": data.x.rows.mode,
                "sent": (far, again),
                "gathers": dict(fgd.COUNTS.gathers),
            }
    try:
        fgd.kronecker(SCALE, EDGES, seed=WORLD.rank)
    except ValueError as error:
        found["error"] = str(error)
    return found


@pytest.fixture(scope="module")
def found(world_size: int, once_on_ranks: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = once_on_ranks(on_this_rank, world_size)
    return found


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    for name in ("_PIECE", "_ROWS"):
        monkeypatch.setattr(generated, name, getattr(generated, name))
    fgd.init()
    return drawn()


@pytest.mark.parametrize("mode", ["halo", "grid"])
@pytest.mark.parametrize("kind", ["kronecker", "erdos_renyi"])
def test_the_graph_is_that_of_one_process(
    found: list[dict[str, Any]], alone: dict[str, Any], kind: str, mode: str
) -> None:
    data = alone[kind]
    edges, x = fgd.whole(data.edge_index), fgd.whole(data.x)
    out = ops.spmm(x, edges, num_out=data.num_nodes)
    for of_rank in found:
        result = of_rank[f"{kind}, {mode}"]
        assert torch.equal(result["edges"], in_order(edges))
        assert torch.equal(result["x"], x)
        torch.testing.assert_close(result["out"], out)
        assert result["rows"] == mode
        if mode == "grid":  # edges are in their blocks: the first call sends features and results
            first, second = result["sent"]
            assert first[1] == second[1]
        assert not result["gathers"]
    plain = Data(x=x, edge_index=edges)
    expected = trained(plain)
    for of_rank in found:
        for a, b in zip(expected, of_rank[f"{kind}, {mode}, trained"], strict=True):
            torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-9)
        # Nobody sends edges: what is sent are arguments, and how many edges there are.
        assert set(of_rank[f"born, {mode}"]) <= {"all_gather", "all_reduce", "gather_objects"}
        assert sum(of_rank[f"born, {mode}"].values()) < 10_000
    assert sum(of_rank[f"{kind}, {mode}"]["own"] for of_rank in found) == edges.shape[1]
    # No rank has all edges, and one third more than its share at most.
    if len(found) > 1:
        most = max(of_rank[f"{kind}, {mode}"]["own"] for of_rank in found)
        assert most < 1.5 * edges.shape[1] / len(found)


@pytest.mark.parametrize("mode", ["halo", "grid"])
@pytest.mark.parametrize("ranks", [2, 9, 16, 37])
def test_blocks_of_all_ranks_are_the_whole(
    monkeypatch: pytest.MonkeyPatch, ranks: int, mode: str
) -> None:
    """Each block is drawn here as its rank would draw it, which asks nobody."""
    fgd.init()
    names = torch.Generator().manual_seed(0)
    for made in (cells.Uniform(1 << SCALE, 3), cells.Kronecker(SCALE, GRAPH500, 3, names)):

        def block(rank: int, size: int, made: cells.Cells = made) -> Tensor:
            monkeypatch.setattr(WORLD, "rank", rank)
            monkeypatch.setattr(WORLD, "size", size)
            owners = lambda pair: owner_of_edges(pair[0], pair[1], mode)  # noqa: E731
            return generated._of_block(made, 1 << SCALE, EDGES, 1, owners)

        parts = [block(rank, ranks) for rank in range(ranks)]
        assert torch.equal(in_order(torch.cat(parts, 1)), in_order(block(0, 1)))
        if ranks == 9 and mode == "grid":
            ends = torch.tensor([(1 << SCALE) * rank // 9 for rank in range(1, 9)])
            of_nodes = torch.bucketize(torch.arange(1 << SCALE), ends, right=True)
            for rank, (source, destination) in enumerate(parts):
                assert (of_nodes[source] % 3 == rank % 3).all()
                assert (of_nodes[destination] // 3 == rank // 3).all()


def test_arguments_that_differ_are_an_error_on_all_ranks(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert "must be the same on all ranks" in of_rank["error"]


def hub_of(edges: Tensor) -> float:
    """The largest degree, of the mean."""
    degrees = torch.bincount(edges[1])
    return float(degrees.max() / degrees.double().mean())


def test_a_kronecker_graph_has_hubs_and_each_edge_once(alone: dict[str, Any]) -> None:
    edges = fgd.whole(alone["kronecker"].edge_index)
    assert edges.shape[1] == edges.unique(dim=1).shape[1] < EDGES
    assert 0 <= int(edges.min()) <= int(edges.max()) < 1 << SCALE
    even = fgd.whole(alone["erdos_renyi"].edge_index)
    skew, none = (
        torch.bincount(x[1]).max() / (x.shape[1] / (int(x.max()) + 1)) for x in (edges, even)
    )
    assert skew > 1.5 * none


def test_the_shares_of_quadrants_are_those_of_the_initiator() -> None:
    fgd.init()
    data = fgd.kronecker(1, 1000, initiator=(1, 0, 0, 0))
    assert data.edge_index.shape[1] == 1
    assert int(fgd.whole(data.edge_index).diff(dim=0)) == 0  # from the first node to itself
    data = fgd.kronecker(6, 4000, initiator=(0.5, 0.5, 0, 0))
    assert len(fgd.whole(data.edge_index)[0].unique()) == 1  # all sources are the first node
    assert len(fgd.whole(data.edge_index)[1].unique()) == 64


def test_names_are_a_bijection() -> None:
    for scale in (0, 1, 2, 5, 11):
        made = cells.Names(scale, torch.Generator().manual_seed(3))
        names = made(torch.arange(1 << scale))
        assert torch.equal(names.sort().values, torch.arange(1 << scale))


@pytest.mark.parametrize("levels", [0, 2, 6])
def test_edges_are_distributed_as_the_initiator_says(levels: int) -> None:
    scale, num_edges, initiator = 6, 200_000, (0.5, 0.25, 0.2, 0.05)
    g = torch.Generator().manual_seed(1)
    made = cells.Kronecker(scale, initiator, levels, g)
    counts = cells.counts_of(made, num_edges, g)
    assert int(counts.sum()) == num_edges
    drawn = torch.cat(
        [made.draw(i, j, int(counts[i, j]), g) for i, j in counts.nonzero().tolist()], 1
    )
    groups = torch.bucketize(drawn, made.bounds[1:-1], right=True)
    of_cells = (groups[0] * len(counts) + groups[1]).bincount(minlength=counts.numel())
    assert torch.equal(of_cells, counts.flatten())
    for ends, of_bit in ((drawn[0], (0.75, 0.25)), (drawn[1], (0.7, 0.3))):
        share = torch.ones(1, dtype=torch.float64)
        for _ in range(scale):
            share = torch.kron(share, torch.tensor(of_bit, dtype=torch.float64))
        found = ends.bincount(minlength=1 << scale).double().sort().values
        expected = share.sort().values * num_edges
        # Nodes with as many ones among their bits are alike, and far from all others.
        for level in expected.round(decimals=3).unique():
            own = (expected - level).abs() < 0.01
            off = float((found[own].sum() - expected[own].sum()).abs())
            assert off < 6 * float(expected[own].sum()) ** 0.5


def test_groups_of_even_edges_are_as_many_as_nodes() -> None:
    made = cells.Uniform(5, 3)
    assert made.bounds.tolist() == [0, 1, 2, 3, 4, 5]
    counts = cells.counts_of(made, 10_000, torch.Generator().manual_seed(0))
    assert int(counts.sum()) == 10_000
    assert float((counts - 400).abs().max()) < 6 * 20


def test_a_seed_says_all() -> None:
    fgd.init()
    first, again, other = (
        fgd.whole(fgd.erdos_renyi(50, 200, seed=seed).edge_index) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert fgd.erdos_renyi(3, 0).edge_index.shape == (2, 0)


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((-1, 5), {}, "scale must be an integer from 0 to 31, got -1"),
        ((2.5, 5), {}, "scale must be an integer"),
        ((3, -5), {}, "num_edges must be an integer >= 0, got -5"),
        ((3, 5), {"features": -1}, "features must be"),
        ((3, 5), {"seed": "a"}, "seed must be an integer >= 0, got 'a'"),
        ((3, 5), {"initiator": (0.5, 0.5, 0.5, 0.5)}, "four probabilities that add up to 1"),
        ((3, 5), {"initiator": (1.0,)}, "four probabilities"),
        ((3, 5), {"mode": "ring"}, "mode must be one of"),
        ((3, 5), {"mode": "grid", "mesh": (2, 2)}, "mesh must be"),
    ],
)
def test_bad_input(arguments: tuple[Any, Any], options: dict[str, Any], text: str) -> None:
    fgd.init()
    with pytest.raises(ValueError, match=text):
        fgd.kronecker(*arguments, **options)


def test_bad_numbers_of_nodes() -> None:
    fgd.init()
    with pytest.raises(ValueError, match="num_nodes must be an integer from 1 to"):
        fgd.erdos_renyi(0, 5)
