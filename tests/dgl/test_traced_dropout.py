"""Dropout in functions of users: DGL's random numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fastgraph
from tests.dgl.graphs import dgl, graph
from tests.graphs import random_edges

COUNT, NODES = 300, 20


def dropped(edges: Any) -> dict[str, Tensor]:
    return {"m": F.dropout(edges.src["h"] * edges.dst["h"], 0.5)}


@pytest.mark.parametrize("name", ["update_all", "apply_edges"])
def test_numbers_are_those_of_upstream(name: str) -> None:
    g = graph(random_edges(NODES, NODES, COUNT), NODES)
    x = torch.randn(NODES, 4, dtype=torch.float64, requires_grad=True)
    g.ndata["h"] = x

    def step() -> list[Tensor]:
        torch.manual_seed(2)
        if name == "update_all":
            g.update_all(dropped, dgl.function.sum("m", "out"))
            out = g.ndata["out"]
        else:
            g.apply_edges(dropped)
            out = g.edata["m"]
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        return [out, grad, torch.get_rng_state()]

    expected = step()
    for number in (1, 2):
        with fastgraph.enabled(min_edges=0):
            found = step()
        assert fastgraph.status().row(f"dgl.{name}").programs == number
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_features_of_edges_in_another_order_are_left_to_dgl() -> None:
    g = graph(random_edges(NODES, NODES, COUNT), NODES)
    g.ndata["h"] = torch.randn(NODES, 4)
    g.edata["w"] = torch.randn(4, COUNT).t()

    def message(edges: Any) -> dict[str, Tensor]:
        return {"m": F.dropout(edges.data["w"], 0.5) * edges.src["h"]}

    def step() -> Tensor:
        torch.manual_seed(2)
        g.update_all(message, dgl.function.sum("m", "out"))
        out: Tensor = g.ndata["out"]
        return out

    expected = step()
    with fastgraph.enabled(min_edges=0), pytest.warns(fastgraph.FallbackWarning):
        found = step()
    assert torch.equal(found, expected)
    (reason,) = fastgraph.status().row("dgl.update_all").reasons
    assert "not contiguous" in reason
