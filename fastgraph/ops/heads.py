"""Parts that the attention operators share: checks, dropout's seed, and their registration.

Each of them takes differentiable tensors of nodes and edges, then the topology, a seed and options,
and returns the output, the statistics of its softmax, which the gradient needs, and its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgraph.backends import reference
from fastgraph.graphs.edges import as_saved, caller_index_of
from fastgraph.graphs.graph import Graph
from fastgraph.machine import capture
from fastgraph.machine.memory import contiguous
from fastgraph.ops.library import (
    Arguments,
    Context,
    Gradient,
    Operator,
    define,
    is_defined_by,
    needs_torch_operations,
    wanted_gradients,
)
from fastgraph.ops.score_bias import check_entry_types
from fastgraph.ops.topology import check_index, check_values, topology
from fastgraph.plugins.backend import accumulator, device_type
from fastgraph.registry.operators import Attention, Size
from fastgraph.registry.registry import REGISTRY

SEED_LIMIT = 2**63 - 1

Shape = list[Any]  # of integers, of which a compiler may know no more than a symbol

# Of index, ptr, seed, self_loops, transpose, the operator's own option, dropout and weights.
NO_GRADIENTS = (None,) * 8


class Call(NamedTuple):
    """The arguments of an attention operator, in the order of its schema.

    Attributes:
        inputs: its operands.
        addend: added to the output.
        index, ptr, self_loops, transpose: see :mod:`fastgraph.ops.topology`.
        seed: of dropout; ``None`` where there is none.
        option: the operator's own.
        dropout: the rate.
        weights: whether the weights are returned.
    """

    inputs: list[Any]
    addend: Tensor | None
    index: Tensor  # type: ignore[assignment]  # shadows tuple.index
    ptr: Tensor | None
    seed: Tensor | None
    self_loops: int
    transpose: bool
    option: float
    dropout: float
    weights: bool

    @classmethod
    def of(cls, arguments: Arguments) -> Call:
        """The arguments as torch passes them."""
        return cls(list(arguments[:-9]), *arguments[-9:])


class BackwardCall(NamedTuple):
    """The arguments of an attention operator's backward after the gradients; see :class:`Call`.

    ``wanted`` says for each of the operands whether its gradient is.
    """

    inputs: list[Any]
    index: Tensor  # type: ignore[assignment]  # shadows tuple.index
    ptr: Tensor | None
    seed: Tensor | None
    stats: Tensor
    self_loops: int
    transpose: bool
    option: float
    dropout: float
    wanted: Sequence[bool]

    @classmethod
    def of(cls, arguments: Arguments) -> BackwardCall:
        """The arguments as torch passes them."""
        return cls(list(arguments[:-9]), *arguments[-9:])


def dropout_seed(dropout: float, seed: Tensor | None, *operands: Tensor) -> Tensor | None:
    """The seed to use; drawn from torch's default generator where there is dropout and no seed.

    Operands that say themselves what operators do draw their numbers themselves, too.

    Raises:
        ValueError: ``dropout`` is not a probability, or ``seed`` not one int64 on the CPU.
        TypeError: ``seed`` is not a tensor.
    """
    if not 0 <= dropout <= 1:
        raise ValueError(f"dropout must be in [0, 1], got {dropout}")
    if dropout == 0:
        return None
    if seed is None:
        return None if is_defined_by(*operands) else drawn_seed(dropout)
    if not isinstance(seed, Tensor):
        raise TypeError(f"seed must be a tensor of one int64 on the CPU, got {seed!r}")
    if seed.numel() != 1 or seed.dtype != torch.int64 or seed.device.type != "cpu":
        raise ValueError(
            "seed must be a tensor of one int64 on the CPU, "
            f"got shape {list(seed.shape)}, {seed.dtype} on {seed.device}"
        )
    return seed


def drawn_seed(dropout: float) -> Tensor | None:
    """A seed for a call with dropout, from torch's default generator; ``None`` without.

    By a seed that is given, sharded tensors drop the weights that one process does.
    """
    return torch.randint(SEED_LIMIT, (1,), device="cpu") if dropout > 0 else None


def seed_number(seed: Tensor | None) -> int:
    """The seed as kernels take it; 0 where there is no dropout."""
    return 0 if seed is None else int(seed)


def check_heads(name: str, x: Tensor, shape: Sequence[Size], like: Tensor) -> None:
    """A tensor has this shape (a name: any size), and the dtype and device of another.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    check_values(name, x)
    sizes = list(x.shape)
    expected = [
        size if type(want) is str else want for size, want in zip(sizes, shape, strict=False)
    ]
    if len(sizes) != len(shape) or sizes != expected:
        wanted = ", ".join(map(str, shape))
        raise ValueError(f"{name} must have shape [{wanted}], got {sizes}")
    if x.dtype != like.dtype or x.device != like.device:
        raise ValueError(
            f"{name} must have the dtype and device of the other arguments "
            f"({like.dtype}, {like.device}), got ({x.dtype}, {x.device})"
        )


