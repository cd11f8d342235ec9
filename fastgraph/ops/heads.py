"""What the attention operators share: checks, dropout's seed, and the way they become operators.

Each of them takes three differentiable tensors, then the topology, a seed and options, and returns
the output together with the statistics of its softmax, which the gradient needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastgraph.backends import reference
from fastgraph.backends.registry import REGISTRY
from fastgraph.ops.library import Gradient, define
from fastgraph.ops.topology import check_features, topology

SEED_LIMIT = 2**63 - 1


def dropout_seed(dropout: float, seed: Tensor | None) -> Tensor | None:
    """The seed to use; drawn from torch's default generator where there is dropout and no seed.

    Raises:
        ValueError: ``dropout`` is not a probability, or ``seed`` not one int64 on the CPU.
    """
    if not 0 <= dropout <= 1:
        raise ValueError(f"dropout must be in [0, 1], got {dropout}")
    if dropout == 0:
        return None
    if seed is None:
        return torch.randint(SEED_LIMIT, (1,))
    if seed.numel() != 1 or seed.dtype != torch.int64 or seed.device.type != "cpu":
        raise ValueError(
            "seed must be a tensor of one int64 on the CPU, "
            f"got shape {list(seed.shape)}, {seed.dtype} on {seed.device}"
        )
    return seed


def check_heads(name: str, x: Tensor, shape: Sequence[int | None], like: Tensor) -> None:
    """A tensor has this shape (``None``: any size), and the dtype and device of another.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    check_features(name, x)
    sizes = list(x.shape)
    expected = [size if want is None else want for size, want in zip(sizes, shape, strict=False)]
    if len(sizes) != len(shape) or sizes != expected:
        wanted = ", ".join("nodes" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} must have shape [{wanted}], got {sizes}")
    if x.dtype != like.dtype or x.device != like.device:
        raise ValueError(
            f"{name} must have the dtype and device of the other arguments "
            f"({like.dtype}, {like.device}), got ({x.dtype}, {x.device})"
        )


def define_attention(
    name: str,
    arguments: str,
    options: str,
    check: Callable[[Tensor, Tensor, Tensor], tuple[int, int, torch.Size]],
) -> Any:
    """Declare an attention operator and its backward.

    Args:
        name: of the operator; kernels are looked up as ``name`` and ``name + "_backward"``.
        arguments: names of its three tensors, separated by blanks.
        options: the schema of what follows ``transpose`` and precedes ``dropout``.
        check: checks the three tensors and gives the number of gathered nodes, that of aggregating
            ones and the shape of the output.

    Returns:
        The operator ``(*tensors, index, ptr, seed, transpose, *options, dropout) -> (out, stats)``.
    """
    tensors = ", ".join(f"Tensor {argument}" for argument in arguments.split())
    tail = f"bool transpose, {options}, float dropout"
    backward_reference = getattr(reference, f"{name}_backward")

    def prepare(
        inputs: Sequence[Tensor], index: Tensor, ptr: Tensor | None, transpose: bool
    ) -> Any:
        num_in, num_out, _ = check(*inputs)
        _check_index(index, ptr, inputs[0])
        return topology(index, ptr, num_in, num_out, transpose)

    def forward(*given: Any) -> tuple[Tensor, Tensor]:
        inputs, (index, ptr, seed, transpose, *rest) = given[:3], given[3:]
        graph = prepare(inputs, index, ptr, transpose)
        kernel = REGISTRY.kernel(name, inputs[0].device.type, inputs[0].dtype)
        contiguous = (t.contiguous() for t in inputs)
        return kernel(graph, *contiguous, transpose, *rest, _number(seed))  # type: ignore[no-any-return]

    def fake(*given: Any) -> tuple[Tensor, Tensor]:
        inputs = given[:3]
        _, _, shape = check(*inputs)
        dtype = reference.accumulator(inputs[0].dtype)
        stats = inputs[0].new_empty((*shape[:2], 2), dtype=dtype)
        return inputs[0].new_empty(shape), stats

    def backward(grad: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        inputs, (index, ptr, seed, stats, transpose, *rest) = given[:3], given[3:]
        check_heads("grad", grad, check(*inputs)[2], inputs[0])
        kernel = REGISTRY.kernel(f"{name}_backward", inputs[0].device.type, inputs[0].dtype)
        graph = prepare(inputs, index, ptr, transpose)
        contiguous = (t.contiguous() for t in (grad, *inputs, stats))
        return kernel(graph, *contiguous, transpose, *rest, _number(seed))  # type: ignore[no-any-return]

    def backward_fake(grad: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        first, second, third = (t.new_empty(t.shape) for t in given[:3])
        return first, second, third

    def save(ctx: Any, given: Sequence[Any], result: tuple[Tensor, Tensor]) -> None:
        *saved, transpose = given[:7]
        ctx.options = (transpose, *given[7:])
        ctx.mark_non_differentiable(result[1])
        ctx.save_for_backward(*saved, result[1])

    def gradient(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        *inputs, index, ptr, seed, stats = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # The gradient itself will be differentiated, so it must be made of torch's operations.
            graph = prepare(inputs, index, ptr, ctx.options[0])
            gradients = backward_reference(graph, grad, *inputs, stats, *ctx.options, _number(seed))
        else:
            gradients = backward_operator(grad, *inputs, index, ptr, seed, stats, *ctx.options)
        return *gradients, *[None] * (3 + len(ctx.options))

    backward_operator = define(
        f"{name}_backward(Tensor grad, {tensors}, Tensor index, Tensor? ptr, Tensor? seed, "
        f"Tensor stats, {tail}) -> (Tensor, Tensor, Tensor)",
        backward,
        backward_fake,
    )
    return define(
        f"{name}({tensors}, Tensor index, Tensor? ptr, Tensor? seed, {tail}) -> (Tensor, Tensor)",
        forward,
        fake,
        Gradient((0, 1, 2), save, gradient),
    )


def _number(seed: Tensor | None) -> int:
    return 0 if seed is None else int(seed)


def _check_index(index: Tensor, ptr: Tensor | None, x: Tensor) -> None:
    if index.layout is not torch.strided:
        raise ValueError(f"index must be a dense tensor, got layout {index.layout}")
    if index.device != x.device or (ptr is not None and ptr.device != x.device):
        raise ValueError(
            f"index and ptr must be on the features' device {x.device}, got {index.device}"
        )
