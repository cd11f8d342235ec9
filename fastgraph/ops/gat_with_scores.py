"""``gat_with_scores``: attention among nodes of one kind, which vectors score."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastgraph.backends import reference
from fastgraph.graphs.edges import as_saved
from fastgraph.ops.gat import GAT, GAT_BACKWARD
from fastgraph.ops.head_scores import HEAD_SCORES, score_gradients
from fastgraph.ops.heads import (
    NO_GRADIENTS,
    OfAddend,
    addend_gradient,
    check_heads,
    check_self_loops,
    dropout_seed,
    logsum_gradient,
    save_addend,
    save_with_edges,
    seed_number,
    statistics_with_shares,
)
from fastgraph.ops.library import (
    Arguments,
    Gradient,
    define,
    needs_torch_operations,
    wanted_gradients,
)
from fastgraph.ops.topology import topology


def gat_with_scores(
    x: Tensor,
    att: Tensor,
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
    r"""Attention with scores :math:`\mathrm{LeakyReLU}(a_0^\top x_j + a_1^\top x_i + s_{ij})`.

    The same as ``gat(x, *head_scores(x, att), index, ...)``, but in the backward pass the two
    gradients of ``x`` become one where the second is computed.

    Args:
        x: features of the nodes, sources and destinations alike, ``[nodes, heads, channels]``,
            float32, float64, bfloat16 or float16.
        att: the vectors for sources and for destinations, ``[2, heads, channels]``.
        index: as of :func:`gat`, and so are the arguments after it.
        score_edge: scores of the edges, ``[E, heads]``.
        addend: added to the result, ``[destinations or 1, heads, channels]``: a residual or a bias.
        ptr: int64 or int32 ``[destinations + 1]``, offsets of the groups in ``index``. Only the
            first so many nodes aggregate then.
        self_loops: replace the self-loops in ``index`` by one for each of so many nodes.
        transpose: reverse every edge.
        negative_slope: of the LeakyReLU.
        dropout: probability with which an edge's weight is set to zero.
        seed: one int64 on the CPU that determines which edges are dropped.
        need_weights: whether to return :math:`\alpha`, which takes another pass.

    Returns:
        ``(out, alpha, stats)``, all of them differentiable: the output,
        ``[destinations, heads, channels]``, one row for each node unless ``ptr`` has fewer;
        :math:`\alpha` with dropout, ``[E, heads]``, or ``None`` if it is not needed; and what is
        known of each softmax, ``[destinations, heads, 2]``, by which :func:`merge` joins outputs.

    Raises:
        ValueError: an argument has the wrong shape, dtype, device or value.
        TypeError: ``seed`` is not a tensor.
        IndexError: ``index`` points outside the nodes.
    """
    if self_loops:
        check_self_loops(self_loops, score_edge=score_edge, ptr=ptr, need_weights=need_weights)
    seed = dropout_seed(dropout, seed, x, index)
    tensors = (x, att, score_edge, addend, index, ptr, seed)
    options = (self_loops, transpose, negative_slope, dropout, need_weights)
    out, stats, alpha, _ = GAT_WITH_SCORES(*tensors, *options)
    return out, alpha if need_weights else None, stats


def _forward(x: Tensor, att: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_heads("x", x, ("nodes", "heads", "channels"), x)
    check_heads("att", att, [2, *x.shape[1:]], x)
    scores = HEAD_SCORES(x, att)
    return *GAT(x, *_of_nodes(scores, given[3]), *given), scores


def _of_nodes(scores: Tensor, ptr: Tensor | None) -> tuple[Tensor, Tensor]:
    """The scores of all nodes as sources, and of those that aggregate as destinations."""
    src, dst = scores.unbind(0)
    return src, dst if ptr is None else dst[: ptr.shape[0] - 1]


def _of_all(grad_src: Tensor, grad_dst: Tensor) -> Tensor:
    """Gradients of both kinds of scores, ``[2, nodes, heads]``; 0 for nodes that aggregate not."""
    if len(grad_src) == len(grad_dst):
        return torch.stack([grad_src, grad_dst])
    both = grad_src.new_zeros((2, *grad_src.shape))
    both[0] = grad_src
    both[1, : len(grad_dst)] = grad_dst
    return both


class _OfScored(OfAddend):
    options: list[Any]  # from self_loops to dropout


def _save(ctx: _OfScored, given: Arguments, result: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    x, att, score_edge, addend, index, ptr, seed, *options, weights = given
    _, stats, alpha, scores = result
    ctx.options = options
    save_addend(ctx, addend)
    ctx.mark_non_differentiable(scores, *(() if weights else (alpha,)))
    tensors = (x, att, score_edge, *as_saved(index, ptr), seed, stats, scores)
    save_with_edges(ctx, index, (x, att, score_edge), tensors)


def _gradient(
    ctx: _OfScored,
    grad: Tensor | None,
    grad_stats: Tensor | None,
    grad_alpha: Tensor | None,
    grad_scores: None,
) -> tuple[Tensor | None, ...]:
    wants_x, wants_att, wants_edge, wants_addend = wanted_gradients(ctx)[:4]
    grad_addend = addend_gradient(ctx, grad) if wants_addend else None
    if not (wants_x or wants_att or wants_edge):
        return None, None, None, grad_addend, *NO_GRADIENTS
    x, att, score_edge, index, ptr, seed, stats, scores, _ = ctx.saved_tensors
    if grad is not None and grad_stats is not None:
        stats = statistics_with_shares(stats, grad)
    if grad is None:  # only the weights or the statistics were used
        grad = x.new_zeros((len(stats), *x.shape[1:]))
    grads = (grad, grad_alpha, logsum_gradient(grad_stats, stats))
    wants_scores = wants_x or wants_att
    wanted = (wants_x, wants_scores, wants_scores, wants_edge)
    found: Any  # the gradients of GAT, of which those are tensors that are wanted
    grad_x = grad_att = None
    if needs_torch_operations(*grads):
        self_loops, transpose, *rest = ctx.options
        graph = topology(index, ptr, len(x), len(stats), transpose, self_loops)
        score_src, score_dst = _of_nodes(reference.head_scores(x, att), ptr)
        given = (x, score_src, score_dst, score_edge, stats, transpose, *rest, seed_number(seed))
        found = reference.gat_backward(graph, *grads, *given, wanted=wanted)
    else:
        inputs = (x, *_of_nodes(scores, ptr), score_edge)
        found = GAT_BACKWARD(*grads, *inputs, index, ptr, seed, stats, *ctx.options, wanted)
    if wants_scores:
        through_values, *of_scores, _ = found
        grad_x, grad_att = score_gradients(
            x, att, _of_all(*of_scores), through_values if wants_x else None, (wants_x, wants_att)
        )
    grad_edge = found[3] if wants_edge else None
    return grad_x, grad_att, grad_edge, grad_addend, *NO_GRADIENTS


GAT_WITH_SCORES = define(
    "gat_with_scores(Tensor x, Tensor att, Tensor? score_edge, Tensor? addend, Tensor index, "
    "Tensor? ptr, Tensor? seed, SymInt self_loops, bool transpose, float negative_slope, "
    "float dropout, bool weights) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _forward,
    Gradient((0, 1, 2, 3), _save, _gradient),
)
