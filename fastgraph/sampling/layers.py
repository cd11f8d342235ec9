"""Sampling of one layer, whose nodes keep their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastgraph.sampling.arguments import check_flags, check_integers, check_weights
from fastgraph.sampling.native_calls import call_native, check_tensors
from fastgraph.sampling.random_seeds import chosen_seed


class LayerSample(NamedTuple):
    """The edges that :func:`sample_layer` has drawn, by seed."""

    colptr: Tensor
    """Where the edges of each seed begin and end, ``[seeds + 1]``, of ``colptr``'s dtype."""
    row: Tensor
    """Sources of edges, ``[edges]``, as the graph names them."""
    edge: Tensor
    """Places of edges in the graph's ``row``, ``[edges]``, of ``colptr``'s dtype."""


def sample_layer(
    colptr: Tensor,
    row: Tensor,
    seed: Tensor,
    fanouts: Sequence[int],
    *,
    edge_type: Tensor | None = None,
    edge_weight: Tensor | None = None,
    replace: bool = False,
    by_layer: bool = False,
    ascending: bool = False,
    random_seed: int | None = None,
) -> LayerSample:
    """Draw edges that lead to seeds, without new numbers for their sources.

    Args:
        colptr: Where the edges of each destination begin and end, ``[nodes + 1]``, int32 or int64.
        row: The source of each edge, ``[edges]``, int32 or int64.
        seed: Nodes whose edges are drawn, ``[seeds]``, of ``row``'s dtype. One that comes twice
            draws twice.
        fanouts: How many edges a seed draws, or draws of each type; all of them for ``-1``.
        edge_type: The type of each edge, ``[edges]``, integers, which ascend among the edges of a
            destination. Without it there is one fanout for all edges.
        edge_weight: Weight of each edge, ``[edges]``, float32 or float64, at least 0. An edge of
            weight 0 is never drawn, nor among all that a fanout of ``-1`` takes.
        replace: Whether an edge may be drawn more than once.
        by_layer: Whether all seeds draw by the same random number of each neighbour, so that they
            have more neighbours in common (Balin and Catalyurek, NeurIPS 2023, appendix A.3).
        ascending: Whether edges of a seed and a type come in the order of the graph.
        random_seed: See :func:`fastgraph.sampling.neighbor_sample`.

    Raises:
        TypeError: An argument has another type or dtype.
        ValueError: Shapes or options do not fit, ``colptr`` falls, or a weight is negative or not
            finite, among what is looked at.
        IndexError: ``seed`` names no node, or ``edge_type`` a type without a fanout.
    """
    check_tensors(colptr=colptr, row=row, seed=seed, edge_type=edge_type, edge_weight=edge_weight)
    check_flags(replace=replace, by_layer=by_layer, ascending=ascending)
    check_weights([edge_weight], ["edge_weight"])
    check_integers("fanouts", fanouts)
    made = call_native(
        "sample_layer",
        *(colptr, row, seed.contiguous(), torch.tensor(fanouts, dtype=torch.int64)),
        *(edge_type, edge_weight, replace, by_layer, ascending),
        chosen_seed(random_seed),
    )
    return LayerSample(*made)
