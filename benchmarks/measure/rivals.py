"""The implementations that our message passing on a GPU is compared with."""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch_geometric.utils import add_self_loops, remove_self_loops

from measure.graphs import GraphData
from measure.layers import LAYERS, csr_adjacency, gcn_adjacency, without_linear
from measure.programs import PROGRAMS
from measure.routing import expect_routed

HEADS = 4
# What torch.compile makes of a mask addresses it by 32 bits, and this mask has a bit for each pair.
_MAX_FLEX_NODES = 2**17
_FLEX_BLOCK = 128

# Beside what we are measured. Packages of others have a process each, since they may crash or hang.
UPSTREAM = "upstream"
TURBO = "turbo-gnn"
COMPILED = ("compile", "flex_attention")
OTHERS = (TURBO, *COMPILED)
TURBO_LAYERS = ("GCN", "SAGE-mean", "SAGE-max", "GATv2", "Transformer")
# Where several kernels of ours may compute under the setting ``measure``: cuSPARSE takes part in
# sums, and tiles do in sums and attention. For these float32 would have to be tf32, which is
# another result than upstream's.
SUMS = ("GCN", "SAGE-mean")
COMPETING = {torch.float32: SUMS, torch.bfloat16: (*SUMS, "Transformer")}

Forward = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Rival:
    """A way to compute the message passing of one layer.

    Args:
        name: the column.
        make: prepares it and returns the forward pass, from features ``[nodes, width]``.
        ours: whether our kernels compute it, and they alone.
        measured: whether they do with the setting ``measure``, by which another one may take over.
    """

    name: str
    make: Callable[[], Forward]
    ours: bool = False
    measured: bool = False


def rivals(
    layer: str, graph: GraphData, width: int, dtype: torch.dtype, beside: str = UPSTREAM
) -> list[Rival]:
    """All that can compute this layer on this graph and are measured together.

    Args:
        beside: upstream, and we; or one of :data:`OTHERS`, beside which we are measured once more.
    """
    module = message_passing(layer, width).to(graph.edge_index.device, dtype)
    index = graph.edge_index

    def forward(x: Tensor) -> Tensor:
        return module(x, index)  # type: ignore[no-any-return]

    def make_ours() -> Forward:
        checked = False

        def ours(x: Tensor) -> Tensor:
            nonlocal checked
            if checked:
                return forward(x)
            with expect_routed(module):
                out = forward(x)
            checked = True
            return out

        return ours

    ours = [Rival("ours", make_ours, ours=True)]
    if layer in COMPETING.get(dtype, ()) and beside in (UPSTREAM, TURBO):
        ours.append(Rival("ours-measured", make_ours, ours=True, measured=True))
    if beside == TURBO:
        return [*ours, Rival(TURBO, lambda: _turbo(layer, graph, module, width))]
    if beside in COMPILED:
        # The backward pass of one forward pass is timed many times.
        functorch_config.donated_buffer = False
        if beside == "compile":
            return [*ours, Rival("compile", lambda: _compiled(module, index))]
        flex = [Rival("flex_attention", lambda: _flex(graph))] if _fits_a_mask(graph) else []
        return [*ours, *flex]
    found = [Rival("upstream", lambda: forward), *ours]
    if layer in SUMS and dtype == torch.float32:
        found.append(Rival("torch.sparse", lambda: _sparse(layer, graph)))
    return found


def _compiled(module: nn.Module, index: Tensor) -> Forward:
    traced = torch.compile(copy.deepcopy(module))
    return lambda x: traced(x, index)


