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
    half = torch.randint(15, (2, 60), generator=torch.Generator().manual_seed(0))
    edges = torch.cat([half, half + 15, torch.tensor([[0], [15]])], 1)
    return torch.cat([edges, edges.flip(0)], 1)


def test_node2vec() -> None:
    state = torch.random.get_rng_state()
    with fastgraph.enabled(), torch.no_grad():
        found = node_positions(two_halves(), 30, 8, epochs=30)
        again = node_positions(two_halves(), 30, 8, method="node2vec", epochs=30)
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(found, again)
    assert found.shape == (30, 8) and not found.requires_grad
    near = torch.nn.functional.normalize(found) @ torch.nn.functional.normalize(found).T
    assert float(near[:15, :15].mean()) > float(near[:15, 15:].mean()) + 0.1


def test_powers_where_nothing_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node2vec, "WITH_PYG_LIB", False)
    expected = positions_by_powers(two_halves(), 30, 8, seed=4)
    assert torch.equal(node_positions(two_halves(), 30, 8, seed=4), expected)
    assert torch.equal(node_positions(two_halves(), 30, 8, seed=4, method="powers"), expected)
    with pytest.raises(ImportError, match="requires"):
        node_positions(two_halves(), 30, 8, method="node2vec")


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="method: expected one of auto, node2vec, powers"):
        node_positions(two_halves(), 30, 8, method="laplace")
    with fastgraph.enabled():
        with pytest.raises(IndexError, match="edge_index: expected less than 20, got 29"):
            node_positions(two_halves(), 20, 8)
        with pytest.raises(ValueError, match="expected at least 1, got 0 and 1"):
            node_positions(two_halves(), 30, 0)
