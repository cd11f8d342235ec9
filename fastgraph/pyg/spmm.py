"""The route of PyG's ``spmm``, the product of a sparse matrix with features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric import utils

from fastgraph.layers.aggregation import SUMS, Aggregation
from fastgraph.ops.library import DEFINING
from fastgraph.ops.segment_reduce import REDUCTIONS as EXTREMA
from fastgraph.plugins.backend import device_type
from fastgraph.plugins.patching import Patches
from fastgraph.plugins.refusal import Refusal
from fastgraph.pyg.edges import edges_of
from fastgraph.pyg.functions import Planned, replace_functions, routed
from fastgraph.registry.registry import REGISTRY
from fastgraph.routing.conditions import execution_mode, plain_tensor, too_few_edges
from fastgraph.routing.sizes import TOO_SMALL, is_too_small_product

_DTYPES = (torch.float32, torch.float64)


def _plan(src: Any, other: Any, reduce: Any = "sum") -> Planned:
    operation = "sum" if reduce == "add" else reduce
    if operation not in (*SUMS, *EXTREMA) or not _has_operator(src, other):
        return None
    if is_too_small_product(src._nnz(), other):
        return TOO_SMALL
    operator = "spmm" if operation in SUMS else "segment_reduce"
    refusal = (
        execution_mode()
        or plain_tensor("src", src)
        or plain_tensor("other", other)
        or too_few_edges(src._nnz())
        or REGISTRY.refusal(operator, device_type(other), other.dtype)
    )
    if refusal is not None:
        return refusal
    edges = edges_of(src, "source_to_target")
    if isinstance(edges, Refusal):
        return edges
    return Aggregation(
        other, edges, edges.values, operation, src.shape[0], 0, "winner", is_product=True
    ).compute


def _has_operator(src: Any, other: Any) -> bool:
    """True if an operator may compute a product of tensors of these types, dtypes and shapes."""
    if not isinstance(src, Tensor) or not isinstance(other, Tensor):
        return False
    return (
        src.layout is torch.sparse_csr  # upstream warns of others
        and other.layout is torch.strided
        and src.dim() == other.dim() == 2
        and src.shape[1] == other.shape[0]
        and src.dtype == other.dtype
        and other.dtype in _DTYPES
        and src.is_cpu
        and other.is_cpu
        and type(src) not in DEFINING  # for which what PyG calls has rules
        and type(other) not in DEFINING
    )


_FUNCTION = (utils.spmm, routed(utils.spmm, _plan))


def install(patches: Patches) -> None:
    """Replace the function where programs have it."""
    replace_functions(patches, [_FUNCTION])
