"""The route of ``RelGraphConv``: messages are projected once for each source and relation."""

from __future__ import annotations

from typing import Any

from dgl.nn.pytorch.conv import RelGraphConv
from torch import Tensor

from fastgraph import ops
from fastgraph.dgl.calls import Accepted, accepted, edge_values_refusal
from fastgraph.dgl.relations import (
    Pairs,
    matrices_of,
    pairs_of,
    typed_linear_refusal,
    unless_edited,
)
from fastgraph.dgl.sizes import RELATIONS, of_layer
from fastgraph.layers.sums import add_to, first_rows
from fastgraph.machine.memory import as_it_is
from fastgraph.plugins.patching import Patches
from fastgraph.plugins.refusal import Refusal
from fastgraph.routing.dispatch import Computation, replace_method


def install(patches: Patches) -> None:
    """Replace ``RelGraphConv.forward``."""
    is_small = of_layer(RELATIONS, lambda module: module.linear_r.out_size)
    replace_method(patches, RelGraphConv, "forward", plan, is_small=is_small)


def plan(
    module: RelGraphConv,
    g: Any,
    feat: Any,
    etypes: Any,
    norm: Tensor | None = None,
    *,
    presorted: bool = False,
) -> Computation | Refusal:
    """The forward pass of a call, or the reason to leave it to upstream."""
    if isinstance(feat, tuple):
        return Refusal("a pair of features")
    call = accepted(module, "spmm", g, feat)
    if isinstance(call, Refusal):
        return call
    refusal = typed_linear_refusal("linear_r", module.linear_r)
    if refusal is None and module.linear_r.W.dtype != feat.dtype:
        refusal = Refusal("parameters with another dtype than features")
    if refusal is None and module.linear_r.in_size != feat.shape[1]:
        refusal = Refusal(f"features of {feat.shape[1]} channels for {module.linear_r.in_size}")
    if refusal is None and norm is not None:
        refusal = edge_values_refusal("norm", norm, call, (1,))
    if refusal is not None:
        return refusal
    pairs = pairs_of(call, etypes, module.linear_r.num_types)
    if isinstance(pairs, Refusal):
        return pairs

    def compute() -> Tensor:
        module.presorted = presorted  # as DGL's code leaves it
        return _forward(module, call, pairs, etypes, norm)

    return compute


def _forward(
    module: RelGraphConv, call: Accepted, pairs: Pairs, etypes: Tensor, norm: Tensor | None
) -> Tensor:
    x = call.inputs.src
    edges = pairs.grouped.edges
    weight = matrices_of(module.linear_r)
    projected = pairs.project(x.view(len(x), *weight.shape[1:-1]), weight)
    h = ops.spmm(
        unless_edited(projected, etypes).flatten(1),
        edges.index,
        None if norm is None else norm.reshape(-1),
        ptr=edges.ptr,
        num_out=call.num_dst,
    )
    if module.layer_norm:
        h = module.layer_norm_weight(h)
    if module.bias:
        h = h + module.h_bias if module.layer_norm else add_to(h, module.h_bias)
    if module.self_loop:
        h = h + first_rows(as_it_is(x), call.num_dst) @ module.loop_weight
    if module.activation:
        h = module.activation(h)
    out: Tensor = module.dropout(h)
    return out
