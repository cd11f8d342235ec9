"""Positions of nodes beside powers of the dense adjacency matrix in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastgraph.nn.positions import positions_by_powers

NODES, CHANNELS = 9, 5
EDGES = torch.tensor([[0, 1, 2, 2, 3, 3, 6, 6, 0], [1, 0, 0, 0, 3, 2, 7, 5, 8]])
"""With a node on its own, a self-loop, an edge twice, and edges in one direction."""


@pytest.mark.parametrize("powers", [1, 3])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_powers(powers: int, dtype: torch.dtype) -> None:
    a = torch.zeros(NODES, NODES, dtype=torch.float64)
    a.index_put_((EDGES[1], EDGES[0]), torch.ones(EDGES.shape[1]).double(), accumulate=True)
    a += torch.diag((a.diagonal() == 0).double())
    scale = a.sum(1).pow(-0.5)
    a = scale.unsqueeze(1) * a * scale
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(NODES, CHANNELS, generator=draw).double()
    expected = torch.zeros_like(x)
    for _ in range(powers):
        x = a @ x
        expected += x / x.norm(dim=1, keepdim=True)
    found = positions_by_powers(EDGES.to(dtype), NODES, CHANNELS, powers=powers, seed=3)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_neighbours_are_near_each_other() -> None:
    """Two halves with one edge between them."""
    draw = torch.Generator().manual_seed(0)
    half = torch.randint(20, (2, 120), generator=draw)
    edges = torch.cat([half, half + 20, torch.tensor([[0], [20]])], 1)
    found = positions_by_powers(torch.cat([edges, edges.flip(0)], 1), 40, 32)
    near = found @ found.T
    within = (near[:20, :20].mean() + near[20:, 20:].mean()) / 2
    assert float(within) > 3 * float(near[:20, 20:].mean().abs())


def test_a_graph_without_edges_or_nodes() -> None:
    assert positions_by_powers(EDGES[:, :0], 4, 3).isfinite().all()
    assert positions_by_powers(EDGES[:, :0], 0, 3).shape == (0, 3)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "channels": ({"channels": 0}, ValueError, "channels: expected at least 1, got 0"),
    "powers": ({"powers": 0}, ValueError, "powers: expected at least 1, got 0"),
    "nodes": ({"num_nodes": -1}, ValueError, "num_nodes: expected at least 0, got -1"),
    "outside": ({"num_nodes": 8}, IndexError, "index"),
    "float": ({"edge_index": EDGES.float()}, ValueError, "index"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    changes, error, message = BAD[name]
    with pytest.raises(error, match=message):
        positions_by_powers(
            **{"edge_index": EDGES, "num_nodes": NODES, "channels": CHANNELS, **changes}
        )
