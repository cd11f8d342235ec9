"""``edge_program``: any message of a few element-wise instructions, reduced over neighbourhoods.

The gradient of a program is one more program for the aggregating nodes, and one for the gathered
ones on the transposed graph, so derivatives of any order run through the same kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fastgraph.edge_programs.gradients import derive
from fastgraph.edge_programs.moments import Moments, with_variances, without_variances
from fastgraph.edge_programs.operations import (
    EXTREMA,
    SOFTMAX,
    SOFTMAX_MAX,
    SOFTMAX_SCALE,
)
from fastgraph.edge_programs.program import Operand, Output, Program, parse
from fastgraph.graphs.edges import KnownGraph, as_saved, callers_of, known_graph
from fastgraph.graphs.graph import Graph
from fastgraph.machine.memory import contiguous
from fastgraph.ops.gradient_batches import by_batch, has_tangent, is_batch, with_tangents
from fastgraph.ops.library import (
    Arguments,
    Context,
    Gradient,
    define,
    is_transformed,
    needs_no_dispatcher,
    wanted_gradients,
    without_dispatcher,
)
from fastgraph.ops.topology import check_index, check_values, topology
from fastgraph.plugins.backend import accumulator, device_type
from fastgraph.registry.registry import REGISTRY


def edge_program(
    program: Program | str,
    operands: Mapping[str, Tensor],
    index: Tensor,
    *,
    ptr: Tensor | None = None,
    num_in: int | None = None,
    num_out: int | None = None,
    transpose: bool = False,
) -> tuple[Tensor, ...]:
    """Compute messages by a program, and reduce them: nothing of edges x channels is stored.

    For example, the sum of ``w * x`` over neighbours:

        x = gathered 128
        w = edge 1
        t0 = mul w x
        sum t0

    Values are computed in float32, or float64 for float64 operands. They and gradients are bitwise
    equal for any number of threads. The gradients of means and of extrema that several edges attain
    are what PyG's aggregations have for ``edge_index``; see :func:`fastgraph.ops.segment_reduce`
    with ``ties="split"``. A softmax keeps two numbers for each score of a node. Variances are
    computed of means, as PyG computes them. In half types, a message is rounded before it is
    compared with others, and no value before that is.

    Args:
        program: a :class:`fastgraph.edge_programs.program.Program`, or its text.
        operands: a tensor for each of its operands, by name: ``[nodes, *channels]`` for those in
            the places ``row`` (the aggregating nodes) and ``gathered``, ``[E, *channels]`` or
            ``[E]`` for those of edges, and ``[*channels]`` for parameters, as many channels as its
            width; all of one dtype, float32, float64, bfloat16 or float16.
        index: int64 or int32 ``[2, E]``, sources in row 0, destinations in row 1; with ``ptr``, the
            sources ``[E]`` grouped by destination, or ``[2, E]`` with the number of each edge in
            row 1.
        ptr: int64 or int32 ``[nodes + 1]``, offsets of the groups in ``index``.
        num_in: the number of gathered nodes; default: that of a gathered operand, or ``num_out``.
        num_out: the number of aggregating nodes; default: that of an operand of rows, or
            ``num_in``.
        transpose: reverse every edge (PyG's ``flow="target_to_source"``).

    Returns:
        For each output of the program ``[num_out, width]``, zeros for nodes without edges; of
        ``edge`` ``[E, width]``, of ``total`` ``[width]``, and of ``outer`` the product of both
        widths.

    Raises:
        ValueError: the program is wrong, or an argument has the wrong shape, dtype, device or
            value.
        IndexError: ``index`` points outside the nodes.
    """
    made = parse(program) if isinstance(program, str) else program
    if set(operands) != set(made.names):
        raise ValueError(
            f"operands must be those of the program, {list(made.names)}, got {list(operands)}"
        )
    given = [operands[name] for name in made.names]
    matrices = [matrix_of(o, tensor) for o, tensor in zip(made.operands, given, strict=True)]
    num_in = _num_nodes(made, given, "gathered") if num_in is None else num_in
    num_out = _num_nodes(made, given, "row") if num_out is None else num_out
    if num_in is None and num_out is None:
        raise ValueError("num_in or num_out must be given where no operand belongs to nodes")
    num_in, num_out = (
        second if first is None else first
        for first, second in ((num_in, num_out), (num_out, num_in))
    )
    assert num_in is not None and num_out is not None
    return tuple(run_program(made, matrices, index, ptr, num_in, num_out, transpose))


def run_program(
    program: Program,
    matrices: Sequence[Tensor],
    index: Tensor,
    ptr: Tensor | None,
    num_in: int,
    num_out: int,
    transpose: bool,
    *,
    graph: Graph | None = None,
) -> Sequence[Tensor]:
    """:func:`edge_program` of operands in their order, with all channels in one dimension.

    Args:
        program: as there.
        matrices: the operands.
        index: as there.
        ptr: as there.
        num_in: as there.
        num_out: as there.
        transpose: as there.
        graph: of the index, where a route has looked at all of these, outside of compilers and
            transforms: they fit, and nothing else is asked of them.
    """
    is_recorded = torch.is_grad_enabled() and True in [t.requires_grad for t in matrices]
    moments, ran, text = _run_of(program, is_recorded)
    out: Sequence[Tensor]
    given = matrices, index, ptr, text, num_in, num_out, transpose
    if graph is None or not needs_no_dispatcher(matrices):
        out = EDGE_PROGRAM(*given)
    elif is_recorded or not index.is_cpu:
        out = KnownGraph(graph, index, ptr).while_computing(_DIRECT, *given)
    else:
        out = _computed(graph, matrices, ran, transpose)
    if moments is None:
        return out[: len(program.outputs)]  # without records
    return with_variances(moments, out)


@functools.lru_cache(maxsize=1024)
def _run_of(program: Program, is_recorded: bool) -> tuple[Moments | None, Program, str]:
    """The program that is run, after what is made of its outputs if they are others; its text."""
    moments = without_variances(program)
    run = with_records(moments.program) if is_recorded else moments.program
    text = str(run)
    # The one object of all that are equal, which caches find by its identity.
    return None if moments.program.outputs == program.outputs else moments, parse(text), text


def _computed(
    graph: Graph, operands: Sequence[Tensor], program: Program, transpose: bool
) -> list[Tensor]:
    """The outputs of a program by the kernel for its operands, which fit."""
    like = operands[0]
    kernel = REGISTRY.kernel("edge_program", device_type(like), like.dtype)
    given = [t if t.is_contiguous() else _laid_out(t) for t in operands]
    out: list[Tensor] = kernel(graph, given, program, transpose)
    return out


def _laid_out(operand: Tensor) -> Tensor:
    """An operand as kernels take it: contiguous, or one row that stands for all."""
    if operand.dim() == 2 and operand.shape[0] > 1 and operand.stride(0) == 0:
        return contiguous(operand[:1]).expand_as(operand)
    return contiguous(operand)


def matrix_of(operand: Operand, tensor: Tensor) -> Tensor:
    """A tensor as the operator takes it, with all its channels in one dimension.

    Raises:
        ValueError: it is no such operand.
    """
    is_parameter = operand.place == "parameter"
    given = tensor.shape
    if len(given) == 2 - is_parameter and given[-1] == operand.width:
        return tensor  # which the operator looks at
    check_values(operand.name, tensor)
    channels = given if is_parameter else given[1:]
    if channels.numel() != operand.width or (tensor.dim() == 0 and not is_parameter):
        first = "" if is_parameter else "edges, " if operand.place == "edge" else "nodes, "
        raise ValueError(
            f"{operand.name} must be [{first}*channels] with {operand.width} channels, "
            f"got shape {list(given)}"
        )
    return tensor.reshape((operand.width,) if is_parameter else (given[0], operand.width))


def _num_nodes(program: Program, given: Sequence[Tensor], place: str) -> int | None:
    found = (
        tensor.shape[0]
        for operand, tensor in zip(program.operands, given, strict=True)
        if operand.place == place
    )
    return next(found, None)


@functools.lru_cache(maxsize=1024)
def with_records(program: Program) -> Program:
    """The program with the records that the gradients of its extrema and softmaxes need."""
    records: list[Output] = []
    for output in program.outputs:
        if output.reduction in EXTREMA:
            records.append(Output(EXTREMA[output.reduction], output.value))
        elif output.reduction in (SOFTMAX, SOFTMAX_SCALE):
            score = output.value if output.score < 0 else output.score
            records += [Output(name, score) for name in (SOFTMAX_MAX, SOFTMAX_SCALE)]
    missing = [record for record in records if record not in program.outputs]
    if not missing:
        return program
    return replace(program, outputs=(*program.outputs, *dict.fromkeys(missing)))


def _check(
    operands: Sequence[Tensor],
    index: Tensor,
    ptr: Tensor | None,
    program: Program,
    num_in: int,
    num_out: int,
) -> None:
    if program.has_variances:
        raise ValueError("variances must be computed by ops.edge_program, of means")
    if len(operands) != len(program.operands):
        raise ValueError(
            f"operands must be one for each of {list(program.names)}, got {len(operands)}"
        )
    like = operands[0]
    check_values(program.names[0], like)
    dtype, device = like.dtype, like.device
    num_rows = {"row": num_out, "gathered": num_in, "edge": index.shape[-1]}
    for operand, tensor in zip(program.operands, operands, strict=True):
        if tensor.dtype is not dtype or tensor.layout is not torch.strided:
            check_values(operand.name, tensor)
        place, width = operand.place, operand.width
        expected = (width,) if place == "parameter" else (num_rows[place], width)
        if tensor.shape != expected:
            raise ValueError(
                f"{operand.name} must have shape {list(expected)}, got {list(tensor.shape)}"
            )
        if tensor.dtype != dtype or tensor.device != device:
            raise ValueError(
                f"{operand.name} must have the dtype and device of {program.names[0]} "
                f"({dtype}, {device}), got ({tensor.dtype}, {tensor.device})"
            )
    check_index(index, ptr, like)


def _forward(
    operands: Sequence[Tensor],
    index: Tensor,
    ptr: Tensor | None,
    text: str,
    num_in: int,
    num_out: int,
    transpose: bool,
) -> list[Tensor]:
    program = parse(text)
    ends = (num_out, num_in) if transpose else (num_in, num_out)
    graph = known_graph(index, ptr, *ends)
    if graph is None:  # else a route has looked at all of it
        _check(operands, index, ptr, program, num_in, num_out)
        graph = topology(index, ptr, num_in, num_out, transpose)
    return _computed(graph, operands, program, transpose)


def _fake(
    operands: Sequence[Tensor],
    index: Tensor,
    ptr: Tensor | None,
    text: str,
    num_in: int,
    num_out: int,
    transpose: bool,
) -> list[Tensor]:
    program = parse(text)
    _check(operands, index, ptr, program, num_in, num_out)
    like = operands[0]
    return [
        like.new_empty(
            program.output_shape(output, num_out, index.shape[-1]),
            dtype=torch.int32 if output.is_record else like.dtype,
        )
        for output in program.outputs
    ]


class _OfProgram(Context):
    program: Program
    num_in: int
    num_out: int
    transpose: bool


def _save(ctx: _OfProgram, arguments: Arguments, result: Sequence[Tensor]) -> None:
    operands, index, ptr, text, ctx.num_in, ctx.num_out, ctx.transpose = arguments
    program = ctx.program = parse(text)
    # Only what a gradient needs: users may edit all else in place before the backward pass.
    are_kept, constant = _are_kept(program, tuple([tensor.requires_grad for tensor in operands]))
    if constant:
        ctx.mark_non_differentiable(*[result[k] for k in constant])
    given = [*operands, *result]
    kept = [tensor if keep else None for keep, tensor in zip(are_kept, given, strict=True)]
    ctx.save_for_backward(*as_saved(index, ptr), *kept, *callers_of(index))


@functools.lru_cache(maxsize=1024)
def _are_kept(
    program: Program, requires_grad: tuple[bool, ...]
) -> tuple[tuple[bool, ...], tuple[int, ...]]:
    """True for each operand and each result that a gradient needs; results that have none."""
    named = zip(program.names, requires_grad, strict=True)
    needed = frozenset(name for name, requires in named if requires)
    differentiable = _differentiable(program)
    taken = derive(program, needed, differentiable).operands
    results = (output.is_record or output.reduction in _KEPT for output in program.outputs)
    constant = (k for k in range(len(program.outputs)) if k not in differentiable)
    return (*(name in taken for name in program.names), *results), tuple(constant)


_KEPT = (*EXTREMA, SOFTMAX, SOFTMAX_MAX, SOFTMAX_SCALE)
"""Reductions whose results their gradients need."""


@functools.lru_cache(maxsize=1024)
def _differentiable(program: Program) -> frozenset[int]:
    """The numbers of the outputs that have gradients."""
    return frozenset(k for k, output in enumerate(program.outputs) if output.has_gradient)


class _Pass(NamedTuple):
    """A program for gradients, of values by their numbers.

    Attributes:
        program: of them.
        text: the same.
        taken: of the operands and results, then of the gradients of results, then of the products
            of softmaxes, then of what divides gradients of means.
        made: of the operands whose gradients it gives.
        is_reversed: whether its rows are the gathered nodes.
    """

    program: Program
    text: str
    taken: tuple[int, ...]
    made: tuple[int, ...]
    is_reversed: bool


@functools.lru_cache(maxsize=1024)
def _passes(
    program: Program, wanted: tuple[bool, ...], given: tuple[bool, ...], divides: bool
) -> tuple[tuple[_Pass, ...], tuple[int, ...]]:
    """The passes for gradients of some operands, given those of some results.

    These divide gradients of means themselves where ``divides`` is true. Besides the operands whose
    gradients are zeros where no pass makes them.
    """
    numbers = {name: k for k, name in enumerate(program.names)}
    names = frozenset(name for name, want in zip(program.names, wanted, strict=True) if want)
    there = frozenset(k for k, is_given in enumerate(given) if is_given)
    derived = derive(program, names, there & _differentiable(program), divides=divides)
    named = (*program.names, *derived.results, *derived.grads, *derived.products, derived.share)
    values = {name: k for k, name in enumerate(named)}
    passes = tuple(
        _Pass(
            parse(str(made.program)),
            str(made.program),
            tuple(values[name] for name in made.program.names),
            tuple(numbers[name] for name in made.names),
            made.is_reversed,
        )
        for made in derived.passes
    )
    return passes, tuple(numbers[name] for name in program.flat if name in names)


def _backward(ctx: _OfProgram, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    for is_special, compute in ((is_batch, by_batch), (has_tangent, with_tangents)):
        if any(g is not None and is_special(g) for g in grads):
            return tuple(compute(functools.partial(_backward, ctx), grads))
    index, ptr, *saved = ctx.saved_tensors
    program = ctx.program
    count = len(program.operands)
    wanted = tuple(wanted_gradients(ctx)[:count])
    found: list[Tensor | None] = [None] * count
    if True not in wanted:
        return (*found, *(None,) * 6)
    saved = saved[: count + len(program.outputs)]  # without the caller's tensors
    results = saved[count:]
    is_plain = needs_no_dispatcher((*saved, *grads)) and not is_transformed()
    # Then nothing is differentiated, and no gradient is a batch.
    is_alone = is_plain and not torch.is_grad_enabled()
    divides = is_alone and index.is_cpu and _divides(ctx, grads, index.shape[-1])
    passes, flat = _passes(program, wanted, tuple([g is not None for g in grads]), divides)
    shares: list[Tensor | None] = []
    products: list[Tensor | None] = []
    for k, grad in enumerate(grads):
        output, given = program.outputs[k], (index, ptr, results, is_alone, divides)
        is_weighed = output.reduction == SOFTMAX
        shares.append(None if grad is None else _share(ctx, k, grad, *given))
        products.append(
            _sums_of_heads(grad, results[k], program.width(output.score), is_alone)
            if grad is not None and is_weighed
            else None
        )
    values = [*saved, *shares, *products]
    if divides:
        like = next(g for g in grads if g is not None)
        values.append(_inverse_degrees(ctx, index, ptr, like.dtype))
    run: Callable[..., Sequence[Tensor]] = EDGE_PROGRAM
    graph = None
    if is_plain and index.is_cpu:
        # All passes are on one graph, and the engine has looked at the gradients. On a GPU each
        # look-up spoils the results of one pass where the graph is stale.
        graph = topology(index, ptr, ctx.num_in, ctx.num_out, ctx.transpose)
        run = functools.partial(KnownGraph(graph, index, ptr).while_computing, _DIRECT)
    for made in passes:
        taken = [values[k] for k in made.taken]
        is_reversed = made.is_reversed != ctx.transpose
        out: Sequence[Tensor]
        if graph is not None and is_alone:
            out = _computed(graph, taken, made.program, is_reversed)
        else:
            sizes = (ctx.num_out, ctx.num_in) if made.is_reversed else (ctx.num_in, ctx.num_out)
            out = run(taken, index, ptr, made.text, *sizes, is_reversed)
        for k, tensor in zip(made.made, out, strict=True):
            before = found[k]
            if before is None:
                found[k] = tensor
            else:
                found[k] = before.add_(tensor) if is_alone else before + tensor
        del taken, out
    num_rows = {"row": ctx.num_out, "gathered": ctx.num_in, "edge": index.shape[-1]}
    for k in flat:
        if found[k] is None:
            operand = program.operands[k]
            rows = () if operand.place == "parameter" else (num_rows[operand.place],)
            like = next(g for g in grads if g is not None)
            found[k] = like.new_zeros((*rows, operand.width))
    return (*found, *(None,) * 6)


def _share(
    ctx: _OfProgram,
    k: int,
    grad: Tensor,
    index: Tensor,
    ptr: Tensor | None,
    results: Sequence[Tensor],
    is_alone: bool,
    divides: bool,
) -> Tensor:
    """The gradient of an output as its program takes it: of one edge of a mean, or of a tie."""
    outputs = ctx.program.outputs
    reduction, value = outputs[k].reduction, outputs[k].value
    if reduction == "mean" and not divides:
        dtype = accumulator(grad.dtype)
        return (grad.to(dtype) * _inverse_degrees(ctx, index, ptr, dtype)).to(grad.dtype)
    if reduction in EXTREMA:
        record = Output(EXTREMA[reduction], value)
        if record not in outputs:
            raise RuntimeError(
                f"the program has no record of the ties of {reduction}, which the gradient needs: "
                f"it must have {record.reduction} of the same value, too"
            )
        # Nothing ties in a row without edges, whose gradient has one, too, nor with a NaN.
        ties = results[outputs.index(record)]
        if is_alone:  # without more than one temporary tensor
            share = ties.to(grad.dtype).clamp_(min=1).masked_fill_(results[k].isnan(), 0)
            return torch.div(grad, share, out=share)
        return grad / ties.clamp(min=1).masked_fill(results[k].isnan(), 0)
    return grad


def _inverse_degrees(
    ctx: _OfProgram, index: Tensor, ptr: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """1 over the number of edges of each aggregating node, ``[nodes, 1]``."""
    graph = topology(index, ptr, ctx.num_in, ctx.num_out, ctx.transpose)
    return graph.inverse_degree(transpose=ctx.transpose, dtype=dtype).unsqueeze(-1)


_FEW_EDGES = 16
"""For each aggregating node: then a program divides the gradients of means as it gathers them."""


def _divides(ctx: _OfProgram, grads: Sequence[Tensor | None], num_edges: int) -> bool:
    """True if programs divide the gradients of means, which no tensor is to hold then."""
    outputs = zip(ctx.program.outputs, grads, strict=True)
    of_means = [g for output, g in outputs if g is not None and output.reduction == "mean"]
    if not of_means or of_means[0].dtype.itemsize < 4:  # half types would round the factor
        return False
    is_one_row = all(g.stride(0) == 0 for g in of_means)
    return is_one_row or num_edges <= _FEW_EDGES * ctx.num_out


_AT_ONCE = 1 << 18
"""Numbers of which products are stored at once."""


def _sums_of_heads(grad: Tensor, result: Tensor, heads: int, is_alone: bool) -> Tensor:
    """The sums over the channels of each head of an output times its gradient."""

    def of(grad: Tensor, result: Tensor) -> Tensor:
        product = grad.to(accumulator(grad.dtype)) * result
        of_heads = product.reshape(*product.shape[:-1], heads, product.shape[-1] // heads)
        return of_heads.sum(-1).to(grad.dtype)

    if not is_alone or grad.numel() <= _AT_ONCE:
        return of(grad, result)
    rows = max(_AT_ONCE // grad.shape[-1], 1)
    sums = grad.new_empty(grad.shape[0], heads)
    for begin in range(0, grad.shape[0], rows):
        end = begin + rows
        sums[begin:end] = of(grad[begin:end], result[begin:end])
    return sums


EDGE_PROGRAM = define(
    "edge_program(Tensor[] operands, Tensor index, Tensor? ptr, str program, SymInt num_in, "
    "SymInt num_out, bool transpose) -> Tensor[]",
    _forward,
    _fake,
    Gradient((0,), _save, _backward),
)

_DIRECT = without_dispatcher(EDGE_PROGRAM)
