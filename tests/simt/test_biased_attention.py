"""The CUDA kernels of attention with a bias, executed by the emulator, beside the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastgraph.graphs.graph import Graph
from fastgraph.ops.score_bias import ENTRY_TYPES
from fastgraph.plugins.backend import FLOATING
from tests.native.cases import normal
from tests.simt.compared import CASES, assert_same_in_every_order, graph_of, simt
from tests.simt.test_attention import (
    assert_close,
    check,
    gradients_of,
    inputs_of,
    reference,
    widened,
)

OPERATOR = "biased_attention"
KINDS = ("edges", "types", "both")


def biased(
    graph: Graph,
    heads: int,
    width: int,
    dtype: torch.dtype,
    kind: str,
    *,
    edge_dim: int = 0,
    transpose: bool = False,
    types: int = 5,
    of_types: torch.dtype = torch.uint8,
) -> list[Any]:
    """Inputs with a bias of each edge, one of each type, or both."""
    inputs = inputs_of("attention", graph, heads, width, dtype, edge_dim, transpose)
    bias = table = index = None
    if kind != "types":
        bias = normal(graph.num_edges, heads, dtype=dtype, seed=20)
    if kind != "edges":
        table = normal(types, heads, dtype=dtype, seed=21)
        generator = torch.Generator().manual_seed(22)
        index = torch.randint(types, (graph.num_edges,), generator=generator).to(of_types)
    return [*inputs, bias, table, index]


@pytest.mark.parametrize("transpose", [False, True], ids=["forward", "transposed"])
@pytest.mark.parametrize("edge_dim", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_every_graph(name: str, kind: str, edge_dim: int, transpose: bool) -> None:
    graph = graph_of(name)
    inputs = biased(graph, 2, 12, torch.float32, kind, edge_dim=edge_dim, transpose=transpose)
    check(OPERATOR, graph, inputs, transpose)


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("width", [0, 1, 8, 33, 64, 300, 1100])
def test_every_layout(width: int, dtype: torch.dtype) -> None:
    graph = graph_of("random")
    check(OPERATOR, graph, biased(graph, 2, width, dtype, "both"))


@pytest.mark.parametrize("of_types", ENTRY_TYPES)
def test_types_of_every_dtype(of_types: torch.dtype) -> None:
    graph = graph_of("hub")
    check(OPERATOR, graph, biased(graph, 3, 8, torch.float32, "types", of_types=of_types))


def test_dropout_hits_the_entries_that_it_hits_without_a_bias() -> None:
    graph = graph_of("cut")
    inputs = biased(graph, 2, 16, torch.float32, "both", edge_dim=2)
    check(OPERATOR, graph, inputs, dropout=0.4, seed=2**40 + 3)


def test_many_types_and_more_edges_than_a_group() -> None:
    index = torch.randint(40, (2, 3000), generator=torch.Generator().manual_seed(0))
    graph = Graph(index, 40, 40)
    check(OPERATOR, graph, biased(graph, 2, 8, torch.float64, "types", types=100))
    check(OPERATOR, graph, biased(graph, 2, 8, torch.float64, "types", types=1))


@pytest.mark.parametrize("name", ["hub", "cut"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_a_bias_hides_have_no_share(kind: str, name: str) -> None:
    """Their output is the addend, and nothing that they gather has a gradient of theirs."""
    graph = graph_of(name)
    inputs = biased(graph, 2, 12, torch.float32, kind)
    *_, bias, table, index = inputs
    of_edges = CASES[name].edge_index[1]
    largest = int(of_edges.bincount().argmax())
    hidden = (of_edges == largest) | (of_edges % 3 == 0)
    if bias is not None:
        bias[hidden, 0] = -torch.inf
    else:
        table[4, 0] = -torch.inf
        index[hidden] = 4
    check(OPERATOR, graph, inputs)
    addend = normal(1, 2, 12, dtype=torch.float32, seed=30)
    out, stats, alpha = simt(OPERATOR, graph, *inputs, False, 0.3, 0.0, 0, True, addend=addend)
    assert torch.equal(out[largest, 0], addend[0, 0])
    assert not stats[largest, 0].any()
    assert not alpha[of_edges == largest, 0].any()


@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_the_order_of_threads(kind: str) -> None:
    graph = graph_of("cut")
    inputs = biased(graph, 2, 16, torch.float32, kind)
    options = (False, 0.25, 0.0, 0)
    out, stats, alpha = simt(OPERATOR, graph, *inputs, *options, True)
    grads = gradients_of(out, stats, alpha)
    assert_same_in_every_order(OPERATOR, graph, *inputs, *options, True)
    assert_same_in_every_order(f"{OPERATOR}_backward", graph, *grads, *inputs, stats, *options)


@pytest.mark.parametrize("given", ["bias", "table"])
def test_a_bias_alone_has_the_gradient_of_scores(given: str) -> None:
    graph = graph_of("random")
    inputs = biased(graph, 4, 8, torch.float64, "edges" if given == "bias" else "types")
    options = (False, 0.5, 0.0, 0)
    out, stats, _ = simt(OPERATOR, graph, *inputs, *options, True)
    grads: list[Tensor | None] = [normal(*out.shape, dtype=torch.float64, seed=5), None, None]
    found = simt(f"{OPERATOR}_backward", graph, *grads, *inputs, stats, *options)
    wide = [*grads, *widened(inputs), stats]
    expected = reference(f"{OPERATOR}_backward", graph, *wide, *options)
    place = 4 if given == "bias" else 5
    assert_close(found[place], expected[place], torch.float64)
    assert found[6] is None
