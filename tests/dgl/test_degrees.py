"""Degrees that DGL counts by a CSC or a CSR, which message passing here needs none of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fastgraph
from tests.dgl.graphs import ORDINARY, dgl, graph, of_case
from tests.graphs import random_edges

dglnn = pytest.importorskip("dgl.nn.pytorch")

from fastgraph.dgl import structure  # noqa: E402  (it imports DGL)


def has_csc(g: Any) -> bool:
    return "csc" in g.formats()["created"]


def both(g: Any) -> list[Tensor]:
    return [g.in_degrees(), g.out_degrees()]


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("num_src", "num_dst", "edges"), [(30, 20, 90), (9, 40, 12), (3, 3, 0)])
def test_they_are_those_of_dgl(
    num_src: int,
    num_dst: int,
    edges: int,
    idtype: torch.dtype,
    sorted_graphs: list[fastgraph.Graph],
) -> None:
    index = random_edges(num_src, num_dst, edges).to(idtype)
    expected = both(graph(index, num_src, num_dst))
    g = graph(index, num_src, num_dst)
    with fastgraph.enabled(strict=True):
        found = both(g)
    assert g.formats()["created"] == ["coo"] and not sorted_graphs  # counted as edges are
    assert all(degrees.dtype == idtype for degrees in found + expected)
    assert all(map(torch.equal, found, expected))
    for degrees in found:
        degrees.zero_()  # is the caller's
    with fastgraph.enabled(strict=True):
        assert all(map(torch.equal, both(g), expected))


def test_layers_that_ask_for_them_find_their_edges_grouped(
    sorted_graphs: list[fastgraph.Graph],
) -> None:
    x = torch.randn(30, 40)
    for layer in (dglnn.GCN2Conv(40, 1), dglnn.ChebConv(40, 40, 3)):
        more = (x,) if isinstance(layer, dglnn.GCN2Conv) else ([2.0],)
        expected = layer(of_case(ORDINARY), x, *more)
        g = of_case(ORDINARY)
        sorted_graphs.clear()
        with fastgraph.enabled(strict=True):
            torch.testing.assert_close(layer(g, x, *more), expected)
        assert len(sorted_graphs) == 1 and not has_csc(g)


def test_of_some_nodes_or_with_a_csc_or_on_small_graphs_dgl_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = of_case(ORDINARY).in_degrees()
    with fastgraph.enabled(strict=True):
        for nodes in ([3, 5], [5], list(range(29, -1, -1))):
            g = of_case(ORDINARY)
            assert g.in_degrees(nodes).tolist() == expected[nodes].tolist()
            assert has_csc(g)
        with torch.autocast("cpu", torch.bfloat16):
            g = of_case(ORDINARY)
            assert torch.equal(g.in_degrees(), expected) and has_csc(g)
        index = g.adj_tensors("csc")[1]
        assert torch.equal(g.in_degrees(), expected) and len(index) == g.num_edges()
        with fastgraph.enabled(min_edges=151):
            g = of_case(ORDINARY)
            assert torch.equal(g.in_degrees(), expected) and has_csc(g)
    monkeypatch.delenv("FASTGRAPH_MIN_EDGES")
    with fastgraph.enabled(strict=True):
        g = of_case(ORDINARY)
        assert torch.equal(g.in_degrees(), expected) and has_csc(g)


def test_of_several_relations() -> None:
    edges = {("a", name, "a"): tuple(random_edges(9, 9, 40, seed=s)) for s, name in enumerate("rs")}
    expected = [dgl.heterograph(edges).in_degrees(etype=name) for name in "rs"]
    g = dgl.heterograph(edges)
    with fastgraph.enabled(strict=True):
        found = [g.in_degrees(etype=name) for name in "rs"]
        single, out = g["s"].in_degrees(), g["s"].out_degrees()
    assert all(map(torch.equal, found, expected)) and torch.equal(single, expected[1])
    assert out.tolist() == edges["a", "s", "a"][0].bincount(minlength=9).tolist()


def test_attention_that_is_left_to_dgl_has_no_edges_grouped_twice(
    monkeypatch: pytest.MonkeyPatch, sorted_graphs: list[fastgraph.Graph]
) -> None:
    monkeypatch.delenv("FASTGRAPH_MIN_EDGES")
    nodes, edges = 3000, 42_000  # for so many, sums are routed where gradients are recorded
    ends = torch.arange(edges)
    g = dgl.graph((ends * 7 % nodes, ends % nodes), num_nodes=nodes)
    x, of_edges = torch.randn(nodes, 1), torch.randn(edges, 1)
    with fastgraph.enabled(strict=True):
        dglnn.EdgeGATConv(1, 1, 1, 1)(g, x, of_edges).sum().backward()
    assert sorted_graphs == [] and has_csc(g)
    assert fastgraph.status().row("EdgeGATConv").fell_back == 1


def test_they_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no edges are ever grouped, as sums are left to DGL."""
    g, counted = graph(random_edges(30, 20, 90), 30, 20), []
    count = structure._counted

    def counting(*given: Any) -> Tensor:
        counted.append(given)
        return count(*given)

    monkeypatch.setattr(structure, "_counted", counting)
    with fastgraph.enabled(strict=True):
        first = both(g)
        for degrees in both(g):
            degrees.zero_()
        assert all(map(torch.equal, both(g), first)) and len(counted) == 2
