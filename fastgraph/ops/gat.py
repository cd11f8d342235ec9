"""``gat``: attention from one score for each node and head."""

from __future__ import annotations

from torch import Tensor

from fastgraph.ops.heads import check_self_loops, define_attention, dropout_seed
from fastgraph.registry import operators


def gat(
    x: Tensor,
    score_src: Tensor,
    score_dst: Tensor,
    index: Tensor,
    *,
    score_edge: Tensor | None = None,
    addend: Tensor | None = None,
    ptr: Tensor | None = None,
    self_loops: int = 0,
    transpose: bool = False,
    negative_slope: float = 0.2,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    r"""Attention whose scores are :math:`\mathrm{LeakyReLU}(s^{src}_j + s^{dst}_i + s_{ij})`.

    :math:`y_i = \sum_j \alpha_{ij} x_j`, where :math:`\alpha_i` is the softmax of the scores of
    node i's neighbours, for each head on its own (Velickovic et al., "Graph attention networks",
    ICLR 2018, equation 3, with the product of the concatenation taken node by node). Nodes without
    neighbours get 0. Nothing of the size edges x channels is stored.

    NaN and infinity reach what they reach where the formula is computed edge by edge, in gradients
    as well, and no other head. At a node, a NaN or +infinity among the scores makes all weights
    NaN, and so do scores that are all -infinity; beside finite scores, one of -infinity has weight
    0, and 0 times an infinite feature is NaN. PyG's ``GATConv`` differs in these cases:

    - given a ``torch.sparse`` CSR matrix, PyG takes 0 for the largest score where that is infinite:
      some or all weights are numbers there that are NaN here;
    - features of edges are folded into ``score_edge`` as :math:`(W^\top a)^\top e`, which is
      infinite where they are. PyG's :math:`a^\top (W e)` adds infinities of both signs in most
      cases, which is NaN: an edge that has weight 0 here makes all NaN there;
    - bfloat16 and float16 are computed in float32, where what PyG rounds to float16 in between and
      overflows need not do so.

    Args:
        x: gathered features ``[sources, heads, channels]``, float32, float64, bfloat16 or float16.
        score_src: scores of the gathered nodes, ``[sources, heads]``.
        score_dst: scores of the aggregating nodes, ``[destinations, heads]``.
        index: int64 or int32 ``[2, E]``, sources in row 0, destinations in row 1; with ``ptr``, the
            sources ``[E]`` grouped by destination, or ``[2, E]`` with the number of each edge in
            row 1.
        score_edge: scores of the edges, ``[E, heads]``.
        addend: added to the result, ``[destinations or 1, heads, channels]``: a residual or a bias.
        ptr: int64 or int32 ``[destinations + 1]``, offsets of the groups in ``index``.
        self_loops: replace the self-loops in ``index`` by one for each of so many nodes; not
            together with ``score_edge``, ``ptr`` or ``need_weights``.
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
    tensors = (x, score_src, score_dst, score_edge)
    if self_loops:
        check_self_loops(self_loops, score_edge=score_edge, ptr=ptr, need_weights=need_weights)
    options = (self_loops, transpose, negative_slope, dropout, need_weights)
    seed = dropout_seed(dropout, seed, x, index)
    out, stats, alpha = GAT(*tensors, addend, index, ptr, seed, *options)
    return out, alpha if need_weights else None, stats


GAT, GAT_BACKWARD = define_attention(operators.GAT)
