"""Graphs of tensors that hold what earlier ones did are not sorted again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import FiLMConv, RGCNConv

import fastgraph
from fastgraph.graphs.edges import graph_of
from fastgraph.graphs.graph import Graph, beside
from fastgraph.graphs.repeats import REPEATS
from fastgraph.routing.switch import SWITCH
from tests.graphs import random_edges

pytestmark = pytest.mark.repeats

EDGES = random_edges(9, 9, 40, seed=0)


def graph(index: Tensor, num_nodes: int = 9, loops: int = 0) -> Graph:
    return graph_of(index, None, num_nodes, num_nodes, loops)


@pytest.fixture(autouse=True)
def nothing_cached() -> Iterator[None]:
    fastgraph.clear_cache()
    yield
    fastgraph.clear_cache()


def test_the_third_tensor_of_the_same_content_finds_the_graph_of_the_second() -> None:
    first, second = graph(EDGES.clone()), graph(EDGES.clone())
    assert second is not first
    assert graph(EDGES.clone()) is second
    assert graph(EDGES.int()) is not second
    for other in (EDGES.roll(1, 1), EDGES.flip(0), EDGES[:, 1:].clone()):
        assert graph(other) is not second
    assert graph(EDGES.clone(), 10) is not second
    assert graph(EDGES.clone(), loops=9) is not second
    found = graph(EDGES.clone(), loops=9)
    assert found is not second and graph(EDGES.clone(), loops=9) is found


def test_edges_that_are_not_side_by_side() -> None:
    wide = EDGES.repeat_interleave(2, dim=1)
    graph(wide[:, ::2])
    known = graph(wide.clone()[:, ::2])
    assert graph(wide.clone()[:, ::2]) is known
    assert torch.equal(torch.stack(known.edge_list()), EDGES)


def test_a_tensor_that_was_edited_is_another_one() -> None:
    graph(EDGES.clone())
    known, index = graph(EDGES.clone()), EDGES.clone()
    assert graph(index) is known
    index[0, 0] = (index[0, 0] + 1) % 9
    found = graph(index)
    assert found is not known and torch.equal(torch.stack(found.edge_list()), index)
    index.data[0, 0] = EDGES[0, 0]
    assert graph(index) is known


def test_other_edges_of_the_same_checksum_are_no_repetition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fastgraph.graphs.witness._checksums", lambda tensors: [1])
    graph(EDGES.clone())
    known, other = graph(EDGES.clone()), EDGES.roll(1, 1)
    found = graph(other)
    assert found is not known and torch.equal(torch.stack(found.edge_list()), other)
    assert graph(EDGES.roll(1, 1)) is found  # the one that was built last


def test_memory_is_bounded_and_given_back() -> None:
    several = [random_edges(9, 9, 40, seed=seed) for seed in range(8)]
    for index in (*several, *several):
        graph(index.clone())
    of_one = REPEATS.nbytes // len(several)
    assert of_one >= 40 * 8
    with fastgraph.enabled(cache_bytes=16 * 3 * of_one):
        assert REPEATS.nbytes == 3 * of_one
        used = graph(several[5].clone())
        graph(several[0].clone())
        assert REPEATS.nbytes == 3 * of_one and graph(several[5].clone()) is used
    with fastgraph.enabled(cache_bytes=0):
        assert REPEATS.nbytes == 0
        assert graph(EDGES.clone()) is not graph(EDGES.clone())
    fastgraph.clear_cache()
    assert REPEATS.nbytes == 0


def test_what_a_graph_learns_counts_from_its_next_use_on() -> None:
    graph(EDGES.clone())
    known, before = graph(EDGES.clone()), REPEATS.nbytes
    beside(known, "learnt", lambda: torch.zeros(100))
    assert REPEATS.nbytes == before
    assert graph(EDGES.clone()) is known and REPEATS.nbytes == before + 400
    fastgraph.clear_cache()


def test_wrong_edges_are_refused_each_time() -> None:
    wrong = EDGES.clone()
    wrong[1, 3] = 9
    for _ in range(3):
        with pytest.raises(IndexError, match="9"):
            graph(wrong.clone())


@pytest.mark.parametrize("layer", [RGCNConv(4, 3, 3), FiLMConv(4, 3, 3)], ids=["RGCN", "FiLM"])
@pytest.mark.filterwarnings("ignore::fastgraph.FallbackWarning")
def test_relations_that_are_masked_at_each_step_are_sorted_twice(
    layer: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layer.double()
    x = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    types = torch.arange(40) % 3
    sorted_edges: list[Tensor] = []
    made = Graph.__init__

    def counting(self: Graph, index: Tensor, *arguments: object, **named: object) -> None:
        sorted_edges.append(index)
        made(self, index, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Graph, "__init__", counting)
    with SWITCH.suspended():
        expected = layer(x, EDGES, types)
        wanted = torch.autograd.grad(expected.square().sum(), x)[0]
    with fastgraph.enabled(min_edges=0):
        for _ in range(4):
            found = layer(x, EDGES, types)
            torch.testing.assert_close(found, expected)
            grad = torch.autograd.grad(found.square().sum(), x)[0]
            torch.testing.assert_close(grad, wanted)
    assert len(sorted_edges) == 2 * 3
