"""Tensors of one call are on one device, whichever argument is elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgraph import ops
from tests.graphs import random_edges

NODES, EDGES, HEADS, CHANNELS = 6, 20, 2, 3


def _graph(compressed: bool) -> dict[str, Tensor]:
    index = random_edges(NODES, NODES, EDGES)
    if not compressed:
        return {"index": index}
    ptr = torch.linspace(0, EDGES, NODES + 1).long()
    return {"index": index[0].contiguous(), "ptr": ptr}


def _nodes() -> Tensor:
    return torch.randn(NODES, HEADS, CHANNELS)


def _edges(channels: int) -> Tensor:
    return torch.randn(EDGES, channels)


# The tensors of each operator but those of the graph.
OPERATORS: dict[str, tuple[Callable[..., Any], dict[str, Tensor]]] = {
    "spmm": (ops.spmm, {"x": torch.randn(NODES, 4), "weight": torch.randn(EDGES)}),
    "segment_reduce": (
        ops.segment_reduce,
        {"x": torch.randn(NODES, 4), "weight": torch.randn(EDGES)},
    ),
    "gat": (
        ops.gat,
        {
            "x": _nodes(),
            "score_src": torch.randn(NODES, HEADS),
            "score_dst": torch.randn(NODES, HEADS),
            "score_edge": _edges(HEADS),
            "addend": _nodes(),
        },
    ),
    "gat_with_scores": (
        ops.gat_with_scores,
        {"x": _nodes(), "att": torch.randn(2, HEADS, CHANNELS), "score_edge": _edges(HEADS)},
    ),
    "gatv2": (
        ops.gatv2,
        {
            "x_src": _nodes(),
            "x_dst": _nodes(),
            "att": torch.randn(1, HEADS, CHANNELS),
            "edge": _edges(4),
            "weight_edge": torch.randn(HEADS, 4, CHANNELS),
            "addend": _nodes(),
        },
    ),
    "attention": (
        ops.attention,
        {
            "query": torch.randn(NODES, HEADS, CHANNELS + 4),
            "key": _nodes(),
            "value": _nodes(),
            "edge": _edges(4),
        },
    ),
    "biased attention": (
        ops.attention,
        {"query": _nodes(), "key": _nodes(), "value": _nodes(), "bias": _edges(HEADS)},
    ),
    "block_attention": (
        ops.block_attention,
        {
            "query": _nodes(),
            "key": _nodes(),
            "value": _nodes(),
            "bias": torch.randn(3, HEADS),
            "bias_index": torch.arange(EDGES) % 3,
        },
    ),
    "edge_attention": (
        ops.edge_attention,
        {
            "query": _nodes(),
            "key": _nodes(),
            "value": _nodes(),
            "edge": _edges(4),
            "weight_edge": torch.randn(HEADS, 4, CHANNELS),
        },
    ),
}


def _to_meta(tensors: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {k: v.to("meta") if k in names else v for k, v in tensors.items()}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_one_tensor_elsewhere_is_refused(name: str, compressed: bool, requires_grad: bool) -> None:
    call, features = OPERATORS[name]
    leaves = {
        k: v.clone().requires_grad_(requires_grad and v.is_floating_point())
        for k, v in features.items()
    }
    if name == "segment_reduce":
        leaves["weight"] = features["weight"]
    tensors = {**leaves, **_graph(compressed)}
    call(**tensors)
    for elsewhere in tensors:
        with pytest.raises(ValueError, match=r"device.*(meta.*cpu|cpu.*meta)"):
            call(**_to_meta(tensors, elsewhere))


@pytest.mark.parametrize("name", OPERATORS)
def test_all_elsewhere_have_the_shape_of_the_result(name: str) -> None:
    call, features = OPERATORS[name]
    tensors = {**features, **_graph(False)}
    expected, found = call(**tensors), call(**_to_meta(tensors, *tensors))
    expected, found = (r[0] if isinstance(r, tuple) else r for r in (expected, found))
    assert (found.shape, found.dtype, found.device.type) == (expected.shape, expected.dtype, "meta")


def test_dense_attention() -> None:
    x, ptr = _nodes(), torch.tensor([0, NODES])
    for changed in ("query", "key", "value", "ptr"):
        tensors = {"query": x, "key": x, "value": x, "ptr": ptr}
        tensors[changed] = tensors[changed].to("meta")
        with pytest.raises(ValueError, match=r"device.*meta|meta.*device"):
            ops.dense_attention(**tensors)


def test_head_scores() -> None:
    x, att = _nodes(), torch.randn(2, HEADS, CHANNELS)
    for tensors in ((x.to("meta"), att), (x, att.to("meta"))):
        with pytest.raises(ValueError, match=r"device.*meta"):
            ops.head_scores(*tensors)
