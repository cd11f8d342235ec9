"""What the attention operators share: checks, dropout's seed, and the way they become operators.

Each of them takes differentiable tensors of nodes and edges, then the topology, a seed and options,
and returns the output, the statistics of its softmax, which the gradient needs, and its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastgraph import capture
from fastgraph.backends import reference
from fastgraph.backends.base import accumulator
from fastgraph.backends.registry import REGISTRY
from fastgraph.graph import Graph
from fastgraph.ops.library import Gradient, define, needs_torch_operations
from fastgraph.ops.topology import check_features, check_index, topology

SEED_LIMIT = 2**63 - 1

# Of index, ptr, seed, self_loops, transpose, the operator's own option, dropout and weights.
NO_GRADIENTS = (None,) * 8


def dropout_seed(dropout: float, seed: Tensor | None) -> Tensor | None:
    """The seed to use; drawn from torch's default generator where there is dropout and no seed.

    Raises:
        ValueError: ``dropout`` is not a probability, or ``seed`` not one int64 on the CPU.
        TypeError: ``seed`` is not a tensor.
    """
    if not 0 <= dropout <= 1:
        raise ValueError(f"dropout must be in [0, 1], got {dropout}")
    if dropout == 0:
        return None
    if seed is None:
        return torch.randint(SEED_LIMIT, (1,))
    if not isinstance(seed, Tensor):
        raise TypeError(f"seed must be a tensor of one int64 on the CPU, got {seed!r}")
    if seed.numel() != 1 or seed.dtype != torch.int64 or seed.device.type != "cpu":
        raise ValueError(
            "seed must be a tensor of one int64 on the CPU, "
            f"got shape {list(seed.shape)}, {seed.dtype} on {seed.device}"
        )
    return seed


def check_heads(name: str, x: Tensor, shape: Sequence[int | str], like: Tensor) -> None:
    """A tensor has this shape (a name: any size), and the dtype and device of another.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    check_features(name, x)
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


