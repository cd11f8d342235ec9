"""What message passing on a GPU is compared with."""

from __future__ import annotations

import copy
import importlib.util
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from measure.graphs import GraphData
from measure.layers import LAYERS, csr_adjacency, gcn_adjacency, without_linear
from measure.routing import expect_routed, ours_enabled

HEADS = 4
# A dense mask of pairs beyond this does not fit or takes too long to make.
_MAX_FLEX_NODES = 20_000

Forward = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Rival:
    """A way to compute the message passing of one layer.

    Args:
        name: the column.
        forward: from features ``[nodes, width]`` to the output.
        context: entered around some forward passes, untimed.
    """

    name: str
    forward: Forward
    context: Callable[[], AbstractContextManager[object]] = nullcontext


def rivals(
    layer: str, graph: GraphData, width: int, dtype: torch.dtype, compiled: bool
) -> list[Rival]:
    """All that can compute this layer on this graph, upstream and ours first."""
    module = _message_passing(layer, width).to(graph.edge_index.device, dtype)
    index = graph.edge_index

    def forward(x: Tensor) -> Tensor:
        return module(x, index)  # type: ignore[no-any-return]

    @contextmanager
    def routed() -> Iterator[None]:
        with ours_enabled(), expect_routed(module):
            yield

    found = [Rival("upstream", forward), Rival("ours", forward, routed)]
    if compiled:
        traced = torch.compile(copy.deepcopy(module))
        found.append(Rival("compile", lambda x: traced(x, index)))
    if layer in ("GCN", "SAGE-mean") and dtype == torch.float32:
        found.append(_sparse(layer, graph))
    if layer == "Transformer" and _fits_a_mask(graph):
        found.append(_flex(graph))
    return found + _turbo(layer, graph, module, dtype)


def _message_passing(layer: str, width: int) -> nn.Module:
    case = LAYERS[layer]
    options = {"out_channels": width // HEADS, "bias": False} if case.options.get("heads") else {}
    if layer == "Transformer":
        options["root_weight"] = False
    return without_linear(case.build(width, **options, **(case.bare_options or {})))


def _sparse(layer: str, graph: GraphData) -> Rival:
    """torch.sparse, which calls cuSPARSE, on a matrix that an expert makes once."""
    index, num = graph.edge_index, graph.num_nodes
    if layer == "GCN":
        matrix = gcn_adjacency(index, num)
    else:
        degree = torch.bincount(index[1], minlength=num).clamp(min=1)
        matrix = csr_adjacency(index, num, degree.float().reciprocal()[index[1]])
    return Rival("torch.sparse", lambda x: torch.sparse.mm(matrix, x))


def _fits_a_mask(graph: GraphData) -> bool:
    if graph.num_nodes > _MAX_FLEX_NODES or graph.edge_index.device.type != "cuda":
        return False
    keys = graph.edge_index[1] * graph.num_nodes + graph.edge_index[0]
    return bool(keys.unique().numel() == keys.numel())


def _flex(graph: GraphData) -> Rival:
    """``flex_attention`` over a block mask of the edges."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    num = graph.num_nodes
    pairs = torch.zeros(num, num, dtype=torch.bool, device=graph.edge_index.device)
    pairs[graph.edge_index[1], graph.edge_index[0]] = True
    mask = create_block_mask(
        lambda b, h, q, k: pairs[q, k], None, None, num, num, device=str(pairs.device)
    )
    attend = torch.compile(flex_attention)

    def forward(x: Tensor) -> Tensor:
        heads = x.view(num, HEADS, -1).transpose(0, 1).unsqueeze(0)
        out = attend(heads, heads, heads, block_mask=mask)
        return out[0].transpose(0, 1).reshape(num, -1)  # type: ignore[no-any-return]

    return Rival("flex_attention", forward)


def _turbo(layer: str, graph: GraphData, module: Any, dtype: torch.dtype) -> list[Rival]:
    """The published fused kernels (arXiv 2605.31500), where their package is installed."""
    if dtype != torch.float32 or importlib.util.find_spec("turbo_gnn") is None:
        return []
    turbo = importlib.import_module("turbo_gnn")
    index, num = graph.edge_index, graph.num_nodes
    adjacency = turbo.AdjacencyForwardBackwardWithNodeBuckets.from_edge_list(
        index.cpu(), num_nodes=num
    ).to(index.device)

    def gatv2(x: Tensor) -> Tensor:
        heads = x.view(num, HEADS, -1)
        options = {"attention_weights": module.att[0], "negative_slope": 0.2}
        return turbo.gatv2_aggr(adjacency, heads, x_neighbors=heads, **options)  # type: ignore[no-any-return]

    def attention(x: Tensor) -> Tensor:
        heads = x.view(num, HEADS, -1)
        scale = 1 / math.sqrt(heads.shape[-1])
        return turbo.graph_transformer_aggr(  # type: ignore[no-any-return]
            adjacency, heads, Q=heads, K=heads, V=heads, scale=scale
        )

    known: dict[str, Forward] = {
        "SAGE-max": lambda x: turbo.reduction_aggr(adjacency, x, reduce="max"),
        "GATv2": gatv2,
        "Transformer": attention,
    }
    return [Rival("turbo-gnn", known[layer])] if layer in known else []