def check_inputs(
    operator: Attention, inputs: Sequence[Tensor | None], num_edges: int
) -> dict[str, int]:
    """The sizes of an operator's operands, by name.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    sizes = {"edges": num_edges}
    like: Tensor | None = None
    for operand, position in operator.checked:
        tensor = inputs[position]
        if tensor is None:
            continue
        if like is None:
            like = tensor
            check_values(operand.name, tensor)
        if operand.counts:
            check_entry_types(operand.name, tensor, _known(sizes, operand.shape[0]), like)
            continue
        # A message is put together for what is wrong only: calls on small graphs would notice.
        if not _fits(operand.shape, tensor, like, sizes):
            expected = [_known(sizes, size) for size in operand.shape]
            check_heads(operand.name, tensor, expected, like)
    together = [inputs[operator.names.index(name)] for name in operator.together]
    if any(t is None for t in together) and any(t is not None for t in together):
        names = " and ".join(operator.together)
        raise ValueError(f"{names} must be given together, got one of them")
    return sizes


def _fits(shape: Sequence[Size], tensor: Tensor, like: Tensor, sizes: dict[str, int]) -> bool:
    """True if a tensor has a shape, of which new sizes become known, and is like another one."""
    if len(shape) != tensor.dim():
        return False
    for size, found in zip(shape, tensor.shape, strict=True):
        if isinstance(size, str):
            if size not in sizes:
                sizes[size] = _sum(sizes, size) if " + " in size else found
            size = sizes[size]
        if size != found:
            return False
    return (
        tensor.dtype == like.dtype
        and tensor.device == like.device
        and tensor.layout is torch.strided
    )


def _known(sizes: dict[str, int], size: Size) -> Size:
    """A size as a number, if it is known yet."""
    return sizes.get(size, size) if type(size) is str else size


def _sum(sizes: dict[str, int], size: str) -> int:
    """A sum of sizes; the second belongs to an operand that may be absent, and is 0 then."""
    first, second = size.split(" + ")
    return sizes[first] + sizes.get(second, 0)


class OfAddend(Context):
    """Of a function whose output something is added to."""

    addend_shape: torch.Size | None


class _OfAttention(OfAddend):
    options: tuple[int, bool, float, float]  # self_loops, transpose, the operator's own, dropout
    shape: torch.Size


def define_attention(operator: Attention) -> tuple[Operator, Operator]:
    """Declare an attention operator and its backward.

    Returns:
        The operator ``(*operands, addend, index, ptr, seed, self_loops, transpose, option, dropout,
        weights) -> (out, stats, alpha)``, see :mod:`fastgraph.plugins.backend`, and its gradient
        ``(grad, grad_alpha, grad_logsum, *operands, index, ptr, seed, stats, self_loops, transpose,
        option, dropout, wanted) -> gradients`` of the operands, empty ones for those that are
        ``None`` or not ``wanted``.
    """
    name = operator.name
    operands = ", ".join(f"Tensor{'?' if o.optional else ''} {o.name}" for o in operator.operands)
    tail = f"SymInt self_loops, bool transpose, {operator.schema}, float dropout"
    backward_reference = getattr(reference, f"{name}_backward")

    of_edges = [position for position, o in enumerate(operator.operands) if "edges" in o.shape]

    def prepare(call: Call | BackwardCall, *, numbered: bool) -> tuple[Graph, Shape]:
        """The graph, and the shape of the output.

        Edges need no numbers where nothing is given or returned for each, ``numbered``, or drawn.
        """
        sizes, like = check_inputs(operator, call.inputs, call.index.shape[-1]), call.inputs[0]
        check_index(call.index, call.ptr, like)
        numbered = numbered or call.seed is not None
        numbered = numbered or any(call.inputs[position] is not None for position in of_edges)
        size = sizes["sources"], sizes["destinations"]
        graph = topology(
            call.index, call.ptr, *size, call.transpose, call.self_loops, numbered=numbered
        )
        return graph, out_shape(sizes)

    def out_shape(sizes: dict[str, int]) -> Shape:
        return [_known(sizes, size) for size in operator.out]

    def forward(*arguments: object) -> tuple[Tensor, Tensor, Tensor]:
        call = Call.of(arguments)
        like = call.inputs[0]
        if call.seed is not None and capture.is_capturing(like):
            raise RuntimeError(
                "dropout cannot be captured in a CUDA graph: each replay would drop the same edges"
            )
        graph, shape = prepare(call, numbered=call.weights)
        _check_addend(call.addend, shape, like)
        kernel = REGISTRY.kernel(name, device_type(like), like.dtype)
        *inputs, addend = _contiguous((*call.inputs, call.addend))
        options = (call.transpose, call.option, call.dropout, seed_number(call.seed), call.weights)
        return kernel(graph, *inputs, *options, addend=addend)  # type: ignore[no-any-return]

    def fake(*arguments: object) -> tuple[Tensor, Tensor, Tensor]:
        call = Call.of(arguments)
        like, num_edges = call.inputs[0], call.index.shape[-1]
        shape = out_shape(check_inputs(operator, call.inputs, num_edges))
        _check_addend(call.addend, shape, like)
        stats = like.new_empty((*shape[:2], 2), dtype=accumulator(like.dtype))
        alpha = like.new_empty(num_edges if call.weights else 0, shape[1])
        return like.new_empty(shape), stats, alpha

    def backward(
        grad: Tensor, grad_alpha: Tensor | None, grad_logsum: Tensor | None, *arguments: object
    ) -> list[Tensor]:
        call = BackwardCall.of(arguments)
        like = call.inputs[0]
        graph, shape = prepare(call, numbered=grad_alpha is not None)
        check_heads("grad", grad, shape, like)
        kernel = REGISTRY.kernel(f"{name}_backward", device_type(like), like.dtype)
        tensors = _contiguous((grad, grad_alpha, grad_logsum, *call.inputs, call.stats))
        options = (call.transpose, call.option, call.dropout, seed_number(call.seed))
        gradients = kernel(graph, *tensors, *options, wanted=call.wanted)
        wanted = zip(call.inputs, gradients, call.wanted, strict=True)
        return [grad.new_empty(0) if t is None or not w else g for t, g, w in wanted]

    def backward_fake(
        grad: Tensor, grad_alpha: Tensor | None, grad_logsum: Tensor | None, *arguments: object
    ) -> list[Tensor]:
        call = BackwardCall.of(arguments)
        wanted = zip(call.inputs, call.wanted, strict=True)
        return [
            t.new_empty(t.shape) if t is not None and w else grad.new_empty(0) for t, w in wanted
        ]

    def save(
        ctx: _OfAttention, arguments: Arguments, result: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        call = Call.of(arguments)
        ctx.options = (call.self_loops, call.transpose, call.option, call.dropout)
        ctx.shape = result[0].shape
        save_addend(ctx, call.addend)
        if not call.weights:
            ctx.mark_non_differentiable(result[2])
        tensors = (*call.inputs, *as_saved(call.index, call.ptr), call.seed, result[1])
        save_with_edges(ctx, call.index, call.inputs, tensors)

    def gradient(
        ctx: _OfAttention, grad: Tensor | None, grad_stats: Tensor | None, grad_alpha: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        *wanted, wants_addend = wanted_gradients(ctx)[: len(operator.operands) + 1]
        grad_addend = addend_gradient(ctx, grad) if wants_addend else None
        if True not in wanted:  # then tensors may have been edited that are saved for the others
            return *(None for _ in wanted), grad_addend, *NO_GRADIENTS
        *saved, _ = ctx.saved_tensors  # once: a checkpoint computes them at each question
        if grad is not None and grad_stats is not None:
            saved[-1] = statistics_with_shares(saved[-1], grad)
        call = BackwardCall.of((*saved, *ctx.options, wanted))
        if grad is None:  # only the weights or the statistics were used
            grad = call.inputs[0].new_zeros(ctx.shape)
        grads = (grad, grad_alpha, logsum_gradient(grad_stats, call.stats))
        if needs_torch_operations(*grads):
            graph, _ = prepare(call, numbered=True)
            options = (call.transpose, call.option, call.dropout, seed_number(call.seed))
            tensors = (*call.inputs, call.stats)
            gradients = backward_reference(graph, *grads, *tensors, *options, wanted=wanted)
        else:
            found = backward_operator(*grads, *saved, *ctx.options, wanted)
            gradients = [g if w else None for g, w in zip(found, wanted, strict=True)]
        return *gradients, grad_addend, *NO_GRADIENTS

    backward_operator = define(
        f"{name}_backward(Tensor grad, Tensor? grad_alpha, Tensor? grad_logsum, {operands}, "
        f"Tensor index, Tensor? ptr, Tensor? seed, Tensor stats, {tail}, bool[] wanted) "
        "-> Tensor[]",
        backward,
        backward_fake,
    )
    forward_operator = define(
        f"{name}({operands}, Tensor? addend, Tensor index, Tensor? ptr, Tensor? seed, {tail}, "
        "bool weights) -> (Tensor, Tensor, Tensor)",
        forward,
        fake,
        Gradient((*operator.differentiable, len(operator.operands)), save, gradient),
    )
    return forward_operator, backward_operator


def save_with_edges(
    ctx: Context, index: Tensor, inputs: Sequence[Tensor | None], tensors: Sequence[Tensor | None]
) -> None:
    """Save ``tensors`` for the backward pass, and behind them the caller's ``edge_index``.

    That is ``None`` where it is ``index`` itself, or may change: where no gradient is recorded that
    depends on it (see :func:`fastgraph.graphs.edges.caller_index_of`).

    Args:
        ctx: of the autograd function.
        index: as the operator was given it.
        inputs: the operands whose gradients depend on the edges.
        tensors: what else is saved.
    """
    is_needed = any(t is not None and t.requires_grad for t in inputs)
    ctx.save_for_backward(*tensors, caller_index_of(index) if is_needed else None)


def logsum_gradient(grad_stats: Tensor | None, stats: Tensor) -> Tensor | None:
    """The gradient of the logarithm of the sum of exponentials, from that of the statistics.

    The largest score only keeps exponentials from overflowing: what is made of the statistics may
    not depend on it but through the inverse sum, and so it counts as a constant. Nodes without
    edges get 0: the logarithm of their sum has no derivative.
    """
    if grad_stats is None:
        return None
    inverse = stats[..., 1]
    return torch.where(inverse == 0, 0, -grad_stats[..., 1] * inverse)


def is_without_share(stats: Tensor) -> Tensor:
    """True where there are scores and all are -infinity, as the statistics ``[..., 2]`` say."""
    largest, inverse = stats.detach().unbind(-1)
    return (largest == -torch.inf) & (inverse == torch.inf)


def statistics_with_shares(stats: Tensor, grad: Tensor) -> Tensor:
    """The statistics for the backward pass of a part, whose gradient there is 0 times 0, not NaN.

    Args:
        stats: of a part that was joined with others, ``[nodes, heads, 2]``.
        grad: the gradient of its output, ``[nodes, heads, channels]``.
    """
    is_zero = is_without_share(stats) & (grad == 0).all(-1)
    return stats.masked_fill(is_zero.unsqueeze(-1), 0)


def check_self_loops(num_nodes: int, **given: object) -> None:
    """Self-loops stand for no edge that a caller knows, so nothing may be given for each edge.

    Raises:
        ValueError: ``num_nodes`` is negative, or one of the arguments ``given`` is there.
    """
    if num_nodes < 0:
        raise ValueError(f"self_loops must be an integer >= 0, got {num_nodes}")
    for name, value in given.items():
        if value is not None and value is not False:
            raise ValueError(f"self_loops cannot be combined with {name}")


def save_addend(ctx: OfAddend, addend: Tensor | None) -> None:
    """Store on ``ctx`` what :func:`addend_gradient` needs."""
    ctx.addend_shape = None if addend is None else addend.shape


def addend_gradient(ctx: OfAddend, grad: Tensor | None) -> Tensor | None:
    """The gradient of the addend, given that of the output, ``None`` if that was not used."""
    return grad if grad is None or ctx.addend_shape == grad.shape else grad.sum(0, keepdim=True)


def _check_addend(addend: Tensor | None, shape: Sequence[int], like: Tensor) -> None:
    if addend is not None:
        num_nodes = 1 if addend.shape[:1] == (1,) else shape[0]
        check_heads("addend", addend, [num_nodes, *shape[1:]], like)


def _contiguous(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if t is None else contiguous(t) for t in tensors]
