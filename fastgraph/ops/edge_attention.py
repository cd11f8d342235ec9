"""``edge_attention``: scaled dot-product attention to neighbours and features of edges."""

from __future__ import annotations

from torch import Tensor

from fastgraph.ops.heads import check_self_loops, define_attention, dropout_seed
from fastgraph.registry import operators


def edge_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: Tensor,
    *,
    edge: Tensor | None = None,
    weight_edge: Tensor | None = None,
    addend: Tensor | None = None,
    ptr: Tensor | None = None,
    self_loops: int = 0,
    transpose: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    r"""Attention with scores :math:`\mathrm{scale} \cdot q_i^\top (k_j + W e_{ij})`.

    :math:`y_i = \sum_j \alpha_{ij} (v_j + W e_{ij})`, where :math:`\alpha_i` is the softmax of the
    scores of node i's neighbours, for each head on its own (Shi et al., "Masked label prediction",
    IJCAI 2021, equations 3 and 4). Nodes without neighbours get 0.

    Nothing is projected for each edge: :math:`q^\top W e = (W^\top q)^\top e`, and the sum of
    weighted :math:`W e` is that of weighted :math:`e`, projected. So there are two small products
    for each node in the forward pass, and five in the backward pass. :func:`attention` leaves these
    to its caller, and is what backends have that do not have this operator: theirs is the
    reference's, which stores each projected edge.

    NaN and infinity spread as in :func:`attention`, but those in ``W`` do not reach nodes without
    neighbours.

    Args:
        query: of the aggregating nodes, ``[destinations, heads, channels]``, float32, float64,
            bfloat16 or float16.
        key: of the gathered nodes, ``[sources, heads, channels]``.
        value: of the gathered nodes, ``[sources, heads, channels]``.
        index: int64 or int32 ``[2, E]``, sources in row 0, destinations in row 1; with ``ptr``, the
            sources ``[E]`` grouped by destination, or ``[2, E]`` with the number of each edge in
            row 1.
        edge: features of the edges ``e``, ``[E, edge_dim]``; given together with ``weight_edge``.
        weight_edge: their projection ``W``, ``[heads, edge_dim, channels]``.
        addend: added to the result, ``[destinations or 1, heads, channels]``: a residual or a bias.
        ptr: int64 or int32 ``[destinations + 1]``, offsets of the groups in ``index``.
        self_loops: replace the self-loops in ``index`` by one for each of so many nodes; not
            together with ``edge``, ``ptr`` or ``need_weights``.
        transpose: reverse every edge.
        scale: default: ``1 / sqrt(channels)``.
        dropout: probability with which an edge's weight is set to zero; the others are scaled up.
        seed: one int64 on the CPU that determines which edges are dropped; default: drawn from
            torch's default generator.
        need_weights: whether to return :math:`\alpha`, which takes another pass.

    Returns:
        ``(out, alpha, stats)``, all of them differentiable: the output,
        ``[destinations, heads, channels]``; :math:`\alpha` with dropout, ``[E, heads]``,
        or ``None`` if it is not needed; and what is known of each softmax,
        ``[destinations, heads, 2]``, by which :func:`merge` joins outputs.

    Raises:
        ValueError: an argument has the wrong shape, dtype, device or value.
        TypeError: ``seed`` is not a tensor.
        IndexError: ``index`` points outside the nodes.
    """
    if scale is None:
        scale = max(key.shape[-1], 1) ** -0.5
    tensors = (query, key, value, edge, weight_edge)
    if self_loops:
        check_self_loops(self_loops, edge=edge, ptr=ptr, need_weights=need_weights)
    options = (self_loops, transpose, scale, dropout, need_weights)
    seed = dropout_seed(dropout, seed, query, index)
    out, stats, alpha = EDGE_ATTENTION(*tensors, addend, index, ptr, seed, *options)
    return out, alpha if need_weights else None, stats


EDGE_ATTENTION, _ = define_attention(operators.EDGE_ATTENTION)
