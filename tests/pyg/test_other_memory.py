"""Tensors that are given other memory between the passes: ``tensor.data = other``.

torch counts no edit then. Upstream saves views of what it is given, which have their memory still,
and some tensors as they are: then its gradients are made of two contents, and ours are those of the
one that the forward pass saw.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric import utils

import fastgraph
from fastgraph import ops, sparse
from tests.graphs import random_edges

# What functions keep for their backward passes is the same for every backend.
pytestmark = pytest.mark.repeats

NODES, EDGES, CHANNELS = 12, 60, 10

Given = dict[str, Tensor]
Gradients = list[Tensor | None] | str

LAYERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "SAGEConv": (lambda: pyg.SAGEConv(CHANNELS, 4), "x edges"),
    "SAGEConv max": (lambda: pyg.SAGEConv(CHANNELS, 4, aggr="max"), "x edges"),
    "GraphConv": (lambda: pyg.GraphConv(CHANNELS, 4), "x edges weight"),
    "GraphConv mean": (lambda: pyg.GraphConv(CHANNELS, 4, aggr="mean"), "x edges weight"),
    "GraphConv max": (lambda: pyg.GraphConv(CHANNELS, 4, aggr="max"), "x edges weight"),
    "GINConv": (lambda: pyg.GINConv(nn.Linear(CHANNELS, 4)), "x edges"),
    "GCNConv": (lambda: pyg.GCNConv(CHANNELS, 4), "x edges weight"),
    "GCNConv cached": (lambda: pyg.GCNConv(CHANNELS, 4, cached=True), "x edges weight"),
    "GCNConv as given": (lambda: pyg.GCNConv(CHANNELS, 4, normalize=False), "x edges weight"),
    "GatedGraphConv": (lambda: pyg.GatedGraphConv(CHANNELS, 2), "x edges weight"),
    "TAGConv": (lambda: pyg.TAGConv(CHANNELS, 4), "x edges weight"),
    "GINEConv": (lambda: pyg.GINEConv(nn.Linear(CHANNELS, 4)), "x edges features"),
    "CGConv": (lambda: pyg.CGConv(CHANNELS, CHANNELS), "x edges features"),
    "ResGatedGraphConv": (
        lambda: pyg.ResGatedGraphConv(CHANNELS, 4, edge_dim=CHANNELS),
        "x edges features",
    ),
    "GATConv": (lambda: pyg.GATConv(CHANNELS, 4, 2, edge_dim=CHANNELS), "x edges features"),
    "GATv2Conv": (lambda: pyg.GATv2Conv(CHANNELS, 4, 2, edge_dim=CHANNELS), "x edges features"),
    "TransformerConv": (
        lambda: pyg.TransformerConv(CHANNELS, 4, 2, edge_dim=CHANNELS),
        "x edges features",
    ),
    "RGCNConv": (lambda: pyg.FastRGCNConv(CHANNELS, 4, 3), "x edges types"),
}

MIXED = {("TransformerConv", "features"), ("RGCNConv", "types"), ("softmax", "groups")}
"""Upstream's gradients are made of both contents."""

CALLS: dict[str, tuple[Callable[[], Callable[..., Tensor]], str]] = {
    **LAYERS,
    "scatter": (lambda: lambda f, g: utils.scatter(f * 1, g, 0, NODES, "mean"), "features groups"),
    "softmax": (lambda: lambda f, g: utils.softmax(f * 1, g, num_nodes=NODES), "features groups"),
}


def _tensors() -> Given:
    torch.manual_seed(1)
    return {
        "x": torch.randn(NODES, CHANNELS, dtype=torch.float64),
        "edges": random_edges(NODES, NODES, EDGES),
        "weight": torch.rand(EDGES, dtype=torch.float64) + 0.5,
        "features": torch.randn(EDGES, CHANNELS, dtype=torch.float64),
        "types": torch.randint(3, (EDGES,)),
        "groups": torch.randint(NODES, (EDGES,)),
    }


