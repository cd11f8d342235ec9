"""Graphs that ranks draw together: the same on any number of ranks, each edge with its block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fastgraph.dist as fgd
from fastgraph import ops
from fastgraph.dist.graphs import generated
from fastgraph.dist.ranks.world import WORLD

SCALE, EDGES, NODES = 7, 1500, 101


def drawn(**options: Any) -> dict[str, Any]:
    """Both kinds of graphs, with pieces so small that ranks draw several."""
    generated._PIECE, generated._ROWS = 256, 16
    return {
        "kronecker": fgd.kronecker(SCALE, EDGES, features=3, seed=5, **options),
        "erdos_renyi": fgd.erdos_renyi(NODES, EDGES, features=3, seed=5, **options),
    }


def in_order(edge_index: Tensor) -> Tensor:
    """The edges by destination, which ranks have in another order."""
    places = edge_index[1] * 1000 + edge_index[0]
    return places.sort().values


def on_this_rank() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for mode in ("halo", "grid"):
        for kind, data in drawn(mode=mode).items():
            local = data.edge_index.local
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
    assert sum(of_rank[f"{kind}, {mode}"]["own"] for of_rank in found) == edges.shape[1]
    # No rank has all edges, and one third more than its share at most.
    if len(found) > 1:
        most = max(of_rank[f"{kind}, {mode}"]["own"] for of_rank in found)
        assert most < 1.5 * edges.shape[1] / len(found)


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
        names = generated._Names(scale, seed=3)(torch.arange(1 << scale))
        assert torch.equal(names.sort().values, torch.arange(1 << scale))


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
