"""Gradients of compiled layers are those of the edges in the forward pass, or an error."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch_geometric.nn import GATConv, GCNConv, SAGEConv, TransformerConv

import fastgraph
from fastgraph.graphs import passes
from fastgraph.graphs.passes import TOKEN_SHAPE
from tests.graphs import random_edges

NODES, EDGES = 30, 120
GIVEN = random_edges(NODES, NODES, EDGES)
OTHERS = GIVEN.flip(0)

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "GCN": lambda: GCNConv(16, 16),
    "SAGE": lambda: SAGEConv(16, 16),
    "SAGE max": lambda: SAGEConv(16, 16, aggr="max"),
    "GAT": lambda: GATConv(16, 8, heads=2),
    "Transformer": lambda: TransformerConv(16, 8, heads=2),
}

of_layers = pytest.mark.parametrize("name", LAYERS)


@pytest.fixture(autouse=True)
def ours() -> Iterator[None]:
    torch.manual_seed(0)
    fastgraph.clear_cache()
    with fastgraph.enabled(min_edges=0):
        yield
    torch.compiler.reset()


class Layer:
    """A compiled layer beside upstream's."""

    def __init__(self, name: str) -> None:
        self.conv = LAYERS[name]().double()
        self.compiled = torch.compile(self.conv, backend="aot_eager", fullgraph=True)
        self.x = torch.randn(NODES, 16, dtype=torch.float64, requires_grad=True)

    def gradient(self, out: Tensor, **options: Any) -> Tensor:
        return torch.autograd.grad(out.square().sum(), self.x, **options)[0]

    def expected(self, edges: Tensor) -> Tensor:
        fastgraph.disable()
        try:
            return self.gradient(self.conv(self.x, edges))
        finally:
            fastgraph.enable(min_edges=0)


def _edit_unseen(edges: Tensor, other: Tensor) -> None:
    version = edges._version
    edges.numpy()[:] = other.numpy()
    assert edges._version == version


@of_layers
def test_a_counted_edit_is_upstreams_error(name: str) -> None:
    layer, edges = Layer(name), GIVEN.clone()
    for _ in range(2):
        out = layer.compiled(layer.x, edges)
        edges.copy_(OTHERS)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            layer.gradient(out)


@of_layers
def test_what_is_forgotten_in_between_is_kept(name: str, looks: list[int]) -> None:
    layer, edges = Layer(name), GIVEN.clone()
    expected = layer.expected(edges)
    for _ in range(2):
        out = layer.compiled(layer.x, edges)
        fastgraph.clear_cache()
        looks.clear()
        _edit_unseen(edges, OTHERS)
        torch.testing.assert_close(layer.gradient(out, retain_graph=True), expected)
        layer.compiled(layer.x, edges)  # another graph is remembered for the same tensor
        torch.testing.assert_close(layer.gradient(out), expected)
        assert 2 * EDGES not in looks
        _edit_unseen(edges, GIVEN)


@of_layers
def test_what_never_fits_into_the_cache_is_kept(name: str) -> None:
    layer, edges = Layer(name), GIVEN.clone()
    expected = layer.expected(edges)
    with fastgraph.enabled(min_edges=0, cache_bytes=0):
        out = layer.compiled(layer.x, edges)
        _edit_unseen(edges, OTHERS)
        torch.testing.assert_close(layer.gradient(out), expected)


@of_layers
def test_two_forward_passes_on_one_tensor(name: str) -> None:
    layer, edges = Layer(name), GIVEN.clone()
    expected = layer.expected(GIVEN), layer.expected(OTHERS)
    first = layer.compiled(layer.x, edges)
    _edit_unseen(edges, OTHERS)
    second = layer.compiled(layer.x, edges)
    torch.testing.assert_close(layer.gradient(first, retain_graph=True), expected[0])
    torch.testing.assert_close(layer.gradient(second), expected[1])
    torch.testing.assert_close(layer.gradient(first), expected[0])