def give_other_memory(tensor: Tensor) -> None:
    tensor.data = tensor.detach().flip(-1)


def gradients(
    call: Any, names: str, changed: str | None, differentiated: str, edit: Any = give_other_memory
) -> Gradients:
    """The gradients of a call of which one tensor is changed between the passes, or the error."""
    tensors = _tensors()
    given = {name: tensors[name] for name in names.split()}
    leaves = [t.requires_grad_() for name, t in given.items() if name in differentiated.split()]
    out = call(*given.values())
    if changed is not None:
        edit(given[changed])
    wanted = [*leaves, *(call.parameters() if isinstance(call, nn.Module) else ())]
    loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()
    try:
        return list(torch.autograd.grad(loss, wanted, allow_unused=True))
    except RuntimeError as error:
        return str(error).partition(":")[0]


def _made(name: str) -> tuple[Any, str]:
    torch.manual_seed(0)
    make, names = CALLS[name]
    call = make()
    return (call.double() if isinstance(call, nn.Module) else call), names


CASES = [(name, changed) for name, (_, names) in CALLS.items() for changed in names.split()]


@pytest.mark.parametrize("differentiated", ["x features", "x weight features", ""])
@pytest.mark.parametrize(("name", "changed"), CASES)
def test_gradients_are_upstreams(name: str, changed: str, differentiated: str) -> None:
    call, names = _made(name)
    if name == "GraphConv max" and "weight" in differentiated:
        pytest.skip("left to PyG")
    if not differentiated and not isinstance(call, nn.Module):
        pytest.skip("nothing has a gradient")
    is_mixed = (name, changed) in MIXED
    expected = gradients(call, names, None if is_mixed else changed, differentiated)
    call, _ = _made(name)  # as it keeps what is cached
    fastgraph.status().reset()
    with fastgraph.enabled(min_edges=0):
        found = gradients(call, names, changed, differentiated)
    assert any(row.routed for row in fastgraph.status().rows)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", LAYERS)
def test_edges_that_are_set_are_an_error(name: str) -> None:
    """``set_`` gives other memory, too, and counts as an edit."""
    call, names = _made(name)
    edit = lambda tensor: tensor.set_(tensor.flip(1))  # noqa: E731
    expected = gradients(call, names, "edges", "x", edit)
    with fastgraph.enabled(min_edges=0):
        found = gradients(call, names, "edges", "x", edit)
    assert isinstance(expected, str) == isinstance(found, str)
    if isinstance(expected, str):
        assert found == expected
    else:
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["spmm", "segment_reduce", "gcn"])
def test_operators_keep_what_they_were_given(name: str) -> None:
    call = lambda x, edges: getattr(ops, name)(x, edges)  # noqa: E731
    expected = gradients(call, "x edges", None, "x")
    assert gradients(call, "x edges", "edges", "x")[0].equal(expected[0])  # type: ignore[union-attr]


def test_offsets_are_kept_as_they_were() -> None:
    tensors = _tensors()
    index, ptr = tensors["edges"][0].clone(), torch.arange(NODES + 1) * (EDGES // NODES)
    x = tensors["x"].requires_grad_()
    (expected,) = torch.autograd.grad(ops.spmm(x, index, ptr=ptr).square().sum(), x)
    out = ops.spmm(x, index, ptr=ptr)
    give_other_memory(index)
    ptr.data = torch.cat([torch.zeros(NODES), torch.tensor([EDGES])]).long()
    (found,) = torch.autograd.grad(out.square().sum(), x)
    torch.testing.assert_close(found, expected)


def test_a_sparse_matrix_stays_what_it_was_made_of() -> None:
    tensors = _tensors()
    indices, x = tensors["edges"], tensors["x"].requires_grad_()
    matrix = sparse.spmatrix(indices, tensors["weight"], shape=(NODES, NODES))
    expected = matrix.to_dense() @ x
    give_other_memory(indices)
    out = matrix @ x
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        torch.autograd.grad(out.square().sum(), x), torch.autograd.grad(expected.square().sum(), x)
    )
