"""``sddmm``: dot products of the ends of edges, by the operator of the gradient of ``spmm``."""

from __future__ import annotations

from torch import Tensor

from fastgraph.ops.spmm import SDDMM


def sddmm(
    x: Tensor,
    y: Tensor,
    index: Tensor,
    *,
    ptr: Tensor | None = None,
    transpose: bool = False,
) -> Tensor:
    r"""For each edge and head the dot product :math:`\langle x_{jh}, y_{ih} \rangle` of its ends.

    What a transformer scores edges by. No row of an edge is stored. The product is accumulated as
    in :func:`~fastgraph.ops.spmm.spmm`, which is the gradient of this, as this is of it.

    Args:
        x: features of the sources, ``[nodes, heads, channels]`` or ``[nodes, channels]``, float32,
            float64, bfloat16 or float16.
        y: features of the destinations, like ``x``.
        index: as for :func:`~fastgraph.ops.spmm.spmm`.
        ptr: as for :func:`~fastgraph.ops.spmm.spmm`.
        transpose: reverse every edge: ``x`` are features of the destinations then.

    Returns:
        ``[E, heads]``, or ``[E]`` for features without heads.

    Raises:
        ValueError: an argument has the wrong shape, dtype, device or value.
        IndexError: ``index`` points outside the nodes.
    """
    if x.dim() not in (2, 3):
        raise ValueError(
            f"x must be [nodes, heads, channels] or [nodes, channels], got shape {list(x.shape)}"
        )
    out: Tensor = SDDMM(y, x, index, ptr, x.shape[1] if x.dim() == 3 else 1, "sum", transpose)
    return out if x.dim() == 3 else out.squeeze(1)