def _is_token(tensor: Tensor) -> bool:
    return tensor.dtype == torch.int64 and tensor.shape == TOKEN_SHAPE


def _from_file(tensor: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    loaded: Tensor = torch.load(file)
    return loaded


@of_layers
@pytest.mark.parametrize("copy", [Tensor.clone, _from_file])
def test_a_token_that_was_copied(name: str, copy: Callable[[Tensor], Tensor]) -> None:
    """Its original is gone, and all that is left of the edges is their checksum."""
    layer, edges = Layer(name), GIVEN.clone()
    expected = layer.expected(edges)
    copied: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        if not _is_token(tensor):
            return tensor
        copied.append(copy(tensor))
        return copied[-1]

    layer.compiled(layer.x, edges)
    for is_edited in (False, True):
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            out = layer.compiled(layer.x, edges)
        assert len(copied) == 1 + is_edited
        fastgraph.clear_cache()
        if not is_edited:
            torch.testing.assert_close(layer.gradient(out), expected)
            continue
        _edit_unseen(edges, OTHERS)
        with pytest.raises(RuntimeError, match="edges needed for gradient computation have been"):
            layer.gradient(out)


@of_layers
def test_all_that_is_saved_was_copied(name: str) -> None:
    layer, edges = Layer(name), GIVEN.clone()
    expected = layer.expected(edges)
    layer.compiled(layer.x, edges)
    with saved_tensors_hooks(Tensor.clone, lambda tensor: tensor):
        out = layer.compiled(layer.x, edges)
    fastgraph.clear_cache()
    _edit_unseen(edges, OTHERS)
    torch.testing.assert_close(layer.gradient(out), expected)


@of_layers
def test_graphs_go_with_what_needs_them(name: str) -> None:
    layer = Layer(name)
    before = len(passes._BY_NUMBER)
    out = layer.compiled(layer.x, GIVEN.clone())
    assert len(passes._BY_NUMBER) == before + 1
    layer.gradient(out)
    gc.collect()
    assert len(passes._BY_NUMBER) == before
    with torch.no_grad():
        layer.compiled(layer.x, GIVEN)
    assert len(passes._BY_NUMBER) == before


@of_layers
def test_threads(name: str) -> None:
    layer = Layer(name)
    graphs = [random_edges(NODES, NODES, EDGES, seed=seed) for seed in range(4)]
    expected = [layer.expected(edges) for edges in graphs]
    layer.gradient(layer.compiled(layer.x, graphs[0]))

    def work(edges: Tensor) -> list[Tensor]:
        return [layer.gradient(layer.compiled(layer.x, edges)) for _ in range(5)]

    with ThreadPoolExecutor(4) as pool:
        for found, wanted in zip(pool.map(work, graphs), expected, strict=True):
            for gradient in found:
                torch.testing.assert_close(gradient, wanted)


def test_weights_of_attention_that_nobody_uses() -> None:
    """The forward pass has numbered the edges for them, and the backward pass need not."""
    layer, edges = Layer("GAT"), GIVEN.clone()

    def forward(x: Tensor, edges: Tensor) -> Tensor:
        out: Tensor
        out, _ = layer.conv(x, edges, return_attention_weights=True)
        return out

    expected = layer.expected(edges)
    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)
    out = compiled(layer.x, edges)
    _edit_unseen(edges, OTHERS)
    torch.testing.assert_close(layer.gradient(out), expected)


def test_exported_operators_have_no_tokens() -> None:
    """A program that is saved runs in other processes."""

    class Sum(nn.Module):
        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            return fastgraph.ops.spmm(x, edges)

    x = torch.randn(NODES, 16, requires_grad=True)
    program = torch.export.export(Sum(), (x, GIVEN))
    for exported in (program, program.run_decompositions()):
        names = [str(node.target) for node in exported.graph.nodes]
        assert "fastgraph.spmm.default" in names
        torch.testing.assert_close(exported.module()(x, GIVEN), fastgraph.ops.spmm(x, GIVEN))
