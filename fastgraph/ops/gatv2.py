"""``gatv2``: additive attention over neighbourhoods."""

from __future__ import annotations

from torch import Tensor

from fastgraph.ops.heads import check_self_loops, define_attention, dropout_seed
from fastgraph.registry import operators


def gatv2(
    x_src: Tensor,
    x_dst: Tensor,
    att: Tensor,
    index: Tensor,
    *,
    edge: Tensor | None = None,
    weight_edge: Tensor | None = None,
    addend: Tensor | None = None,
    ptr: Tensor | None = None,
    self_loops: int = 0,
    transpose: bool = False,
    negative_slope: float = 0.2,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    r"""Attention with scores :math:`a^\top \mathrm{LeakyReLU}(x^{src}_j + x^{dst}_i + W e_{ij})`.

    :math:`y_i = \sum_j \alpha_{ij} x^{src}_j`, where :math:`\alpha_i` is the softmax of the scores
    of node i's neighbours, for each head on its own (Brody, Alon and Yahav, "How attentive are
    graph attention networks?", ICLR 2022, equation 7). Nodes without neighbours get 0. Nothing of
    the size edges x channels is stored: features of edges are projected where they are needed.

    NaN and infinity spread as in :func:`gat`, those in features of edges as in PyG.

    Args:
        x_src: gathered features ``[sources, heads, channels]``, float32, float64, bfloat16 or
            float16.
        x_dst: features of the aggregating nodes, ``[destinations, heads, channels]``.
        att: the vector ``a``, ``[1, heads, channels]``.
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
        negative_slope: of the LeakyReLU.
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
    tensors = (x_src, x_dst, att, edge, weight_edge)
    if self_loops:
        check_self_loops(self_loops, edge=edge, ptr=ptr, need_weights=need_weights)
    options = (self_loops, transpose, negative_slope, dropout, need_weights)
    seed = dropout_seed(dropout, seed, x_src, index)
    out, stats, alpha = GATV2(*tensors, addend, index, ptr, seed, *options)
    return out, alpha if need_weights else None, stats


GATV2, _ = define_attention(operators.GATV2)
