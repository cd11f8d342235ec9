"""GPSConv whose attention takes turns, beside PyG's with the same parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.nn import GPSConv as OfPyG
from torch_geometric.utils import to_torch_csr_tensor

import fastgraph
from fastgraph.nn import Schedule, dual_pattern
from tests.pyg.gps_layers import BATCH, CHANNELS, HEADS, NODES, Masked, features, layer

# Some directions of a ring of each graph.
EDGES = torch.stack([torch.arange(NODES - 1), torch.arange(1, NODES)])
EDGES = EDGES[:, BATCH[EDGES[0]] == BATCH[EDGES[1]]]


def sparse() -> OfPyG:
    return layer(norm=None, attn_type="dual", attn_kwargs={"layers": 2, "layer": 1})


@pytest.mark.parametrize("enabled", [False, True])
def test_dense_turns_are_pygs(enabled: bool) -> None:
    own, theirs, x = layer(attn_type="dual"), layer(OfPyG), features()
    own.load_state_dict(theirs.state_dict())
    truth = theirs(x, EDGES, BATCH)
    if enabled:
        with fastgraph.enabled():
            out = own(x, EDGES, BATCH)
    else:
        out = own(x, EDGES, BATCH)
    torch.testing.assert_close(out, truth)
    grad = torch.randn_like(out)
    ours = torch.autograd.grad(out, [x, *own.parameters()], grad)
    torch.testing.assert_close(ours, torch.autograd.grad(truth, [x, *theirs.parameters()], grad))
    theirs.load_state_dict(own.state_dict())
    assert "attn_type=dual" in repr(own)


@pytest.mark.parametrize("given", ["edges", "pattern", "EdgeIndex"])
def test_sparse_turns_are_pygs_with_a_mask(given: str) -> None:
    # PyG's norm of one graph is another.
    own, theirs, x = sparse(), layer(OfPyG, norm=None), features()
    masked = Masked(CHANNELS, HEADS, batch_first=True).double()
    masked.load_state_dict(theirs.attn.state_dict())
    pairs = torch.eye(NODES, dtype=torch.bool)
    pairs[EDGES[1], EDGES[0]] = True
    masked.mask = ~pairs
    theirs.attn = masked
    own.load_state_dict(theirs.state_dict())
    truth = theirs(x, EDGES)  # as one graph, whose pairs are hidden
    if given == "pattern":
        out = own(x, EDGES, BATCH, pattern=dual_pattern(EDGES, NODES, BATCH))
    else:
        edges = EdgeIndex(EDGES, sparse_size=(NODES, NODES)) if given == "EdgeIndex" else EDGES
        out = own(x, edges, BATCH)
    torch.testing.assert_close(out, truth)
    grad = torch.randn_like(out)
    ours, exact = (torch.autograd.grad(y, x, grad) for y in (out, truth))
    torch.testing.assert_close(ours, exact)


def test_schedules_and_resets() -> None:
    schedule = Schedule("step", 2, evaluation="sparse")
    own, x = layer(attn_type="dual", attn_kwargs={"schedule": schedule}), features()
    outs = []
    for _ in range(3):
        outs.append(own(x, EDGES, BATCH))
        schedule.step()
    assert torch.equal(outs[0], outs[2]) and not torch.allclose(outs[0], outs[1])
    own.reset_parameters()
    assert not own.attn.in_proj_bias.any()


@pytest.mark.parametrize(
    ("options", "given", "error", "text"),
    [
        ({"attn_type": "dual"}, {"attn_bias": torch.zeros(9, 3)}, ValueError,
         "attn_bias: expected None with attn_type 'dual'.*'type_bias': True"),
        ({}, {"pattern": dual_pattern(EDGES, NODES)}, ValueError,
         "pattern: expected None with attn_type 'multihead'"),
        ({"attn_type": "dual"}, {"pattern": dual_pattern(EDGES, NODES, BATCH, token=True)},
         ValueError, "token: expected one for each graph, as the pattern has, got None"),
        ({"attn_type": "dual"}, {"pattern": dual_pattern(EDGES, NODES)}, ValueError,
         "batch: expected the graphs of the pattern, got others"),
        ({"attn_type": "dual"}, {"pattern": dual_pattern(EDGES, NODES, BATCH), "batch": None},
         ValueError, "batch: expected the graphs of the pattern, 4, for norm, .* got None"),
        ({"attn_type": "dual"}, {"edge_index": to_torch_csr_tensor(EDGES, size=NODES).double()},
         TypeError, r"edge_index: expected a tensor \[2, E\] with attn_type 'dual'"),
    ],
)  # fmt: skip
def test_bad_input(
    options: dict[str, Any], given: dict[str, Any], error: type[Exception], text: str
) -> None:
    arguments: dict[str, Any] = {"edge_index": EDGES, "batch": BATCH} | given
    with pytest.raises(error, match=text):
        layer(**options)(features(), **arguments)


def test_norms_of_all_nodes_need_no_batch_beside_a_pattern() -> None:
    own, x = layer(attn_type="dual", norm="batch_norm"), features()
    truth = own(x, EDGES, BATCH)
    assert torch.equal(own(x, EDGES, pattern=dual_pattern(EDGES, NODES, BATCH)), truth)


def test_unknown_kinds_are_pygs_error() -> None:
    with pytest.raises(ValueError, match="bigbird is not supported"):
        layer(attn_type="bigbird")
