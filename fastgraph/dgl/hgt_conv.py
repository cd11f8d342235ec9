"""The route of ``HGTConv``: keys and values are projected once for each source and relation.

What a relation multiplies scores by is a factor of its matrix of keys.
"""

from __future__ import annotations

from typing import Any

import torch
from dgl.nn.pytorch.conv import HGTConv
from torch import Tensor

from fastgraph import ops
from fastgraph.dgl.calls import Accepted, accepted
from fastgraph.dgl.relations import Pairs, pairs_of, typed_linear_refusal, unless_edited
from fastgraph.dgl.sizes import TYPED_ATTENTION, of_layer
from fastgraph.layers.sums import first_rows
from fastgraph.plugins.patching import Patches
from fastgraph.plugins.refusal import Refusal
from fastgraph.routing.dispatch import Computation, replace_method


def install(patches: Patches) -> None:
    """Replace ``HGTConv.forward``."""
    replace_method(
        patches,
        HGTConv,
        "forward",
        plan,
        is_small=of_layer(TYPED_ATTENTION, lambda module: module.head_size * module.num_heads),
    )


def plan(
    module: HGTConv, g: Any, x: Any, ntype: Any, etype: Any, *, presorted: bool = False
) -> Computation | Refusal:
    """The forward pass of a call, or the reason to leave it to upstream."""
    if isinstance(x, tuple):
        return Refusal("a pair of features")
    call = accepted(module, "attention", g, x)
    if isinstance(call, Refusal):
        return call
    if not g.is_block and g._graph.number_of_ntypes() != 1:
        return Refusal("two kinds of nodes, of which DGL's code takes one")
    refusal = call.structure.refusal("the types of nodes", ntype)
    if refusal is None and ntype.shape != x.shape[:1]:
        refusal = Refusal(f"types of nodes of shape {list(ntype.shape)}")
    if refusal is not None:
        return refusal
    if x.device != g.device:
        return Refusal("matrices of kinds of nodes, which DGL multiplies by where its graphs are")
    for name in ("relation_att", "relation_msg"):
        for linear in getattr(module, name):
            refusal = typed_linear_refusal(name, linear)
            if refusal is None and linear.regularizer == "bdd":
                refusal = Refusal(f"{name} has block-diagonal matrices")
            if refusal is not None:
                return refusal
    pairs = pairs_of(call, etype, len(module.relation_pri[0]))
    if isinstance(pairs, Refusal):
        return pairs

    def compute() -> Tensor:
        module.presorted = presorted  # as DGL's code leaves it
        return _forward(module, call, pairs, ntype, etype, presorted)

    return compute


def _forward(
    module: HGTConv, call: Accepted, pairs: Pairs, ntype: Any, etype: Tensor, presorted: bool
) -> Tensor:
    x, ntype_dst = call.inputs.src, first_rows(ntype, call.num_dst)
    x_dst = first_rows(x, call.num_dst)
    shape = (-1, module.num_heads, module.head_size)
    key = module.linear_k(x, ntype, presorted).view(shape)
    query = module.linear_q(x_dst, ntype_dst, presorted).view(shape)
    value = module.linear_v(x, ntype, presorted).view(shape)
    # By relation and head, as in equation 3 of the paper (Hu et al., WWW 2020).
    factor = torch.stack(list(module.relation_pri), 1)[:, :, None, None]
    edges = pairs.grouped.edges
    out, _, _ = ops.attention(
        query,
        pairs.project(key, factor * _matrices(module.relation_att)),
        unless_edited(pairs.project(value, _matrices(module.relation_msg)), etype),
        edges.index,
        ptr=edges.ptr,
        scale=1 / module.sqrt_d,
    )
    h = module.drop(module.linear_a(out.flatten(1), ntype_dst, presorted))
    alpha = torch.sigmoid(module.skip[ntype_dst]).unsqueeze(-1)
    root = x_dst if x_dst.shape == h.shape else x_dst @ module.residual_w
    h = h * alpha + root * (1 - alpha)
    result: Tensor = module.norm(h) if module.use_norm else h
    return result


def _matrices(relation: Any) -> Tensor:
    """Those of all heads, ``[relations, heads, in_channels, out_channels]``."""
    return torch.stack([linear.get_weight() for linear in relation], 1)
