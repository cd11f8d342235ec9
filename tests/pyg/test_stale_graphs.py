"""Edits of edges and weights that torch does not count reach the next call, as upstream's."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric.nn import (
    GATConv,
    GATv2Conv,
    GCNConv,
    GraphConv,
    SAGEConv,
    SGConv,
    TransformerConv,
)

import fastgraph
from fastgraph import status
from tests.graphs import random_edges

# Where the emulator runs, the host finds edits; how a GPU does is in tests/simt/test_content.py.
pytestmark = pytest.mark.repeats

NODES, EDGES = 12, 60


def _step(conv: Any, *arguments: Any) -> list[Tensor]:
    """The output and the gradient of the features."""
    x, *rest = arguments
    x = x.detach().requires_grad_()
    out = conv(x, *rest)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), x)]


def _assert_like_upstream(conv: Any, *arguments: Any) -> None:
    calls = status().row(type(conv).__name__).routed
    with fastgraph.enabled(min_edges=0):
        ours = _step(conv, *arguments)
    assert status().row(type(conv).__name__).routed > calls
    for a, b in zip(ours, _step(conv, *arguments), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "Adagrad"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("view", ["data", "detach"])
def test_optimizers_of_edge_weights(view: str, fused: bool, optimizer: str) -> None:
    """``.data`` has version 0 for ever, and fused optimizers count no version at all."""
    conv, x, edges = GCNConv(4, 4), torch.randn(NODES, 4), random_edges(NODES, NODES, EDGES)
    weight = torch.nn.Parameter(torch.rand(EDGES))
    stepping = getattr(torch.optim, optimizer)([weight], lr=0.3, fused=fused)
    for _ in range(3):
        current = weight.data if view == "data" else weight.detach()
        _assert_like_upstream(conv, x, edges, current)
        weight.grad = torch.randn(EDGES)
        stepping.step()
        with torch.no_grad():  # as upstream, which takes roots of degrees, would want it
            weight.data.clamp_(0.05)


def _through_data(tensor: Tensor) -> Tensor:
    return tensor.data


def _through_numpy(tensor: Tensor) -> Tensor:
    return torch.from_numpy(tensor.numpy())


def _through_dlpack(tensor: Tensor) -> Tensor:
    return torch.from_dlpack(tensor.detach())


def _through_storage(tensor: Tensor) -> Tensor:
    alias = torch.empty(0, dtype=tensor.dtype)
    return alias.set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def _through_memory(tensor: Tensor) -> Tensor:
    """As a library in another language has it."""
    assert tensor.is_contiguous()
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


BACK_DOORS: dict[str, Callable[[Tensor], Tensor]] = {
    "data": _through_data,
    "numpy": _through_numpy,
    "dlpack": _through_dlpack,
    "storage": _through_storage,
    "memory": _through_memory,
}

LAYERS: dict[str, Callable[[], Any]] = {
    "GCNConv": lambda: GCNConv(4, 4),
    "GCNConv without loops": lambda: GCNConv(4, 4, add_self_loops=False),
    "SGConv": lambda: SGConv(4, 4),
    "GraphConv": lambda: GraphConv(4, 4),
    "SAGEConv max": lambda: SAGEConv(4, 4, aggr="max"),
    "SAGEConv mean": lambda: SAGEConv(4, 4),
    "GATConv": lambda: GATConv(4, 2, heads=2),
    "GATv2Conv": lambda: GATv2Conv(4, 2, heads=2),
    "TransformerConv": lambda: TransformerConv(4, 2, heads=2),
}


@pytest.mark.parametrize("back_door", BACK_DOORS)
@pytest.mark.parametrize("layer", LAYERS)
def test_edges_written_through_a_back_door(layer: str, back_door: str) -> None:
    conv, x, edges = LAYERS[layer](), torch.randn(NODES, 4), random_edges(NODES, NODES, EDGES)
    for seed in range(3):
        _assert_like_upstream(conv, x, edges)
        version = edges._version
        BACK_DOORS[back_door](edges).copy_(random_edges(NODES, NODES, EDGES, seed=seed + 1))
        assert edges._version == version or back_door == "storage"


def _parts(matrix: Tensor) -> tuple[Tensor, ...]:
    if matrix.layout == torch.sparse_coo:
        return (matrix._indices(),)
    return matrix.crow_indices(), matrix.col_indices()


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo])
@pytest.mark.parametrize("layer", ["GraphConv", "GATv2Conv", "TransformerConv"])
def test_a_sparse_matrix_whose_parts_are_edited(layer: str, layout: torch.layout) -> None:
    conv, x = LAYERS[layer](), torch.randn(NODES, 4)
    dense = (torch.rand(NODES, NODES) < 0.4).float()
    matrix = dense.to_sparse(layout=layout)
    for _ in range(3):
        _assert_like_upstream(conv, x, matrix)
        dense = dense.roll(1, dims=1)  # as many entries in each row
        for own, other in zip(_parts(matrix), _parts(dense.to_sparse(layout=layout)), strict=True):
            own.numpy()[:] = other.numpy()


def test_compiled_code_that_edits_its_argument() -> None:
    @torch.compile(backend="eager")
    def reverse(edges: Tensor) -> None:
        edges.copy_(edges.flip(0))

    conv, x, edges = GraphConv(4, 4), torch.randn(NODES, 4), random_edges(NODES, NODES, EDGES)
    for _ in range(3):
        _assert_like_upstream(conv, x, edges)
        reverse(edges)


def test_another_thread_edits() -> None:
    conv, x, edges = GCNConv(4, 4), torch.randn(NODES, 4), random_edges(NODES, NODES, EDGES)
    array = edges.numpy()
    for seed in range(3):
        _assert_like_upstream(conv, x, edges)
        other = random_edges(NODES, NODES, EDGES, seed=seed + 7).numpy()
        thread = threading.Thread(target=lambda other=other: array.__setitem__(..., other))
        thread.start()
        thread.join()


def test_an_edit_between_forward_and_backward() -> None:
    """The gradient is that of one graph: the one before the edit, or as upstream the one after."""
    x = torch.randn(NODES, 4, requires_grad=True)
    edges = random_edges(NODES, NODES, EDGES)
    conv = SAGEConv(4, 4, aggr="sum", root_weight=False, bias=False)

    def gradient(before: Tensor, after: Tensor, ours: bool) -> Tensor:
        given = before.clone()
        with fastgraph.enabled(min_edges=0) if ours else torch.enable_grad():
            out = conv(x, given)
            given.numpy()[:] = after.numpy()
            return torch.autograd.grad(out.sum(), x)[0]

    other = edges.flip(0)
    found = gradient(edges, other, ours=True)
    candidates = [gradient(edges, edges, ours=False), gradient(other, other, ours=False)]
    assert any(torch.allclose(found, candidate) for candidate in candidates)


# One edit, of part of a tensor, by one of the ways above or by torch's own.
EDITS = st.tuples(
    st.sampled_from(["edges", "weight"]),
    st.sampled_from([*BACK_DOORS, "torch", "new"]),
    st.integers(0, EDGES - 1),
    st.integers(1, 8),
    st.integers(0, 2**31 - 1),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    layer=st.sampled_from([*LAYERS]),
    edits=st.lists(EDITS, min_size=1, max_size=5),
    dtype=st.sampled_from([torch.int64, torch.int32]),
    transposed=st.booleans(),
)
def test_any_sequence_of_edits(
    layer: str, edits: list[tuple[str, str, int, int, int]], dtype: torch.dtype, transposed: bool
) -> None:
    torch.manual_seed(0)
    conv, x = LAYERS[layer](), torch.randn(NODES, 4)
    edges = random_edges(NODES, NODES, EDGES).to(dtype)
    if transposed:
        edges = edges.t().contiguous().t()
    weight = torch.rand(EDGES) + 0.1
    weighted = "GCN" in layer or layer in ("SGConv", "GraphConv")
    forward_only = dtype == torch.int32  # torch's own gradients for these are wrong

    def compare() -> None:
        arguments = (x, edges, weight) if weighted else (x, edges)
        if forward_only:
            with torch.no_grad():
                expected = conv(*arguments)
                with fastgraph.enabled(min_edges=0):
                    torch.testing.assert_close(conv(*arguments), expected)
        else:
            _assert_like_upstream(conv, *arguments)

    compare()
    for name, way, start, length, seed in edits:
        tensor = edges if name == "edges" else weight
        generator = torch.Generator().manual_seed(seed)
        part = tensor[..., start : start + length]
        if name == "edges":
            drawn = torch.randint(0, NODES, part.shape, generator=generator, dtype=dtype)
        else:
            drawn = torch.rand(part.shape, generator=generator) + 0.1
        if way == "new":
            tensor = tensor.clone()
            edges, weight = (tensor, weight) if name == "edges" else (edges, tensor)
        back_door = BACK_DOORS.get(way, lambda tensor: tensor)
        if way == "memory" and not tensor.is_contiguous():
            back_door = BACK_DOORS["numpy"]
        back_door(tensor)[..., start : start + length] = drawn
        compare()
