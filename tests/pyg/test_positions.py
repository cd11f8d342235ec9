"""Which way positions of nodes are made, and that node2vec puts neighbours near each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch_geometric.nn.models import node2vec

import fastgraph
from fastgraph.nn.positions import positions_by_powers
from fastgraph.pyg.positions import node_positions


def two_halves() -> Tensor:
    """Nodes 0 to 5 and 6 to 11, with no edge between them."""
    half = torch.randint(6, (2, 30), generator=torch.Generator().manual_seed(0))
    edges = torch.cat([half, half + 6], 1)
    return torch.cat([edges, edges.flip(0)], 1)


def nearness(positions: Tensor) -> float:
    """How much more alike nodes of one half are than nodes of different halves."""
    unit = torch.nn.functional.normalize(positions)
    near = unit @ unit.T
    within = (near[:6, :6].sum() + near[6:, 6:].sum() - 12) / 60
    return float(within - near[:6, 6:].mean())


def test_node2vec() -> None:
    """As it is trained longer, nodes of a half come nearer to each other."""
    state = torch.random.get_rng_state()
    with fastgraph.enabled(), torch.no_grad():
        first = node_positions(two_halves(), 12, 8)
        again = node_positions(two_halves(), 12, 8, method="node2vec")
        later = node_positions(two_halves(), 12, 8, epochs=15)
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(first, again)
    assert later.shape == (12, 8) and not later.requires_grad
    assert nearness(later) > nearness(first) + 0.03


def test_powers_where_nothing_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node2vec, "WITH_PYG_LIB", False)
    expected = positions_by_powers(two_halves(), 12, 8, seed=4)
    assert torch.equal(node_positions(two_halves(), 12, 8, seed=4), expected)
    assert torch.equal(node_positions(two_halves(), 12, 8, seed=4, method="powers"), expected)
    with pytest.raises(ImportError, match="requires"):
        node_positions(two_halves(), 12, 8, method="node2vec")


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="method: expected one of auto, node2vec, powers"):
        node_positions(two_halves(), 12, 8, method="laplace")
    with fastgraph.enabled():
        with pytest.raises(IndexError, match="edge_index: expected nodes of 0 to 9, got 0 to 11"):
            node_positions(two_halves(), 10, 8)
        with pytest.raises(IndexError, match="edge_index: expected nodes of 0 to 11, got -1 to"):
            node_positions(two_halves() - 1, 12, 8)
        for edges in (two_halves()[0], two_halves().float()):
            with pytest.raises(ValueError, match=r"edge_index: expected integers \[2, edges\]"):
                node_positions(edges, 12, 8)
        with pytest.raises(ValueError, match="num_nodes: expected at least 1, got 0"):
            node_positions(two_halves()[:, :0], 0, 8)
        with pytest.raises(ValueError, match="expected at least 1, got 0 and 1"):
            node_positions(two_halves(), 12, 0)
