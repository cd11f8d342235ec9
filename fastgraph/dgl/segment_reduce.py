"""``SegmentReduce``: sums, maxima and minima of consecutive rows, of which readouts are made.

Replaced for features large enough that what is saved outweighs a graph, which is made anew at every
call: DGL writes the number of each row's segment in its backward pass, one after another, and looks
for extrema number by number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastgraph import ops
from fastgraph.dgl.conditions import NoOperator, features_refusal
from fastgraph.dgl.gspmm import extremum
from fastgraph.dgl.structure import Structure
from fastgraph.plugins.refusal import Refusal
from fastgraph.routing.conditions import execution_mode, plain_tensor
from fastgraph.routing.dispatch import Computation

# Numbers in all rows, from which kernels gain something.
_LEAST_OF_SUMS, _LEAST_OF_EXTREMA = 1 << 20, 1 << 18


def plan(op: str, x: Any, offsets: Any) -> Computation | Refusal:
    """A call of ``SegmentReduce``, or the reason to leave it to upstream.

    Args:
        op: ``"sum"``, ``"max"`` or ``"min"``.
        x: ``[rows, *channels]`` or ``[rows]``.
        offsets: int32 or int64 ``[segments + 1]``, where segments begin and end.

    Raises:
        ValueError: a segment ends beyond the rows, where DGL reads on.
    """
    if op not in ("sum", "max", "min"):
        return NoOperator(f"{op} of segments has no operator")
    if torch.compiler.is_compiling():
        return Refusal("within torch.compile, to which offsets are unknown")
    refusal = plain_tensor("value", x) or plain_tensor("offsets", offsets) or execution_mode()
    if refusal is not None:
        return refusal
    if x.dim() == 0 or offsets.dim() != 1 or offsets.dtype not in (torch.int32, torch.int64):
        return NoOperator(f"segments of features of shape {list(x.shape)} have no operator")
    if len(offsets) == 0:
        return NoOperator("no segments have no operator")
    if offsets[-1] > len(x):
        raise ValueError(f"seglen must add up to {len(x)}, the rows of value, got {offsets[-1]}")
    least = _LEAST_OF_SUMS if op == "sum" else _LEAST_OF_EXTREMA
    if x.numel() < least:  # whose own number would be a reason for each size of a batch
        return NoOperator(f"{op} of segments of fewer than {least} numbers has no operator")
    if offsets[0] != 0 or offsets[-1] != len(x) or (offsets.diff() < 0).any():
        return Refusal("offsets of segments that do not lead from the first row to the last")
    index = torch.arange(len(x), dtype=offsets.dtype, device=offsets.device)
    structure = Structure(index, offsets, None, len(x), len(offsets) - 1)
    refusal = features_refusal(structure, "spmm" if op == "sum" else "segment_reduce", x, len(x))
    return refusal or (lambda: _forward(structure, x, op))


def _forward(structure: Structure, x: Tensor, op: str) -> Tensor:
    grouped = structure.plain()
    if op != "sum":
        return extremum(structure.num_dst, grouped, x, op)
    matrix = x.unsqueeze(1) if x.dim() == 1 else x
    edges = grouped.edges
    out = ops.spmm(matrix, edges.index, ptr=edges.ptr, num_out=structure.num_dst)
    return out.squeeze(1) if x.dim() == 1 else out