def check_edges(name: str, edges: Tensor, num_edges: int, like: Tensor, *channels: int) -> None:
    """A matrix with a row for each edge, and the dtype and device of another tensor.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    if edges.dim() != 2:
        raise ValueError(f"{name} must have 2 dimensions, got shape {list(edges.shape)}")
    check_heads(name, edges, [num_edges, *(channels or edges.shape[1:])], like)


def define_attention(
    name: str,
    tensors: str,
    option: str,
    check: Callable[..., tuple[int, int, torch.Size]],
) -> tuple[Any, Any]:
    """Declare an attention operator and its backward.

    Args:
        name: of the operator; kernels are looked up as ``name`` and ``name + "_backward"``.
        tensors: the names of its tensors, separated by blanks; those that end in ``?`` are
            optional.
        option: the schema of the option between ``transpose`` and ``dropout``.
        check: checks the tensors, given the number of edges before them, and returns the number of
            gathered nodes, that of aggregating ones and the shape of the output.

    Returns:
        The operator ``(*tensors, addend, index, ptr, seed, self_loops, transpose, option, dropout,
        weights) -> (out, stats, alpha)``, see :mod:`fastgraph.backends.base`, and its gradient
        ``(grad, grad_alpha, *tensors, index, ptr, seed, stats, self_loops, transpose, option,
        dropout) -> gradients`` of the tensors, empty ones for those that are ``None``.
    """
    names = tensors.split()
    arguments = ", ".join(
        f"Tensor{'?' if name.endswith('?') else ''} {name.rstrip('?')}" for name in names
    )
    tail = f"SymInt self_loops, bool transpose, {option}, float dropout"
    backward_reference = getattr(reference, f"{name}_backward")

    def prepare(
        inputs: Sequence[Tensor],
        index: Tensor,
        ptr: Tensor | None,
        self_loops: int,
        transpose: bool,
    ) -> tuple[Graph, torch.Size]:
        num_in, num_out, shape = check(index.shape[-1], *inputs)
        check_index(index, ptr, inputs[0])
        return topology(index, ptr, num_in, num_out, transpose, self_loops), shape

    def forward(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
        *inputs, addend, index, ptr, seed, self_loops, transpose, option, dropout, weights = given
        if seed is not None and capture.is_capturing(inputs[0]):
            raise RuntimeError(
                "dropout cannot be captured in a CUDA graph: each replay would drop the same edges"
            )
        graph, shape = prepare(inputs, index, ptr, self_loops, transpose)
        _check_addend(addend, shape, inputs[0])
        kernel = REGISTRY.kernel(name, inputs[0].device.type, inputs[0].dtype)
        *inputs, addend = _contiguous((*inputs, addend))
        options = (transpose, option, dropout, seed_number(seed), weights)
        return kernel(graph, *inputs, *options, addend=addend)  # type: ignore[no-any-return]

    def fake(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
        *inputs, addend, index, _ptr, _seed, _loops, _transpose, _option, _dropout, weights = given
        _, _, shape = check(index.shape[-1], *inputs)
        first = inputs[0]
        _check_addend(addend, shape, first)
        stats = first.new_empty((*shape[:2], 2), dtype=accumulator(first.dtype))
        alpha = first.new_empty(index.shape[-1] if weights else 0, shape[1])
        return first.new_empty(shape), stats, alpha

    def backward(grad: Tensor, grad_alpha: Tensor | None, *given: Any) -> list[Tensor]:
        *inputs, index, ptr, seed, stats, self_loops, transpose, option, dropout = given
        graph, shape = prepare(inputs, index, ptr, self_loops, transpose)
        check_heads("grad", grad, shape, inputs[0])
        kernel = REGISTRY.kernel(f"{name}_backward", inputs[0].device.type, inputs[0].dtype)
        tensors = _contiguous((grad, grad_alpha, *inputs, stats))
        gradients = kernel(graph, *tensors, transpose, option, dropout, seed_number(seed))
        return [grad.new_empty(0) if g is None else g for g in gradients]

    def backward_fake(grad: Tensor, grad_alpha: Tensor | None, *given: Any) -> list[Tensor]:
        *inputs, _index, _ptr, _seed, _stats, _loops, _transpose, _option, _dropout = given
        return [grad.new_empty(0) if t is None else t.new_empty(t.shape) for t in inputs]

    def save(ctx: Any, given: Sequence[Any], result: tuple[Tensor, Tensor, Tensor]) -> None:
        *inputs, addend, index, ptr, seed, self_loops, transpose, option, dropout, weights = given
        tensors = (*inputs, index, ptr, seed)
        ctx.self_loops, ctx.options = self_loops, (transpose, option, dropout)
        ctx.shape = result[0].shape
        save_addend(ctx, addend)
        ctx.mark_non_differentiable(*(result[1:2] if weights else result[1:]))
        ctx.save_for_backward(*tensors, result[1])

    def gradient(
        ctx: Any, grad: Tensor | None, grad_stats: None, grad_alpha: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        *inputs, index, ptr, seed, stats = ctx.saved_tensors
        if grad is None:  # only the weights were used
            grad = inputs[0].new_zeros(ctx.shape)
        grads = (grad, grad_alpha)
        if needs_torch_operations(*grads):
            graph, _ = prepare(inputs, index, ptr, ctx.self_loops, ctx.options[0])
            gradients = backward_reference(
                graph, *grads, *inputs, stats, *ctx.options, seed_number(seed)
            )
        else:
            found = backward_operator(
                *grads, *inputs, index, ptr, seed, stats, ctx.self_loops, *ctx.options
            )
            gradients = [None if t is None else g for t, g in zip(inputs, found, strict=True)]
        return *gradients, addend_gradient(ctx, len(inputs), grad), *NO_GRADIENTS

    backward_operator = define(
        f"{name}_backward(Tensor grad, Tensor? grad_alpha, {arguments}, Tensor index, Tensor? ptr, "
        f"Tensor? seed, Tensor stats, {tail}) -> Tensor[]",
        backward,
        backward_fake,
    )
    operator = define(
        f"{name}({arguments}, Tensor? addend, Tensor index, Tensor? ptr, Tensor? seed, {tail}, "
        "bool weights) -> (Tensor, Tensor, Tensor)",
        forward,
        fake,
        Gradient(tuple(range(len(names) + 1)), save, gradient),
    )
    return operator, backward_operator


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


def save_addend(ctx: Any, addend: Tensor | None) -> None:
    """Store on ``ctx`` what :func:`addend_gradient` needs."""
    ctx.addend_shape = None if addend is None else addend.shape


def addend_gradient(ctx: Any, position: int, grad: Tensor) -> Tensor | None:
    """The gradient of the addend, the argument at ``position``, given that of the output."""
    if not ctx.needs_input_grad[position]:
        return None
    return grad if ctx.addend_shape == grad.shape else grad.sum(0, keepdim=True)


def _check_addend(addend: Tensor | None, shape: torch.Size, like: Tensor) -> None:
    if addend is not None:
        num_nodes = 1 if addend.shape[:1] == (1,) else shape[0]
        check_heads("addend", addend, [num_nodes, *shape[1:]], like)


def _contiguous(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if t is None else t.contiguous() for t in tensors]


def seed_number(seed: Tensor | None) -> int:
    """The seed as kernels take it; 0 where there is no dropout."""
    return 0 if seed is None else int(seed)
