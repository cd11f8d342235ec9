"""PyG's aggregation modules as outputs of one edge program, and what follows the program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch_geometric.nn.aggr import (
    DegreeScalerAggregation,
    MaxAggregation,
    MeanAggregation,
    MinAggregation,
    MultiAggregation,
    StdAggregation,
    SumAggregation,
    VarAggregation,
)
from torch_geometric.nn.aggr.fused import FusedAggregation

from fastgraph.edge_programs.moments import spread_of
from fastgraph.edge_programs.operations import STD, VAR
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

_SPREADS = {VarAggregation: VAR, StdAggregation: STD}
"""Aggregations that are made of the means of the message and of its squares."""

_KNOWN = KnownModules(
    *REDUCTIONS, *_SPREADS, MultiAggregation, FusedAggregation, DegreeScalerAggregation
)

_WATCHED = Refusal("the aggregation is replaced or has hooks")
_REPEATED = Refusal("one aggregation several times")  # of which PyG computes some wrongly


def squares(message: Tensor) -> tuple[Tensor, ...]:
    """The squares of a message."""
    return (message * message,)


_MEAN, _MEAN_OF_SQUARES = Reduction("mean"), Reduction("mean", squares)


def reduction_of(aggregation: Any) -> str | Refusal:
    """The one reduction of the message that an aggregation is."""
    name = REDUCTIONS.get(type(aggregation))
    if name is None:
        return Refusal(f"aggregation {type(aggregation).__name__}")
    return _WATCHED if _KNOWN.is_watched(aggregation) else name


def reductions_of(aggregation: Any) -> tuple[Reduction, ...] | Refusal:
    """The outputs of a program that :func:`aggregated` takes."""
    kind = type(aggregation)
    if kind in _SPREADS:
        parts = {aggregation, _variance(aggregation)}
        is_plain = all(type(p) in _SPREADS and not _KNOWN.is_watched(p) for p in parts)
        return (_MEAN, _MEAN_OF_SQUARES) if is_plain else _WATCHED
    if kind is MultiAggregation:
        return _of_several(aggregation)
    if kind is DegreeScalerAggregation:
        return _WATCHED if _KNOWN.is_watched(aggregation) else reductions_of(aggregation.aggr)
    name = reduction_of(aggregation)
    return name if isinstance(name, Refusal) else (Reduction(name),)


def _of_several(aggregation: MultiAggregation) -> tuple[Reduction, ...] | Refusal:
    fused = aggregation.fused_aggr
    names = [type(aggregation.aggrs[k]).__name__ for k in aggregation.fused_out_index]
    if _KNOWN.is_watched(aggregation):
        return _WATCHED
    if fused is not None and (
        type(fused) is not FusedAggregation
        or _KNOWN.is_watched(fused)
        or fused.aggr_names != names  # PyG takes the new ones for messages of some shapes only
    ):
        return _WATCHED
    if len(set(names)) < len(names):
        return _REPEATED
    found: dict[Reduction, None] = {}
    for part in aggregation.aggrs:
        reductions = reductions_of(part)
        if isinstance(reductions, Refusal):
            return reductions
        found |= dict.fromkeys(reductions)
    return tuple(found)


def aggregated(
    aggregation: Any, results: Mapping[Reduction, Tensor], index: Tensor, node_dim: int
) -> Tensor:
    """The result of an aggregation.

    Args:
        aggregation: which :func:`reductions_of` knows.
        results: of the program, ``[nodes, *channels]``, for each of its reductions.
        index: the aggregating node of each edge.
        node_dim: the dimension of nodes in the results.
    """
    kind, first = type(aggregation), next(iter(results.values()))
    if kind is DegreeScalerAggregation:
        num_nodes = first.shape[node_dim]
        unscaled = aggregated(aggregation.aggr, results, index, node_dim)
        return _scaled(aggregation, unscaled, index, num_nodes, node_dim)
    if kind in _SPREADS:
        return _spread(kind, results, _variance(aggregation).semi_grad)
    if kind is MultiAggregation:
        fused = aggregation.fused_aggr
        is_fused = fused is not None and first.dim() == 2
        out: Tensor = aggregation.combine(
            [
                _spread(type(part), results, fused.semi_grad)
                if is_fused and type(part) in _SPREADS
                else aggregated(part, results, index, node_dim)
                for part in aggregation.aggrs
            ]
        )
        return out
    return results[Reduction(REDUCTIONS[kind])]


def _scaled(aggregation: Any, out: Tensor, index: Tensor, num_nodes: int, node_dim: int) -> Tensor:
    """PyG's own scaling of what an aggregation within another has given."""
    beside = object.__new__(DegreeScalerAggregation)
    beside.__dict__.update(aggregation.__dict__, aggr=lambda *_: out)
    scaled: Tensor = beside.forward(out, index, None, num_nodes, node_dim)
    return scaled


def _variance(aggregation: Any) -> Any:
    return aggregation if type(aggregation) is VarAggregation else aggregation.var_aggr


def _spread(kind: type, results: Mapping[Reduction, Tensor], semi_grad: bool) -> Tensor:
    square = results[_MEAN_OF_SQUARES]
    return spread_of(_SPREADS[kind], results[_MEAN], square.detach() if semi_grad else square)
