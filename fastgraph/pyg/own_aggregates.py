"""The aggregates of layers as outputs of one edge program, by the identity of their functions.

That of most layers is the one that they inherit, whose aggregation is a module. Some of PyG's have
one of their own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.conv import MessagePassing

from fastgraph.edge_programs.operations import STD
from fastgraph.edge_programs.traced import Reduction
from fastgraph.graphs.edges import OutOfRange
from fastgraph.layers.typed_edges import types_among
from fastgraph.plugins.refusal import Refusal
from fastgraph.pyg.aggregations import REDUCTIONS, aggregated, reductions_of, squares

Results = Mapping[Reduction, Tensor]


def nothing(*_: object) -> dict[str, Tensor]:
    """No tensors."""
    return {}


@dataclass(frozen=True)
class Aggregate:
    """A function ``aggregate`` of layers.

    Attributes:
        reductions: of the message, for a layer, or why there are none.
        combined: the result of the function, given a layer, the results of its reductions and what
            gives the aggregating node of each edge.
        besides: tensors of edges that reductions take and messages do not, by name, given a layer,
            the arguments of ``propagate``, its ``edge_index`` and the number of aggregating nodes.
    """

    reductions: Callable[[Any], tuple[Reduction, ...] | Refusal]
    combined: Callable[[Any, Results, Callable[[], Tensor]], Tensor]
    besides: Callable[[Any, Mapping[str, Any], Tensor, int], dict[str, Tensor] | Refusal] = nothing


def weighted(message: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """A message times a weight of each edge.

    Raises:
        ValueError: it has no single dimension of channels.
    """
    if message.dim() != 2:
        raise ValueError
    return (message * weight.view(-1, 1),)


def _module(layer: Any) -> Any:
    # As an attribute torch finds it last.
    found = layer._modules.get("aggr_module")
    return layer.aggr_module if found is None else found


def _of_modules(layer: Any) -> tuple[Reduction, ...] | Refusal:
    return reductions_of(_module(layer))


def _by_modules(layer: Any, results: Results, index: Callable[[], Tensor]) -> Tensor:
    aggregation = _module(layer)
    if type(aggregation) in REDUCTIONS:  # the usual case, in less time
        (out,) = results.values()
        return out
    return aggregated(aggregation, results, index, layer.node_dim)


_SYMMETRIC = Reduction("sum", weighted, "symnorm_weight")
_MEAN, _MEAN_OF_SQUARES = Reduction("mean"), Reduction("mean", squares)
_OF_EG_CONV: Mapping[str, tuple[Reduction, ...]] = {
    "symnorm": (_SYMMETRIC,),
    "var": (_MEAN, _MEAN_OF_SQUARES),
    "std": (_MEAN, _MEAN_OF_SQUARES),
    **{name: (Reduction(name),) for name in ("sum", "mean", "max", "min")},
}


def _of_eg_conv(layer: Any) -> tuple[Reduction, ...] | Refusal:
    unknown = [name for name in layer.aggregators if name not in _OF_EG_CONV]
    if unknown or not layer.aggregators:
        return Refusal(f"its aggregators are {layer.aggregators}")
    found = [reduction for name in layer.aggregators for reduction in _OF_EG_CONV[name]]
    return tuple(dict.fromkeys(found))


def _beside_eg_conv(
    layer: Any, arguments: Mapping[str, Any], edge_index: Tensor, _: int
) -> dict[str, Tensor] | Refusal:
    if "symnorm" not in layer.aggregators:
        return {}
    weight = arguments.get("symnorm_weight")
    if not isinstance(weight, Tensor) or weight.shape != edge_index.shape[1:]:
        return Refusal("symnorm_weight does not have one value for each edge")
    return {"symnorm_weight": weight}


def _by_eg_conv(layer: Any, results: Results, _: object) -> Tensor:
    outs = []
    for name in layer.aggregators:
        out, *square = [results[reduction] for reduction in _OF_EG_CONV[name]]
        if square:
            out = square[0] - out * out
        # Not 0 below the bound, as in StdAggregation.
        outs.append(out.clamp(min=1e-5).sqrt() if name == STD else out)
    return torch.stack(outs, dim=1) if len(outs) > 1 else outs[0]


_SHARED = Reduction("sum", weighted, "share")


def _of_fast_rgcn_conv(layer: Any) -> tuple[Reduction, ...] | Refusal:
    if layer.aggr not in ("mean", "add", "sum"):
        return Refusal(f"aggregation {layer.aggr!r}")
    return (_SHARED if layer.aggr == "mean" else Reduction("sum"),)


def _by_fast_rgcn_conv(layer: Any, results: Results, _: object) -> Tensor:
    return results[_SHARED if layer.aggr == "mean" else Reduction("sum")]


def _beside_fast_rgcn_conv(
    layer: Any, arguments: Mapping[str, Any], edge_index: Tensor, num_rows: int
) -> dict[str, Tensor] | Refusal:
    if layer.aggr != "mean":
        return {}
    x, types = arguments.get("x"), arguments.get("edge_type")
    if not isinstance(x, Tensor) or not isinstance(types, Tensor):
        return Refusal("edge_type does not have one type for each edge")
    if types.dtype is not torch.int64 or types.shape != edge_index.shape[1:]:
        return Refusal("edge_type does not have one type for each edge")
    if edge_index.is_meta or types.device != edge_index.device:
        return Refusal("edge_type is not on the device of edge_index")
    transpose = layer.flow == "target_to_source"
    num_in = x.shape[0]  # the gathered ones alone are given
    ends = num_in, num_rows, transpose, layer.num_relations, x.dtype
    found = types_among(edge_index, types, x).shares(edge_index, types, *ends)
    return found if isinstance(found, OutOfRange) else {"share": found}


def _defined(module: str, name: str) -> Any:
    """The function that a class of PyG has; ``None`` where this PyG has none."""
    cls = getattr(importlib.import_module(f"torch_geometric.nn.conv.{module}"), name, None)
    return None if cls is None else vars(cls).get("aggregate")


_KNOWN: dict[Any, Aggregate] = {
    MessagePassing.aggregate: Aggregate(_of_modules, _by_modules),
    _defined("eg_conv", "EGConv"): Aggregate(_of_eg_conv, _by_eg_conv, _beside_eg_conv),
    _defined("rgcn_conv", "FastRGCNConv"): Aggregate(
        _of_fast_rgcn_conv, _by_fast_rgcn_conv, _beside_fast_rgcn_conv
    ),
}
_KNOWN.pop(None, None)


def known_aggregate(cls: type) -> Aggregate | None:
    """The description of a class's ``aggregate``, or ``None`` where that is no one of PyG's."""
    return _KNOWN.get(cls.aggregate)  # type: ignore[attr-defined]
