"""Layers that are computed without what their backward pass would keep."""

from __future__ import annotations

from typing import Any

from fastgraph.dist.tensor.sharded import is_sharded, leaves
from fastgraph.dist.tensor.table import Arguments, NoRuleError, Options, rule

_PYG = "torch_geometric.nn.models.rev_gnn.InvertibleFunction"
_DGL = "dgl.nn.pytorch.conv.grouprevres.InvertibleCheckpoint"


@rule(f"{_PYG} {_DGL}")
def kept(func: Any, args: Arguments, kwargs: Options) -> Any:
    """Reversible layers, whose intermediate results are kept.

    Upstream frees the storage of inputs, and computes them from outputs in the backward pass.
    Values and gradients are the same, and so is what is sent forward.
    """
    function, _, *rest = args
    if func.__name__ == "InvertibleFunction":
        rest = rest[1:]  # how often the backward pass may run
    num_inputs, *given = rest
    inputs = given[:num_inputs]
    if not any(map(is_sharded, leaves(inputs))):
        raise NoRuleError
    return function(*inputs)
