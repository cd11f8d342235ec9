"""``block_attention``: scaled dot-product attention along edges, by sub-blocks of 16 rows."""

from __future__ import annotations

from torch import Tensor

from fastgraph.ops.heads import check_heads, check_self_loops, define_attention
from fastgraph.ops.score_bias import refuse_types_alone
from fastgraph.registry import operators


def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: Tensor,
    *,
    bias: Tensor | None = None,
    bias_index: Tensor | None = None,
    ptr: Tensor | None = None,
    self_loops: int = 0,
    transpose: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    r""":func:`attention` where nodes that follow each other have neighbours in common.

    The same numbers, to rounding. :func:`attention` goes along the edges of one node after the
    other. Here sixteen nodes stand side by side in vectors, and each node that one of them attends
    to comes to all of them: a column of a sub-block, with a bit for each edge that there is
    (windows as those of TC-GNN, Wang et al., USENIX ATC 2023; reformed as in TorchGT, Zhang et al.,
    SC 2024, section III-D). That takes the time of full sub-blocks: it is faster where columns have
    many of their 16 edges, as in cliques or after a :class:`fastgraph.nn.Reformation`, and slower
    elsewhere. Nodes should be in the order of clusters. Values and gradients are bitwise equal for
    any number of threads.

    On the CPU what is stored grows with edges: 5 bytes for each of them where columns are full, 20
    where they have one edge, and as much again for the backward pass; kept with the graph. About
    120 bytes for each are taken while that is made. The gradient of a table takes 64 copies of it.
    On GPUs nodes do not stand side by side: the kernels of :func:`attention` compute by rows, and
    the gradient of a table takes as much as those of all scores, ``[E, heads]``.

    Args:
        query: of the aggregating nodes, ``[destinations, heads, channels]``, float32, float64,
            bfloat16 or float16.
        key: of the gathered nodes, ``[sources, heads, channels]``.
        value: likewise.
        index: as for :func:`attention`.
        bias: a table, ``[types, heads]``, in the dtype of the query, which is added to scores.
        bias_index: with ``bias``, the row of the table that each edge takes, uint8, int16, int32 or
            int64 ``[E]``.
        ptr: as for :func:`attention`.
        self_loops: as for :func:`attention`; not together with ``bias`` or ``ptr``.
        transpose: reverse every edge.
        scale: default: ``1 / sqrt(channels)``.

    Returns:
        ``(out, stats)``, both differentiable: the output, like ``query``, and what is known of each
        softmax, ``[destinations, heads, 2]``, by which :func:`merge` joins outputs.

    Raises:
        ValueError: an argument has the wrong shape, dtype, device or value.
        IndexError: ``index`` points outside the nodes, or ``bias_index`` outside the table.
    """
    refuse_types_alone("bias_index", bias_index, bias)
    if bias is not None and bias_index is None:
        raise ValueError("bias_index must be given together with bias, got None")
    if bias is not None:
        check_heads("query", query, ("destinations", "heads", "channels"), query)
        check_heads("bias", bias, ("types", query.shape[1]), query)
    if self_loops:
        check_self_loops(self_loops, bias=bias, ptr=ptr)
    if scale is None:
        scale = max(key.shape[-1], 1) ** -0.5
    tensors = (query, key, value, bias, bias_index)
    out, stats, _ = BLOCK_ATTENTION(
        *tensors, None, index, ptr, None, self_loops, transpose, scale, 0.0, False
    )
    return out, stats


BLOCK_ATTENTION, _ = define_attention(operators.BLOCK_ATTENTION)
