"""``attention``: scaled dot-product attention over neighbourhoods."""

from __future__ import annotations

from torch import Tensor

from fastgraph.ops.heads import check_heads, check_self_loops, define_attention, dropout_seed
from fastgraph.ops.score_bias import check_entry_types, refuse_types_alone
from fastgraph.registry import operators


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: Tensor,
    *,
    edge: Tensor | None = None,
    bias: Tensor | None = None,
    bias_index: Tensor | None = None,
    addend: Tensor | None = None,
    ptr: Tensor | None = None,
    self_loops: int = 0,
    transpose: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    r"""Attention whose scores are :math:`scale \cdot q_i^\top k_j + b_{ij}`, or without the bias.

    :math:`y_i = \sum_j \alpha_{ij} v_j`, where :math:`\alpha_i` is the softmax of the scores of
    node i's neighbours, for each head on its own (Vaswani et al., "Attention is all you need", NIPS
    2017, equation 1; Shi et al., "Masked label prediction", IJCAI 2021, equations 3 and 4). Nodes
    without neighbours get 0. Nothing of the size edges x heads x channels is stored.

    The channels of ``edge`` follow those of the key and of the value of every head. An edge's
    projection ``W e`` added to keys and values, as in the second paper, comes to the same with
    ``(q, W^T q)`` for a query, and ``y + W z`` for an output ``(y, z)``.

    A bias is added to scores alone, in the way of Graphormer's of distances (Ying et al., "Do
    transformers really perform bad for graph representation?", NeurIPS 2021, equation 6) or of
    embeddings of the types of edges. Those of a table are looked up within the kernel, so that
    nothing of the size edges x heads is stored for them, and the gradient of the table is the same
    in bits for any number of threads on the CPU. Edges to which a bias of -infinity is added take
    no part, and a node all of whose edges have it gets 0, as in :func:`dense_attention`. Backends
    without a kernel, those for GPUs, leave calls with a bias to torch's operations, which store
    the messages.

    NaN and infinity spread as in :func:`gat`, but for layers that fold ``W`` like this:

    - an edge with infinite features makes its node's output NaN, as in PyG, but its weight may be 0
      where PyG's is NaN, and then the gradient of the values is finite;
    - ``W z`` and ``W^T q`` are computed for all nodes, PyG's ``W e`` for edges. So a NaN in ``W``
      reaches nodes without neighbours, and one in the features or the gradient of such a node the
      gradient of ``W``.

    Args:
        query: of the aggregating nodes, ``[destinations, heads, channels + edge_dim]``, float32,
            float64, bfloat16 or float16.
        key: of the gathered nodes, ``[sources, heads, channels]``.
        value: of the gathered nodes, ``[sources, heads, channels]``.
        scale: default: ``1 / sqrt(channels)``.
        index: int64 or int32 ``[2, E]``, sources in row 0, destinations in row 1; with ``ptr``, the
            sources ``[E]`` grouped by destination, or ``[2, E]`` with the number of each edge in
            row 1.
        edge: features of the edges, ``[E, edge_dim]``; ``edge_dim`` is 0 without them.
        bias: added to the scores, in the dtype of the query: ``[E, heads]``, or with ``bias_index``
            a table ``[types, heads]``.
        bias_index: the row of the table that each edge takes, uint8, int16, int32 or int64 ``[E]``.
        addend: added to the result, ``[destinations or 1, heads, channels]``: a residual or a bias.
        ptr: int64 or int32 ``[destinations + 1]``, offsets of the groups in ``index``.
        self_loops: replace the self-loops in ``index`` by one for each of so many nodes; not
            together with ``edge``, ``bias``, ``ptr`` or ``need_weights``.
        transpose: reverse every edge.
        dropout: probability with which an edge's weight is set to zero; the others are scaled up.
        seed: one int64 on the CPU that determines which edges are dropped; default: drawn from
            torch's default generator.
        need_weights: whether to return :math:`\alpha`, which takes another pass.

    Returns:
        ``(out, alpha, stats)``, all of them differentiable: the output,
        ``[destinations, heads, channels + edge_dim]``; :math:`\alpha` with dropout, ``[E, heads]``,
        or ``None`` if it is not needed; and what is known of each softmax,
        ``[destinations, heads, 2]``, by which :func:`merge` joins outputs.

    Raises:
        ValueError: an argument has the wrong shape, dtype, device or value.
        TypeError: ``seed`` is not a tensor.
        IndexError: ``index`` points outside the nodes, or ``bias_index`` outside the table; on a
            GPU the latter makes scores NaN, as a look would wait for it.
    """
    if scale is None:
        scale = max(key.shape[-1], 1) ** -0.5
    tensors = (query, key, value, edge)
    if self_loops:
        given = {"edge": edge, "bias": bias, "ptr": ptr, "need_weights": need_weights}
        check_self_loops(self_loops, **given)
    options = (self_loops, transpose, scale, dropout, need_weights)
    if bias is None:
        refuse_types_alone("bias_index", bias_index, bias)
        seed = dropout_seed(dropout, seed, query, index)
        out, stats, alpha = ATTENTION(*tensors, addend, index, ptr, seed, *options)
    else:
        biases = _biases(bias, bias_index, query, index)
        seed = dropout_seed(dropout, seed, query, index, bias)
        out, stats, alpha = BIASED_ATTENTION(*tensors, *biases, addend, index, ptr, seed, *options)
    return out, alpha if need_weights else None, stats


def _biases(
    bias: Tensor, bias_index: Tensor | None, query: Tensor, index: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The operands of the operator: a bias of edges, or a table with a type for each edge."""
    check_heads("query", query, ("destinations", "heads", "channels"), query)
    heads, edges = query.shape[1], index.shape[-1]
    if bias_index is None:
        check_heads("bias", bias, (edges, heads), query)
        return bias, None, None
    check_heads("bias", bias, ("types", heads), query)
    check_entry_types("bias_index", bias_index, edges, query)
    return None, bias, bias_index


ATTENTION, _ = define_attention(operators.ATTENTION)
BIASED_ATTENTION, _ = define_attention(operators.BIASED_ATTENTION)
