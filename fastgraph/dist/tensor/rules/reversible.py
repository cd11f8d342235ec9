"""Layers that are computed without what their backward pass would keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from fastgraph.dist.tensor.collectives import applied
from fastgraph.dist.tensor.layout import Layout
from fastgraph.dist.tensor.sharded import ShardedTensor, is_sharded
from fastgraph.dist.tensor.table import Arguments, NoRuleError, Options, rule

_PYG = "torch_geometric.nn.models.rev_gnn.InvertibleFunction"
_DGL = "dgl.nn.pytorch.conv.grouprevres.InvertibleCheckpoint"


class _Place(NamedTuple):
    """The rows that a local tensor has of a sharded one."""

    rows: Layout
    axis: int


def _place(x: Any) -> _Place | None:
    return _Place(x.rows, x.axis) if is_sharded(x) else None


def _local(x: Any, place: _Place | None) -> Any:
    if not is_sharded(x):
        return x
    return x.local if place is None else x.aligned(place.rows)


def _sharded(x: Any, place: _Place | None) -> Any:
    return x if place is None else ShardedTensor(x, place.rows, place.axis)


@rule(f"{_PYG} {_DGL}")
def by_rows(func: Any, args: Arguments, kwargs: Options) -> Any:
    """Reversible layers: upstream's own function on local rows, and the layer on sharded tensors.

    It frees the storage of inputs. Its backward pass computes these from outputs, and then the
    layer once more, with random numbers that it draws anew.
    """
    function, inverse, *rest = args
    is_pyg = func.__name__ == "InvertibleFunction"
    passes = [rest.pop(0)] if is_pyg else []  # how often the backward pass may run
    num_inputs, *given = rest
    inputs, weights = given[:num_inputs], given[num_inputs:]
    if kwargs or not any(map(is_sharded, inputs)) or any(map(is_sharded, weights)):
        raise NoRuleError
    first = 0 if is_pyg else 1  # DGL's comes after the graph
    of_inputs = [_place(x) for x in inputs]
    of_outputs: list[_Place | None] = []

    def forward(*local: Any) -> Any:
        found = function(*map(_sharded, local, of_inputs))
        outputs = _several(found)
        of_outputs[:] = [_place(x) for x in outputs]
        return _like(found, [_local(x, None) for x in outputs])

    def backward(*local: Any) -> Any:
        places = [*of_inputs[:first], *of_outputs, *of_inputs[first + 1 :]]
        found = inverse(*map(_sharded, local, places))
        return _like(found, list(map(_local, _several(found), of_inputs[first:])))

    local = [_local(x, None) for x in inputs]
    out = applied(func, forward, backward, *passes, num_inputs, *local, *weights)
    return _like(out, list(map(_sharded, _several(out), of_outputs)))


def _several(found: Any) -> Sequence[Any]:
    return found if isinstance(found, tuple) else (found,)


def _like(found: Any, values: list[Any]) -> Any:
    """Values as a tuple, if something was one."""
    return tuple(values) if isinstance(found, tuple) else values[0]
