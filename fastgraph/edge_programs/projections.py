"""Linear maps of few values of edges to many, which a program computes for each edge.

Computed before the program, as other values of edges are, their results would be stored for all
edges: more than anything else that a program reads. Several maps that follow each other are one, of
the product of their matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastgraph.edge_programs.builder import Value
from fastgraph.edge_programs.calls import aten
from fastgraph.edge_programs.recorded import Known, Recorded, Ref, Step, has_all_channels

MOST_VALUES = 32
"""Of an edge. With more, products that each pass computes again take longer than reading them."""

LEAST_CHANNELS = 16
"""Of the result. With fewer, a product takes as long as it does for all edges at once."""

MakeStep = Callable[[Any, tuple[Any, ...]], int]


@dataclass(frozen=True)
class Projection:
    """A linear map of values of edges, as ``torch.nn.functional.linear`` has it.

    Attributes:
        x: the step of the values.
        weight: that of the matrix ``[channels, values]``.
        bias: that of the bias, if there is one.
    """

    x: int
    weight: int
    bias: int | None


def unshaped(step: int, steps: Sequence[Step]) -> int:
    """The step whose values another has in another shape, or itself."""
    while steps[step].function is aten.reshape.default:
        step = steps[step].args[0].step
    return step


def projected(
    v: Recorded,
    steps: Sequence[Step],
    known: Known,
    make: MakeStep,
    value: Callable[[Recorded], Value],
) -> Value | None:
    """A value of edges as a product of fewer ones with a matrix; ``None`` if it is none.

    Args:
        v: the value, which is a step.
        steps: all of them.
        known: gives the tensor that a step computes, and what is known of it.
        make: makes a step.
        value: gives that of what is recorded in the program.
    """
    assert v.step is not None
    made = _projection(v.step, steps, known, make)
    found = None if made is None else known(made.x)
    if made is None or found is None:
        return None
    tensor, x = found
    channels, size = math.prod(v.channels), x.channels[-1]
    if tensor.dtype not in (torch.float32, torch.float64) or channels < LEAST_CHANNELS:
        return None
    if size > MOST_VALUES or 2 * size > channels:
        return None
    matrix = value(Recorded("parameter", (channels, size), made.weight))
    own = value(Recorded("edge", x.channels, x.step, x.value))
    product = own.builder.product(own, matrix, channels, is_transposed=True)
    if made.bias is None:
        return product
    return product + value(Recorded("parameter", (channels,), made.bias))


def _whole(step: int, steps: Sequence[Step], known: Known) -> int:
    """The step all of whose values another has, in the same order."""
    while steps[step].function in (aten.reshape.default, aten.expand.default, aten.select.int):
        source = steps[step].args[0].step
        if steps[step].function is not aten.reshape.default:
            both = known(step), known(source)
            sizes = {math.prod(one[1].channels) for one in both if one is not None}
            if None in both or len(sizes) > 1:
                break
        step = source
    return step


def _projection(
    step: int,
    steps: Sequence[Step],
    known: Known,
    make: MakeStep,
) -> Projection | None:
    """The linear map that a step of edges is, together with those that it follows."""
    made = steps[_whole(step, steps, known)]
    if made.function is not aten.linear.default or made.kwargs:
        return None
    x, weight, bias = (*made.args, None)[:3]
    found = known(x.step)
    if found is None or found[1].place != "edge" or math.prod(found[1].channels[:-1]) != 1:
        return None
    if not has_all_channels(bias, weight, known):
        return None
    own = Projection(x.step, weight.step, None if bias is None else bias.step)
    inner = _projection(x.step, steps, known, make)
    if inner is None:
        return own
    matrix = make(aten.matmul.default, (weight, Ref(inner.weight)))
    if inner.bias is None:
        return Projection(inner.x, matrix, own.bias)
    added = () if bias is None else (bias,)
    moved = make(aten.linear.default, (Ref(inner.bias), weight, *added))
    return Projection(inner.x, matrix, moved)
