"""GPSConv with a bias of pairs beside PyG's, whose attention takes that as a mask of one graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GPSConv as OfPyG

import fastgraph
from fastgraph.nn import GPSConv
from tests.graphs import random_edges
from tests.pyg.gps_layers import BATCH, CHANNELS, HEADS, NODES, SIZES, Masked, features, layer

TYPES = 5
PAIRS = sum(size * size for size in SIZES)
EDGES = random_edges(NODES, NODES, 3 * NODES)


def by_upstream(module: OfPyG, x: Tensor, of_pairs: Tensor) -> Tensor:
    """The result of PyG's layer whose attention is given a mask of pairs ``[pairs, heads]``."""
    attention, largest = Masked(CHANNELS, HEADS, batch_first=True).double(), max(SIZES)
    attention.load_state_dict(module.attn.state_dict())
    for name, parameter in module.attn.named_parameters():
        owner, _, last = name.rpartition(".")
        attention.get_submodule(owner)._parameters[last] = parameter
    masks, first = [], 0
    for size in SIZES:
        own = of_pairs[first : first + size * size].view(size, size, HEADS).permute(2, 0, 1)
        masks.append(nn.functional.pad(own, (0, largest - size, 0, largest - size)))
        first += size * size
    attention.mask = torch.cat(masks)
    other = copy.copy(module)
    other._modules = module._modules | {"attn": attention}
    return OfPyG.forward(other, x, EDGES, BATCH)


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("kind", ["pairs", "table"])
def test_outputs_and_gradients(kind: str, enabled: bool) -> None:
    module, x = layer(), features()
    types = torch.randint(0, TYPES, (PAIRS,)).to(torch.uint8)
    rows = PAIRS if kind == "pairs" else TYPES
    bias = torch.randn(rows, HEADS, dtype=torch.float64, requires_grad=True)
    given = {"attn_bias": bias} | ({"pair_type": types} if kind == "table" else {})
    learned = (x, bias, *module.parameters())
    truth = by_upstream(module, x, bias if kind == "pairs" else bias[types.long()])
    if enabled:
        with fastgraph.enabled():
            out = module(x, EDGES, BATCH, **given)
    else:
        out = module(x, EDGES, BATCH, **given)
    torch.testing.assert_close(out, truth)
    grad = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad(y, learned, grad) for y in (out, truth))
    for gradient, exact in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, exact)


def test_without_a_bias_it_is_upstreams() -> None:
    own, theirs, x = layer(), layer(OfPyG), features()
    theirs.load_state_dict(own.state_dict())
    assert torch.equal(own(x, EDGES, BATCH), theirs(x, EDGES, BATCH))
    with fastgraph.enabled(strict=True):
        torch.testing.assert_close(own(x, EDGES, BATCH), theirs(x, EDGES, BATCH))
    assert repr(own) == repr(theirs)


def test_a_batch_is_its_graphs_one_by_one() -> None:
    module, x = layer(norm=None).eval(), features()  # PyG's norm of one graph is another
    bias = torch.randn(PAIRS, HEADS, dtype=torch.float64)
    node, pair, outs = 0, 0, []
    for size in SIZES:
        own = bias[pair : pair + size * size]
        outs.append(module(x[node : node + size], EDGES[:, :0], attn_bias=own))
        node, pair = node + size, pair + size * size
    torch.testing.assert_close(module(x, EDGES[:, :0], BATCH, attn_bias=bias), torch.cat(outs))


def test_no_nodes() -> None:
    bias = torch.zeros(0, HEADS, dtype=torch.float64)
    out = layer(norm=None)(features()[:0], EDGES[:, :0], BATCH[:0], attn_bias=bias)
    assert out.shape == (0, CHANNELS)


def test_autocast_and_dropout() -> None:
    module, x = layer(attn_kwargs={"dropout": 0.5}).float(), features().float()
    table, found = torch.randn(TYPES, HEADS, requires_grad=True), []
    types = torch.randint(0, TYPES, (PAIRS,)).to(torch.int16)
    for _ in range(2):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            found.append(module(x, EDGES, BATCH, attn_bias=table, pair_type=types))
    assert torch.equal(*found)
    (gradient,) = torch.autograd.grad(found[0].float().square().sum(), table)
    assert gradient.dtype == torch.float32 and gradient.any()


@pytest.mark.parametrize(
    ("options", "given", "text"),
    [
        (
            {},
            {"attn_bias": torch.zeros(3, HEADS).double()},
            rf"bias must have shape \[{PAIRS}, 3\]",
        ),
        ({}, {"pair_type": torch.zeros(PAIRS).byte()}, "pair_type must be None without attn_bias"),
        ({"attn_type": "performer"}, {}, "attn_bias needs attn_type 'multihead', got 'performer'"),
        ({"attn_kwargs": {"add_zero_attn": True}}, {}, "cannot compute with attn_bias: .*add_zero"),
        ({}, {"batch": BATCH.flip(0)}, "cannot compute with attn_bias: batch is not sorted"),
        ({}, {"batch": BATCH[1:]}, "cannot compute with attn_bias: batch is no int64 for each"),
    ],
)
def test_bad_input(options: dict[str, Any], given: dict[str, Any], text: str) -> None:
    arguments: dict[str, Any] = {"batch": BATCH}
    if "pair_type" not in given:
        arguments["attn_bias"] = torch.zeros(PAIRS, HEADS).double()
    if "attn_type" in options:
        torch.manual_seed(5)
        module = GPSConv(CHANNELS, None, HEADS, norm=None, **options).double()
    else:
        module = layer(**options)
    with pytest.raises(ValueError, match=text):
        module(features(), EDGES, **(arguments | given))
