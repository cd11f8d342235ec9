"""Rules for reversible layers, whose backward pass computes inputs from outputs again."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastgraph.dist.tensor.layout import Layout
from fastgraph.dist.tensor.sharded import ShardedTensor, is_sharded
from fastgraph.dist.tensor.table import NoRuleError, TorchFunction, rule, unpacked

_PYG = "torch_geometric.nn.models.rev_gnn.InvertibleFunction"
_DGL = "dgl.nn.pytorch.conv.grouprevres.InvertibleCheckpoint"


class _Place(NamedTuple):
    """The rows that a local tensor has of a sharded one."""

    rows: Layout
    axis: int


def _place(x: object) -> _Place | None:
    return _Place(x.rows, x.axis) if is_sharded(x) else None


def _local(x: object, place: _Place | None) -> object:
    if not is_sharded(x):
        return x
    return x.local if place is None else x.aligned(place.rows)


def _sharded(x: object, place: _Place | None) -> object:
    if place is None:
        return x
    assert isinstance(x, Tensor)
    return ShardedTensor(x, place.rows, place.axis)


@rule(f"{_PYG} {_DGL}")
@unpacked
def by_rows(
    func: type[torch.autograd.Function],
    function: TorchFunction,
    inverse: TorchFunction,
    *rest: object,
) -> object:
    """Reversible layers: upstream's own function on local rows, and the layer on sharded tensors.

    It frees the storage of inputs. Its backward pass computes these from outputs, and then the
    layer once more, with random numbers that it draws anew.
    """
    is_pyg = func.__name__ == "InvertibleFunction"
    num_passes = rest[:1] if is_pyg else ()  # how often the backward pass may run
    num_inputs, *given = rest[len(num_passes) :]
    assert isinstance(num_inputs, int)
    inputs, weights = given[:num_inputs], given[num_inputs:]
    if not any(map(is_sharded, inputs)) or any(map(is_sharded, weights)):
        raise NoRuleError
    first = 0 if is_pyg else 1  # DGL's comes after the graph
    of_inputs = [_place(x) for x in inputs]
    of_outputs: list[_Place | None] = []

    def forward(*local: object) -> object:
        found = function(*map(_sharded, local, of_inputs))
        outputs = _several(found)
        of_outputs[:] = [_place(x) for x in outputs]
        return _like(found, [_local(x, None) for x in outputs])

    def backward(*local: object) -> object:
        places = [*of_inputs[:first], *of_outputs, *of_inputs[first + 1 :]]
        found = inverse(*map(_sharded, local, places))
        return _like(found, list(map(_local, _several(found), of_inputs[first:])))

    local = [_local(x, None) for x in inputs]
    out = func.apply(forward, backward, *num_passes, num_inputs, *local, *weights)
    return _like(out, list(map(_sharded, _several(out), of_outputs)))


def _several(found: object) -> tuple[object, ...]:
    return found if isinstance(found, tuple) else (found,)


def _like(found: object, values: list[object]) -> object:
    """Values as a tuple, if something was one."""
    return tuple(values) if isinstance(found, tuple) else values[0]