def message_passing(layer: str, width: int) -> nn.Module:
    """A layer of so many channels, and heads, that is nothing but message passing."""
    case = (LAYERS | PROGRAMS)[layer]
    options = {"out_channels": width // HEADS, "bias": False} if case.options.get("heads") else {}
    if layer == "Transformer":
        options["root_weight"] = False
    module = case.build(width, **options, **(case.bare_options or {}))
    return module if case.keeps_linear else without_linear(module)


def _sparse(layer: str, graph: GraphData) -> Forward:
    """torch.sparse, which calls cuSPARSE, on a matrix that an expert makes once."""
    index, num = graph.edge_index, graph.num_nodes
    if layer == "GCN":
        matrix = gcn_adjacency(index, num)
    else:
        degree = torch.bincount(index[1], minlength=num).clamp(min=1)
        matrix = csr_adjacency(index, num, degree.float().reciprocal()[index[1]])
    return lambda x: torch.sparse.mm(matrix, x)


def _fits_a_mask(graph: GraphData) -> bool:
    if graph.num_nodes > _MAX_FLEX_NODES or graph.edge_index.device.type != "cuda":
        return False
    keys = graph.edge_index[1] * graph.num_nodes + graph.edge_index[0]
    return bool(keys.unique().numel() == keys.numel())


def _flex(graph: GraphData) -> Forward:
    """``flex_attention`` over a block mask of the edges."""
    from torch.nn.attention.flex_attention import flex_attention

    num = graph.num_nodes
    mask = _block_mask(graph)
    attend = torch.compile(flex_attention)

    def forward(x: Tensor) -> Tensor:
        heads = x.view(num, HEADS, -1).transpose(0, 1).unsqueeze(0)
        out = attend(heads, heads, heads, block_mask=mask)
        return out[0].transpose(0, 1).reshape(num, -1)  # type: ignore[no-any-return]

    return forward


def _block_mask(graph: GraphData) -> Any:
    """The blocks with edges, and a bit for each pair; no two edges may be equal.

    ``create_block_mask`` would make a value for each pair first, gigabytes for a large graph.
    """
    from torch.nn.attention.flex_attention import BlockMask

    (source, destination), num = graph.edge_index, graph.num_nodes
    row_bytes = -(-num // 8)
    bits = torch.zeros(num * row_bytes, dtype=torch.uint8, device=source.device)
    bits.index_add_(0, destination * row_bytes + source // 8, (1 << source % 8).to(torch.uint8))

    def is_edge(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (bits[q * row_bytes + (k >> 3)] >> (k & 7)) & 1 == 1

    blocks = -(-num // _FLEX_BLOCK)
    has_edges = torch.zeros(blocks, blocks, dtype=torch.bool, device=source.device)
    has_edges[destination // _FLEX_BLOCK, source // _FLEX_BLOCK] = True
    counts = has_edges.sum(1, dtype=torch.int32)
    first = has_edges.argsort(dim=1, descending=True, stable=True).to(torch.int32)
    options = {"BLOCK_SIZE": _FLEX_BLOCK, "mask_mod": is_edge, "seq_lengths": (num, num)}
    return BlockMask.from_kv_blocks(counts[None, None], first[None, None], **options)


def _turbo(layer: str, graph: GraphData, module: Any, width: int) -> Forward:
    """The published fused kernels (arXiv 2605.31500) of version 0.1.0rc4.

    Attention takes the configuration that they find to be fastest, at its first call. Those of
    extrema do not: they would try 6,720.
    """
    turbo = importlib.import_module("turbo_gnn")
    tuned: dict[str, Any] = {"autotune": True}
    if layer in ("GATv2", "Transformer"):
        tuned["autotune_config"] = turbo.AutotuneConfig(warmup=1, iters=5, tune_backward=True)
    num = graph.num_nodes
    if layer in ("GCN", "GATv2"):
        graph = _with_self_loops(graph)

    def product(norm: str) -> Forward:
        indptr, indices = _turbo_csr(graph, width)
        options = {"norm_type": norm, "cu_sparse_algorithm_id": -1, "block_dim": 256}
        return lambda x: turbo.spmm_aggr(x, indptr, indices, **options)

    def extremum() -> Forward:
        adjacency = _turbo_adjacency(graph)
        return lambda x: turbo.reduction_aggr(adjacency, x, reduce="max")

    def gatv2() -> Forward:
        adjacency = _turbo_adjacency(graph)
        options = {"attention_weights": module.att[0], "negative_slope": 0.2}

        def forward(x: Tensor) -> Tensor:
            heads = x.view(num, HEADS, -1)
            return turbo.gatv2_aggr(  # type: ignore[no-any-return]
                adjacency, heads, x_neighbors=heads, **options, **tuned
            )

        return forward

    def attention() -> Forward:
        adjacency = _turbo_adjacency(graph)

        def forward(x: Tensor) -> Tensor:
            heads = x.view(num, HEADS, -1)
            scale = 1 / math.sqrt(heads.shape[-1])
            return turbo.graph_transformer_aggr(  # type: ignore[no-any-return]
                adjacency, heads, Q=heads, K=heads, V=heads, scale=scale, **tuned
            )

        return forward

    makers = (lambda: product("both"), lambda: product("right"), extremum, gatv2, attention)
    return dict(zip(TURBO_LAYERS, makers, strict=True))[layer]()


def _with_self_loops(graph: GraphData) -> GraphData:
    """The graph that layers with self-loops make of it at every call."""
    index, _ = remove_self_loops(graph.edge_index)
    index, _ = add_self_loops(index, num_nodes=graph.num_nodes)
    return GraphData(f"{graph.name} with self-loops", index, graph.num_nodes)


_adjacencies: dict[str, Any] = {}
_csrs: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}


def _turbo_adjacency(graph: GraphData) -> Any:
    """Made once for each graph, with the 32-bit indices that its products demand."""
    if graph.name not in _adjacencies:
        turbo = importlib.import_module("turbo_gnn")
        _adjacencies[graph.name] = turbo.AdjacencyForwardBackwardWithNodeBuckets.from_edge_list(
            graph.edge_index, num_nodes=graph.num_nodes, index_dtype=torch.int32
        )
    return _adjacencies[graph.name]


def _turbo_csr(graph: GraphData, width: int) -> tuple[Tensor, Tensor]:
    """Row pointers and columns for features of this width, kept for good.

    Its products keep a workspace for the addresses of the two; that of one width may be too small
    for another.
    """
    if (graph.name, width) not in _csrs:
        made = _turbo_adjacency(graph)
        _csrs[graph.name, width] = made.forward_indptr.clone(), made.forward_indices.clone()
    return _csrs[graph.name, width]
