"""PyG's aggregation modules as outputs of one edge program, and what follows the program."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch_geometric.nn.aggr import MaxAggregation, MeanAggregation, MinAggregation, SumAggregation

from fastgraph.edge_programs.trace import Reduction
from fastgraph.layers.modules import KnownModules
from fastgraph.plugins.refusal import Refusal

REDUCTIONS = {
    SumAggregation: "sum",
    MeanAggregation: "mean",
    MaxAggregation: "max",
    MinAggregation: "min",
}
"""Aggregations that are one reduction of the message."""

_KNOWN = KnownModules(*REDUCTIONS)

_WATCHED = Refusal("the aggregation is replaced or has hooks")


def reduction_of(aggregation: nn.Module) -> str | Refusal:
    """The one reduction of the message that an aggregation is."""
    name = REDUCTIONS.get(type(aggregation))
    if name is None:
        return Refusal(f"aggregation {type(aggregation).__name__}")
    return _WATCHED if _KNOWN.is_watched(aggregation) else name


def reductions_of(aggregation: nn.Module) -> tuple[Reduction, ...] | Refusal:
    """The outputs of a program that :func:`aggregated` takes, in any order."""
    name = reduction_of(aggregation)
    return name if isinstance(name, Refusal) else (Reduction(name),)


def aggregated(aggregation: nn.Module, results: Mapping[Reduction, Tensor]) -> Tensor:
    """The result of an aggregation.

    Args:
        aggregation: which :func:`reductions_of` knows.
        results: of the program, ``[nodes, *channels]``, for each of its reductions.
    """
    return results[Reduction(REDUCTIONS[type(aggregation)])]
