"""PyG's aggregation modules as outputs of one edge program, and what follows the program."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.aggr import (
    DegreeScalerAggregation,
    MaxAggregation,
    MeanAggregation,
    MinAggregation,
    MultiAggregation,
    PowerMeanAggregation,
    SoftmaxAggregation,
    StdAggregation,
    SumAggregation,
    VarAggregation,
)
from torch_geometric.nn.aggr.fused import FusedAggregation
from torch_geometric.utils import degree

from fastgraph.edge_programs.moments import spread_of
from fastgraph.edge_programs.operations import STD, VAR
from fastgraph.edge_programs.traced import Reduction
from fastgraph.layers.modules import KnownModules
from fastgraph.layers.scaled_parts import scaled_parts
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
    *(*REDUCTIONS, *_SPREADS, SoftmaxAggregation, PowerMeanAggregation),
    *(MultiAggregation, FusedAggregation, DegreeScalerAggregation),
)

_WATCHED = Refusal("the aggregation is replaced or has hooks")
_REPEATED = Refusal("one aggregation several times")  # of which PyG computes some wrongly


def squares(message: Tensor) -> tuple[Tensor, ...]:
    """The squares of a message."""
    return (message * message,)


@dataclass(frozen=True)
class Tempered:
    """The message and scores: its product with the inverse temperature of a softmax.

    Attributes:
        t: the inverse temperature; ``None`` for a parameter.
        channels: as many as the parameter has, if there is one for each.
    """

    __name__ = "scores"

    t: float | None
    channels: int

    def __call__(self, message: Tensor, t: Tensor | None = None) -> tuple[Tensor, ...]:
        """The message and its scores.

        Args:
            message: of edges.
            t: the parameter.

        Raises:
            ValueError: there are other channels.
        """
        factor = self.t if t is None else _of_channels(t, self.channels, message)
        assert factor is not None
        return message, message if self.t == 1 else message * factor


@dataclass(frozen=True)
class Powers:
    """The powers of a message whose means make a power mean.

    Attributes:
        p: the exponent; ``None`` for a parameter.
        channels: as many as the parameter has, if there is one for each.
        limits: between which the message is clamped.
    """

    __name__ = "powers"

    p: float | None
    channels: int
    limits: tuple[float | None, float | None]

    def __call__(self, message: Tensor, p: Tensor | None = None) -> tuple[Tensor, ...]:
        """The powers.

        Args:
            message: of edges.
            p: the parameter.

        Raises:
            ValueError: there are other channels.
        """
        return (self._clamped(message, self._exponent(message, p)),)

    def mean(self, mean_of_powers: Tensor, p: Tensor | None = None) -> Tensor:
        """The power mean."""
        exponent = self._exponent(mean_of_powers, p)
        return self._clamped(mean_of_powers, 1.0 / exponent)

    def _exponent(self, x: Tensor, p: Tensor | None) -> Any:
        return self.p if p is None else _of_channels(p, self.channels, x)

    def _clamped(self, x: Tensor, exponent: Any) -> Tensor:
        return x if self.p == 1 else x.clamp(*self.limits).pow(exponent)


def _of_channels(parameter: Tensor, channels: int, message: Tensor) -> Tensor:
    """A parameter of an aggregation, for messages of two dimensions if it has several channels."""
    if channels == 1:
        return parameter
    if message.dim() != 2:
        raise ValueError
    return parameter.view(-1, channels)


_MEAN, _MEAN_OF_SQUARES = Reduction("mean"), Reduction("mean", squares)


def reduction_of(aggregation: Any) -> str | Refusal:
    """The one reduction of the message that an aggregation is."""
    name = REDUCTIONS.get(type(aggregation))
    if name is None:
        return Refusal(f"aggregation {type(aggregation).__name__}")
    return _WATCHED if _KNOWN.is_watched(aggregation) else name


_ALONE = {name: (Reduction(name),) for name in REDUCTIONS.values()}


def reductions_of(aggregation: Any, path: str = "aggr_module") -> tuple[Reduction, ...] | Refusal:
    """The outputs of a program that :func:`aggregated` takes.

    Args:
        aggregation: any module.
        path: where it is in its layer.
    """
    kind = type(aggregation)
    if kind in _SPREADS:
        parts = {aggregation, _variance(aggregation)}
        is_plain = all(type(p) in _SPREADS and not _KNOWN.is_watched(p) for p in parts)
        return (_MEAN, _MEAN_OF_SQUARES) if is_plain else _WATCHED
    if kind is MultiAggregation:
        return _of_several(aggregation, path)
    if kind in (SoftmaxAggregation, PowerMeanAggregation):
        weighted = _weighted(aggregation, path)
        return weighted if isinstance(weighted, Refusal) else (weighted,)
    if kind is DegreeScalerAggregation:
        inner = reductions_of(aggregation.aggr, f"{path}.aggr")
        return _WATCHED if _KNOWN.is_watched(aggregation) else inner
    name = reduction_of(aggregation)
    return name if isinstance(name, Refusal) else _ALONE[name]


def _weighted(aggregation: Any, path: str) -> Reduction | Refusal:
    """The output of a program that a softmax or a power mean is."""
    if _KNOWN.is_watched(aggregation):
        return _WATCHED
    is_softmax = type(aggregation) is SoftmaxAggregation
    if is_softmax and aggregation.semi_grad and not aggregation.learn:
        return Refusal("a softmax aggregation with semi-gradients")
    name = "t" if is_softmax else "p"
    number, channels, parameter = vars(aggregation).get(name), aggregation.channels, None
    if aggregation._parameters.get(name) is not None:
        number, parameter = None, f"{path}.{name}"
    if type(channels) is not int or type(number) not in (int, float, type(None)):
        return Refusal(f"{type(aggregation).__name__} with {name} that is no number")
    if is_softmax:
        return Reduction("softmax", Tempered(number, channels), parameter)
    limits = aggregation.min_value, aggregation.max_value
    if not all(type(limit) in (int, float, type(None)) for limit in limits):
        return Refusal("PowerMeanAggregation with limits that are no numbers")
    return Reduction("mean", Powers(number, channels, limits), parameter)


def _of_several(aggregation: MultiAggregation, path: str) -> tuple[Reduction, ...] | Refusal:
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
    for k, part in enumerate(aggregation.aggrs):
        reductions = reductions_of(part, f"{path}.aggrs.{k}")
        if isinstance(reductions, Refusal):
            return reductions
        found |= dict.fromkeys(reductions)
    return tuple(found)


@dataclass
class ScalingLater:
    """An aggregation whose caller scales itself.

    Attributes:
        aggregation: the ``DegreeScalerAggregation``.
        is_left: true once :func:`aggregated` has left its scaling to the caller.
    """

    aggregation: DegreeScalerAggregation
    is_left: bool = False


class _Thread(threading.local):
    """The aggregation that a thread's caller scales."""

    later: ScalingLater | None = None


