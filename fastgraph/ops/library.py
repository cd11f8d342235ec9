"""The ``fastgraph`` operator namespace of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

LIBRARY = torch.library.Library("fastgraph", "DEF")

_TAGS = (
    torch.Tag.pt2_compliant_tag,
    # The implementations look at the identity of the index tensors on the host, which a replayed
    # CUDA graph would not do again.
    torch.Tag.cudagraph_unsafe,
)


class Gradient(NamedTuple):
    """The derivative of an operator.

    Attributes:
        differentiable: positions of the arguments that may require a gradient.
        save: stores on ``ctx`` what ``backward`` needs, given the arguments and the result.
        backward: the gradients of all arguments, given ``ctx`` and those of the results.
    """

    differentiable: tuple[int, ...]
    save: Callable[[Any, Sequence[Any], Any], None]
    backward: Callable[..., tuple[Any, ...]]


def define(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    gradient: Gradient | None = None,
) -> Any:
    """Declare an operator with its implementation for all devices and its shape rule.

    Returns:
        The operator, to call.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=_TAGS)
    LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastgraph::{name}", fake, lib=LIBRARY)
    operator = getattr(torch.ops.fastgraph, name).default
    if gradient is not None:
        _define_gradient(operator, gradient)
    return operator


def _define_gradient(operator: Any, gradient: Gradient) -> None:
    """Do what ``torch.library.register_autograd`` does, without handling defaults at every call.

    On a graph of Cora's size that cost is visible.
    """

    def below_autograd(keys: Any, arguments: Sequence[Any]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keys & torch._C._after_autograd_keyset, *arguments)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            *arguments, keys = inputs
            result = below_autograd(keys, arguments)
            gradient.save(ctx, arguments, result)
            return result

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return *gradient.backward(ctx, *gradients), None

    def autograd(keys: Any, *arguments: Any) -> Any:
        recorded = torch.is_grad_enabled() and any(
            arguments[i] is not None and arguments[i].requires_grad for i in gradient.differentiable
        )
        # Forward-mode differentiation raises an error there, where it would get zeros below.
        if recorded or forward_ad._current_level >= 0:
            return Function.apply(*arguments, keys)  # type: ignore[no-untyped-call]
        return below_autograd(keys, arguments)

    LIBRARY.impl(operator, autograd, "Autograd", with_keyset=True)
