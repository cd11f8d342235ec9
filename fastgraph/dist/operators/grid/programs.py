"""Edge programs on a grid: the program of a block, and its outputs joined to those of all.

Operands of rows are replicated within a row of the grid, those of gathered nodes within a column.
Each block reduces its own edges, and ranks of a row send each other its results.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fastgraph.dist.operators.attention import Convert, each, shared, together
from fastgraph.dist.operators.grid import joining
from fastgraph.dist.operators.grid.graph import Block
from fastgraph.dist.operators.rank_graph import local_rows
from fastgraph.dist.tensor.collectives import sum_of_ranks
from fastgraph.dist.tensor.sharded import ShardedTensor
from fastgraph.dist.tensor.table import NoRuleError
from fastgraph.edge_programs.builder import Builder, Value
from fastgraph.edge_programs.operations import (
    EXTREMA,
    OUTER,
    SOFTMAX,
    SOFTMAX_MAX,
    SOFTMAX_SCALE,
)
from fastgraph.edge_programs.program import Program
from fastgraph.ops.edge_program import EDGE_PROGRAM

_OVER_ALL = ("total", OUTER)
_OF_TIES = {record: reduction for reduction, record in EXTREMA.items()}


class Blockwise(NamedTuple):
    """A program as the blocks of a grid compute it.

    Attributes:
        program: of a block.
        parts: for each output of the whole, the numbers of those of a block that it is made of: of
            an extremum also that of its ties if they are recorded; of a softmax the largest score
            and the scale of it, then the largest of what was given. Of scores there are none below
            the least number, as a block may have no others where the whole row has.
        sent: which outputs of a block the ranks of a row send each other, by their numbers.
    """

    program: Program
    parts: tuple[tuple[int, ...], ...]
    sent: tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def blockwise(program: Program, dtype: torch.dtype) -> Blockwise:
    """The program of a block, for operands of a dtype."""
    builder = Builder()
    values = builder.replay(program)
    outputs: list[tuple[str, *tuple[Value, ...]]] = []

    def number(reduction: str, *of: Value) -> int:
        if (reduction, *of) not in outputs:
            outputs.append((reduction, *of))
        return outputs.index((reduction, *of))

    made: list[tuple[int, ...]] = []
    not_sent: set[int] = set()
    present = {(output.reduction, output.value) for output in program.outputs}
    for output in program.outputs:
        reduction, value = output.reduction, values[output.value]
        if reduction in (SOFTMAX, SOFTMAX_MAX, SOFTMAX_SCALE):
            given = value if output.score < 0 else values[output.score]
            score = builder.apply("maximum", given, torch.finfo(dtype).min)
            statistics = number(SOFTMAX_MAX, score), number(SOFTMAX_SCALE, score)
            largest = number(SOFTMAX_MAX, given)
            not_sent.add(largest)
            sums = (number(SOFTMAX, value, score),) if reduction == SOFTMAX else ()
            made.append((*statistics, largest, *sums))
        elif reduction in EXTREMA or reduction in _OF_TIES:
            name = _OF_TIES.get(reduction, reduction)
            ties = EXTREMA[name]
            is_recorded = (ties, output.value) in present
            numbers = number(name, value), *([number(ties, value)] if is_recorded else [])
            made.append(numbers)
        elif reduction in ("edge", *_OVER_ALL):
            factors = [values[v] for v in output.values]
            made.append((number(reduction, *factors),))
            not_sent.add(made[-1][0])
        else:
            made.append((number(reduction, value),))
    found = replace(builder.program(*outputs), flat=program.flat)
    sent = tuple(k for k in range(len(outputs)) if k not in not_sent)
    return Blockwise(found, tuple(made), sent)


def outputs_of(block: Block, operands: Sequence[Tensor], program: Program) -> list[Tensor]:
    """The outputs of a program on the edges of all blocks; all ranks ask for them together.

    Args:
        block: of this rank.
        operands: as the operator got them.
        program: with the records of all extrema of which a gradient is wanted.

    Raises:
        NoRuleError: an operand does not fit, or a parameter is sharded.
    """
    local = _operands(block, operands, program)
    made = blockwise(program, local[0].dtype)
    found = run(block, local, made.program)
    for k, score in _lost(made, program):
        found[k] = torch.where(found[score] == -torch.inf, found[score], found[k])
    parts: dict[int, Tensor] = {}
    if made.sent:
        parts = dict(zip(made.sent, block.parts([found[k] for k in made.sent]), strict=True))
    joined: dict[tuple[object, ...], object] = {}
    return [
        _result(block, program, k, numbers, found, parts, joined)
        for k, numbers in enumerate(made.parts)
    ]


def _lost(made: Blockwise, program: Program) -> set[tuple[int, int]]:
    """The numbers of the largest scores of softmaxes, and of those of what was given."""
    return {
        (numbers[0], numbers[2])
        for output, numbers in zip(program.outputs, made.parts, strict=True)
        if output.reduction in (SOFTMAX, SOFTMAX_MAX, SOFTMAX_SCALE)
    }


def _result(
    block: Block,
    program: Program,
    k: int,
    numbers: tuple[int, ...],
    found: Sequence[Tensor],
    parts: dict[int, Tensor],
    joined: dict[tuple[object, ...], object],
) -> Tensor:
    """One output; extrema and softmaxes are joined once for all that are made of them."""
    reduction, rows = program.outputs[k].reduction, block.destinations
    first = numbers[0]
    if reduction == "edge":
        return ShardedTensor(found[first], block.edges, 0)
    if reduction in _OVER_ALL:
        return sum_of_ranks(found[first])
    if reduction == "sum":
        out = joining.sums(parts[first])
    elif reduction == "mean":
        out = joining.means(block, parts[first])
    elif reduction in EXTREMA or reduction in _OF_TIES:
        name = _OF_TIES.get(reduction, reduction)
        if len(numbers) == 1:
            return ShardedTensor(joining.most_extreme(block, parts[first], name), rows, 0)
        if numbers not in joined:
            joined[numbers] = joining.extremum(block, parts[first], parts[numbers[1]], name)
        pair = joined[numbers]
        assert isinstance(pair, tuple)
        out = pair[reduction in _OF_TIES]
    else:
        if numbers[:2] not in joined:
            joined[numbers[:2]] = joining.softmax(block, *(parts[n] for n in numbers[:2]))
        softmax = joined[numbers[:2]]
        assert isinstance(softmax, joining.Softmax)
        dtype = found[first].dtype
        if reduction == SOFTMAX:
            sums = parts[numbers[3]]
            width = sums.shape[-1] // softmax.shares.shape[-1]
            out = joining.sums(softmax.shares.to(dtype).repeat_interleave(width, -1) * sums)
        else:
            out = (softmax.largest if reduction == SOFTMAX_MAX else softmax.inverse).to(dtype)
    return ShardedTensor(out, rows, 0)


def _operands(block: Block, operands: Sequence[Tensor], program: Program) -> list[Tensor]:
    """Those for a block, in a collective for each kind of nodes."""
    of_places: dict[str, Convert] = {
        "row": lambda x: local_rows(x, block.destinations),
        "gathered": lambda x: local_rows(x, block.sources),
        "edge": block.of_edges,
    }
    places = [operand.place for operand in program.operands]
    local = each(of_places, shared, places, operands)
    together("gathered", block.from_sources, places, local)
    together("row", block.from_destinations, places, local)
    return [x for x in local if x is not None]


def run(block: Block, local: Sequence[Tensor], program: Program) -> list[Tensor]:
    """The outputs of a program on the edges of this block, given its operands for them."""
    reductions = [output.reduction for output in program.outputs]
    of_edges = "edge" in (*(operand.place for operand in program.operands), *reductions)
    edges = block.edges_of(numbered=of_edges)
    sizes = block.local.num_src, block.num_destinations
    return list(EDGE_PROGRAM(list(local), edges.index, edges.ptr, str(program), *sizes, False))


def softmax_of_edges(block: Block, score: Tensor) -> Tensor:
    """The softmax of the scores of the edges of all blocks, of those of this one.

    Args:
        block: of this rank.
        score: of its edges, ``[edges, *heads]``.

    Raises:
        NoRuleError: there are no heads.
    """
    heads = score.shape[1:].numel()
    if heads == 0:
        raise NoRuleError
    flat = score.reshape(len(score), heads)
    statistics, weights = _softmax_programs(heads, score.dtype)
    largest, inverse, given = run(block, [flat], statistics)
    is_lost = given == -torch.inf
    seen = largest.masked_fill(is_lost, -torch.inf)
    joined = joining.softmax(block, *block.parts([seen, inverse]))
    (share,) = block.of_parts([joined.shares])
    (found,) = run(block, [flat, largest, inverse * share.to(inverse.dtype)], weights)
    return found.view(score.shape)


@functools.lru_cache(maxsize=64)
def _softmax_programs(heads: int, dtype: torch.dtype) -> tuple[Program, Program]:
    """Of scores of edges: the statistics of a block, and the weights by them."""
    builder = Builder()
    given = builder.operand("score", "edge", heads)
    score = builder.apply("maximum", given, torch.finfo(dtype).min)
    statistics = builder.program((SOFTMAX_MAX, score), (SOFTMAX_SCALE, score), (SOFTMAX_MAX, given))
    largest, scale = (builder.operand(name, "row", heads) for name in ("largest", "scale"))
    weight = builder.apply("exp", score - largest) * scale
    return statistics, builder.program(("edge", weight))