_THREAD = _Thread()


@contextmanager
def scaling_later(aggregation: DegreeScalerAggregation) -> Iterator[ScalingLater]:
    """Have :func:`aggregated` leave the scaling to the caller, who is told whether it did."""
    before, _THREAD.later = _THREAD.later, ScalingLater(aggregation)
    try:
        yield _THREAD.later
    finally:
        _THREAD.later = before


def aggregated(
    aggregation: Any,
    results: Mapping[Reduction, Tensor],
    index: Callable[[], Tensor],
    node_dim: int,
    path: str = "aggr_module",
) -> Tensor:
    """The result of an aggregation.

    Args:
        aggregation: which :func:`reductions_of` knows.
        results: of the program, ``[nodes, *channels]``, for each of its reductions.
        index: gives the aggregating node of each edge.
        node_dim: the dimension of nodes in the results.
        path: where the aggregation is in its layer.
    """
    kind, first = type(aggregation), next(iter(results.values()))
    if kind is DegreeScalerAggregation:
        num_nodes, inner = first.shape[node_dim], (aggregation.aggr, results, index, node_dim)
        later = _THREAD.later
        if later is not None and later.aggregation is aggregation:
            later.is_left = True
            return aggregated(*inner, f"{path}.aggr")
        return _scaled(aggregation, *_parts(*inner, f"{path}.aggr"), index(), num_nodes, node_dim)
    if kind in _SPREADS:
        return _spread(kind, results, _variance(aggregation).semi_grad)
    if kind is MultiAggregation:
        parts, combine = _parts(aggregation, results, index, node_dim, path)
        return combine(parts)
    if kind not in (SoftmaxAggregation, PowerMeanAggregation):
        return results[Reduction(REDUCTIONS[kind])]
    reduction = _weighted(aggregation, path)
    assert isinstance(reduction, Reduction)
    out = results[reduction]
    if isinstance(reduction.values, Powers):
        return reduction.values.mean(out, aggregation._parameters.get("p"))
    return out


