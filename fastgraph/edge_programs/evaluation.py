"""Edge programs in plain torch: the specification of what they compute.

Values of edges are stored, so memory grows with edges x channels. Gradients are torch's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastgraph.edge_programs.moments import spread_of
from fastgraph.edge_programs.operations import (
    CONSTANT,
    DETACH,
    DOT,
    ELEMENTWISE,
    FIRST,
    FOLD,
    FOLD_MAX,
    OUTER,
    PAD,
    PRODUCT,
    PRODUCT_T,
    ROUND,
    SLICE,
    SOFTMAX,
    SOFTMAX_MAX,
    SOFTMAX_SCALE,
    SPREAD,
    STD,
    SUM_TILES,
    TILE,
    VAR,
)
from fastgraph.edge_programs.program import Instruction, Operand, Output, Program


class Edges(NamedTuple):
    """The ends of edges.

    Attributes:
        gathered: int64 ``[E]``, the gathered node of each.
        row: int64 ``[E]``, the aggregating node of each.
        num_rows: the number of aggregating nodes.
    """

    gathered: Tensor
    row: Tensor
    num_rows: int


def evaluate(
    program: Program, operands: Sequence[Tensor], edges: Edges, accumulator: torch.dtype
) -> list[Tensor]:
    """The outputs of a program.

    Args:
        program: any.
        operands: in the program's order, ``[nodes, width]``, ``[E, width]`` or, of parameters,
            ``[width]``, of one floating-point dtype.
        edges: of the graph.
        accumulator: the dtype in which values are computed.

    Returns:
        For each output ``[rows, width]``, of ``edge`` ``[E, width]``, of ``total`` ``[width]`` and
        of ``outer`` ``[width * other width]``, of the operands' dtype; records of ties int32.
    """
    dtype = operands[0].dtype
    values: list[Tensor] = []
    for operand, tensor in zip(program.operands, operands, strict=True):
        values.append(_of_edges(operand, tensor.to(accumulator), edges))
    for instruction in program.instructions:
        if instruction.operation in (PRODUCT, PRODUCT_T):
            value, matrix = instruction.arguments
            values.append(_product(instruction, values[value], operands[matrix].to(accumulator)))
            continue
        arguments = [values[a] for a in instruction.arguments]
        values.append(_value(instruction, arguments, values[0], dtype))
    return [_reduced(output, values, edges, dtype) for output in program.outputs]


def _of_edges(operand: Operand, tensor: Tensor, edges: Edges) -> Tensor:
    if operand.place == "row":
        return tensor.index_select(0, edges.row)
    if operand.place == "gathered":
        return tensor.index_select(0, edges.gathered)
    if operand.place == "parameter":
        return tensor.unsqueeze(0).expand(edges.row.shape[0], -1)
    return tensor


def _value(
    instruction: Instruction, arguments: list[Tensor], like: Tensor, dtype: torch.dtype
) -> Tensor:
    operation, width = instruction.operation, instruction.width
    if operation == CONSTANT:
        return like.new_full((like.shape[0], 1), instruction.constant)
    if operation == ROUND:
        return arguments[0].to(dtype).to(like.dtype)
    if operation == DETACH:
        return arguments[0].detach()
    if operation in (SLICE, PAD, FIRST):
        return _of_channels(instruction, arguments[0])
    if operation == FOLD_MAX:
        return _heads(arguments[0], width).amax(-1)
    if operation == SPREAD:
        return spread(arguments[0], width)
    if operation == FOLD:
        return _fold(arguments[0], width)
    if operation == TILE:
        return arguments[0].repeat(1, width // arguments[0].shape[1])
    if operation == SUM_TILES:
        value = arguments[0]
        return value.reshape(value.shape[0], value.shape[1] // width, width).sum(1)
    widest = max(argument.shape[1] for argument in arguments)
    wide = [spread(argument, widest) for argument in arguments]
    if operation == DOT:
        return _fold(wide[0] * wide[1], width)
    return ELEMENTWISE[operation].evaluate(*wide)


def _heads(value: Tensor, heads: int) -> Tensor:
    """The channels of each head, ``[E, heads, channels]``."""
    return value.reshape(value.shape[0], heads, value.shape[1] // heads)


def _of_channels(instruction: Instruction, value: Tensor) -> Tensor:
    own = _heads(value, instruction.heads)
    count, size = instruction.width // instruction.heads, own.shape[-1]
    if instruction.operation == SLICE:
        own = own.narrow(-1, instruction.start, count)
    elif instruction.operation == PAD:
        own = F.pad(own, (instruction.start, count - size - instruction.start))
    else:
        found = own != 0
        own = (found & (found.cumsum(-1) == 1)).to(value.dtype)
    return own.reshape(value.shape[0], instruction.width)


def _product(instruction: Instruction, value: Tensor, matrix: Tensor) -> Tensor:
    if instruction.operation == PRODUCT:
        return value @ matrix.view(value.shape[1], instruction.width)
    return value @ matrix.view(instruction.width, value.shape[1]).t()


def spread(value: Tensor, width: int) -> Tensor:
    """A value ``[E, heads]`` of each head as one of each channel, ``[E, width]``."""
    if value.shape[1] == width:
        return value
    count = width // value.shape[1]
    return value.unsqueeze(-1).expand(-1, -1, count).reshape(value.shape[0], width)


def _fold(value: Tensor, heads: int) -> Tensor:
    return _heads(value, heads).sum(-1)


def _reduced(output: Output, values: Sequence[Tensor], edges: Edges, dtype: torch.dtype) -> Tensor:
    reduction, value = output.reduction, values[output.value]
    if reduction in (SOFTMAX, SOFTMAX_MAX, SOFTMAX_SCALE):
        score = value if output.score < 0 else values[output.score]
        return _softmax(reduction, value, score, edges, dtype)
    if reduction == OUTER:
        return (value.t() @ values[output.score]).flatten().to(dtype)
    if reduction == "edge":
        return value.to(dtype)
    if reduction == "total":
        return value.sum(0).to(dtype)
    if reduction in (VAR, STD):
        return spread_of(reduction, _mean(value, edges), _mean(value * value, edges)).to(dtype)
    if reduction == "mean":
        return _mean(value, edges).to(dtype)
    zeros = value.new_zeros(edges.num_rows, value.shape[1])
    if reduction == "sum":
        return zeros.index_add(0, edges.row, value).to(dtype)
    value = value.to(dtype)
    index = edges.row.unsqueeze(-1).expand_as(value)
    name = "amax" if reduction.startswith("max") else "amin"
    out = zeros.to(dtype).scatter_reduce(0, index, value, reduce=name, include_self=False)
    if not reduction.endswith("_ties"):
        return out
    # A zero extremum of a row with edges shares with the zeros that torch's output begins with.
    occupied = torch.zeros_like(out, dtype=torch.bool).scatter(0, index, True)
    shares = ((out == 0) & occupied).int()
    return shares.scatter_add(0, index, (value == out.gather(0, index)).int())


def _mean(value: Tensor, edges: Edges) -> Tensor:
    degree = torch.bincount(edges.row, minlength=edges.num_rows).clamp(min=1)
    sums = value.new_zeros(edges.num_rows, value.shape[1]).index_add(0, edges.row, value)
    return sums / degree.unsqueeze(-1)


def softmax_weights(score: Tensor, edges: Edges) -> Tensor:
    """The softmax of scores ``[E, heads]`` over the edges of each row."""
    weight, scale = _exponentials(score, _largest(score, edges), edges)
    return weight * scale.index_select(0, edges.row)


def _softmax(
    reduction: str, value: Tensor, score: Tensor, edges: Edges, dtype: torch.dtype
) -> Tensor:
    """The sum of values weighted by the softmax of scores, or a record of it."""
    largest = _largest(score, edges).to(dtype)
    if reduction == SOFTMAX_MAX:
        return largest
    weight, scale = _exponentials(score, largest.to(score.dtype), edges)
    if reduction == SOFTMAX_SCALE:
        return scale.to(dtype)
    weighted = spread(weight * scale.index_select(0, edges.row), value.shape[1]) * value
    out = value.new_zeros(edges.num_rows, value.shape[1]).index_add(0, edges.row, weighted)
    return out.to(dtype)


def _largest(score: Tensor, edges: Edges) -> Tensor:
    """The largest scores of rows, constants: whatever is subtracted, the softmax is the same."""
    zeros = score.new_zeros(edges.num_rows, score.shape[1])
    index = edges.row.unsqueeze(-1).expand_as(score)
    return zeros.scatter_reduce(0, index, score.detach(), reduce="amax", include_self=False)


def _exponentials(score: Tensor, largest: Tensor, edges: Edges) -> tuple[Tensor, Tensor]:
    """``exp(score - largest)`` of each edge, and 1 over their sum for each row with edges."""
    zeros = score.new_zeros(edges.num_rows, score.shape[1])
    index = edges.row.unsqueeze(-1).expand_as(score)
    weight = (score - largest.index_select(0, edges.row)).exp()
    occupied = torch.zeros_like(zeros, dtype=torch.bool).scatter(0, index, True)
    total = zeros.index_add(0, edges.row, weight)
    return weight, torch.where(occupied, total, 1).reciprocal() * occupied
