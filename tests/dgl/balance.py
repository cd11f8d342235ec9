"""Times of ranks for their parts of a graph of DGL, and rebalancing by them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fastgraph.dist as fgd
from fastgraph.dist.balance import first_epochs
from fastgraph.dist.balance.automatic import Automatic
from fastgraph.dist.balance.first_epochs import FirstEpochs
from fastgraph.dist.ranks.world import WORLD
from tests.dist.test_rebalance import clock, error_of


def check(g: Any, relations: Any) -> None:
    """The first rank takes three times as long as the others for a graph, and for one of several
    kinds of nodes.
    """
    seconds = [0.3, *[0.1] * (WORLD.size - 1)]
    for graph in (relations, g):
        with clock() as ours, fgd.measured(graph) as balance:
            ours.compute(*seconds)
        assert [phases.compute for phases in balance.measured] == pytest.approx(seconds)
        assert sum(balance.nodes) == graph.num_nodes() and sum(balance.edges) == graph.num_edges()
        assert balance.halo[0] > 0
    error = error_of(lambda: fgd.rebalance(g, balance))
    assert error.startswith("ValueError: data must be a graph of PyG: rows"), error
    _check_script(g, seconds)


def _check_script(g: Any, seconds: list[float]) -> None:
    """A script is measured in its first epochs, and rows stay where they are."""
    first_epochs._SECONDS = 0.0
    counts = g.ndata["x"].rows.counts
    shares = Automatic("a script", "even")
    seen: list[Any] = []
    FirstEpochs([shares.correct, lambda _, balance: seen.append(balance)]).watch(g)
    weight = nn.Parameter(torch.ones(g.ndata["x"].shape[1]))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with clock() as ours:
        for _ in range(21):
            ours.compute(*seconds)
            optimizer.zero_grad()
            (g.ndata["x"] * weight).mean().backward()
            optimizer.step()
    assert [one.compute for one in seen[0].measured] == pytest.approx(seconds)
    assert g.ndata["x"].rows.counts == counts