def _parts(
    aggregation: Any,
    results: Mapping[Reduction, Tensor],
    index: Callable[[], Tensor],
    node_dim: int,
    path: str,
) -> tuple[list[Tensor], Callable[[list[Tensor]], Tensor]]:
    """The results of several aggregations, or of one, and what combines them."""
    if type(aggregation) is not MultiAggregation:
        return [aggregated(aggregation, results, index, node_dim, path)], itemgetter(0)
    fused, first = aggregation.fused_aggr, next(iter(results.values()))
    is_fused = fused is not None and first.dim() == 2
    found = [
        _spread(type(part), results, fused.semi_grad)
        if is_fused and type(part) in _SPREADS
        else aggregated(part, results, index, node_dim, f"{path}.aggrs.{k}")
        for k, part in enumerate(aggregation.aggrs)
    ]
    return found, aggregation.combine


SCALERS: Mapping[str, Callable[[Any, Tensor], Tensor]] = {
    "identity": lambda _, degree: torch.ones_like(degree),
    "amplification": lambda own, degree: torch.log(degree + 1) / own.avg_deg_log,
    "attenuation": lambda own, degree: own.avg_deg_log / torch.log(degree.clamp(min=1) + 1),
    "linear": lambda own, degree: degree / own.avg_deg_lin,
    "inverse_linear": lambda own, degree: own.avg_deg_lin / degree.clamp(min=1),
}
"""By the names of scalers, the factors of degrees, as ``DegreeScalerAggregation`` has them."""


def _scaled(
    aggregation: Any,
    parts: list[Tensor],
    combine: Callable[[list[Tensor]], Tensor],
    index: Tensor,
    num_nodes: int,
    node_dim: int,
) -> Tensor:
    """The scaling of what aggregations within another have given: upstream's own, or at once."""
    inner, first = aggregation.aggr, parts[0]
    is_joined = len(parts) == 1 or (type(inner) is MultiAggregation and inner.mode == "cat")
    is_usual = all(name in SCALERS for name in aggregation.scaler) and len(aggregation.scaler) > 1
    is_of_rows = node_dim % first.dim() < first.dim() - 1
    if is_joined and is_usual and is_of_rows and all(type(p) is Tensor for p in (*parts, index)):
        degrees = degree(index, num_nodes=num_nodes, dtype=first.dtype)
        size = [1] * first.dim()
        size[node_dim] = -1
        factors = [
            None if name == "identity" else SCALERS[name](aggregation, degrees.view(size))
            for name in aggregation.scaler
        ]
        if all(
            f is None or (type(f) is Tensor and f.dtype is first.dtype and not f.requires_grad)
            for f in factors
        ):
            return scaled_parts(parts, factors)
    out = combine(parts)
    beside = object.__new__(DegreeScalerAggregation)
    beside.__dict__.update(aggregation.__dict__, aggr=lambda *_: out)
    scaled: Tensor = beside.forward(out, index, None, num_nodes, node_dim)
    return scaled


def _variance(aggregation: Any) -> Any:
    return aggregation if type(aggregation) is VarAggregation else aggregation.var_aggr


def _spread(kind: type, results: Mapping[Reduction, Tensor], semi_grad: bool) -> Tensor:
    square = results[_MEAN_OF_SQUARES]
    given = results[_MEAN], square.detach() if semi_grad else square
    return spread_of(_SPREADS[kind], *given, is_plain=all(type(t) is Tensor for t in given))
