"""Outcomes of calls, an error or results with their gradients, to compare upstream with ours."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fastgraph
from tests.ab import Arguments

# Errors of DGL's library begin with the time and end with addresses of the stack.
_PLACES = re.compile(r"^\[\d+:\d+:\d+\] |\nStack trace:\n.*", re.DOTALL)


class Outcome(NamedTuple):
    """How a call ended.

    Attributes:
        step: ``"forward"`` or ``"backward"``, in which the error came; ``"end"`` where none did.
        error: the name of its class and its text, without notes, times and stacks.
        results: outputs, then gradients of floating-point inputs and parameters.
    """

    step: str
    error: tuple[str, str] | None = None
    results: tuple[Tensor | None, ...] = ()

    def __str__(self) -> str:
        if self.error is None:
            return f"{len(self.results)} results"
        return f"{self.step}: {self.error[0]}: {self.error[1]}"


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors within tuples, lists and dictionaries."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in tensors_in(part)]
    return [value] if isinstance(value, Tensor) else []


def _copied(value: Any) -> Any:
    """The same with tensors of its own, of which dense ones of real numbers want a gradient."""
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_copied(part) for part in value)
    if not isinstance(value, Tensor):
        return value
    copied = value.clone()
    is_dense = copied.layout == torch.strided
    return copied.requires_grad_() if is_dense and copied.is_floating_point() else copied


def outcome(
    module: nn.Module, call: Arguments, edit: Callable[[dict[str, Any]], object] | None = None
) -> Outcome:
    """How a forward and a backward pass of a copy of a module end.

    Args:
        module: the module.
        call: its arguments, of which it gets copies.
        edit: is given those that were passed by name, between the passes.
    """
    module = copy.deepcopy(module)
    args, kwargs = _copied(call)
    inputs = [t for t in tensors_in([args, kwargs]) if t.requires_grad]
    inputs += [p for p in module.parameters() if p.requires_grad]
    step = "forward"
    try:
        found = [t for t in tensors_in(module(*args, **kwargs)) if t.is_floating_point()]
        if edit is not None:
            edit(kwargs)
        step = "backward"
        gradients: tuple[Tensor | None, ...] = ()
        needed = [t for t in found if t.requires_grad]
        if needed and inputs:
            torch.manual_seed(1)
            cotangents = [torch.randn(t.shape, dtype=torch.float64).to(t) for t in needed]
            gradients = torch.autograd.grad(needed, inputs, cotangents, allow_unused=True)
    except Exception as error:
        kind = type(error)
        name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
        return Outcome(step, (name, _PLACES.sub("", str(error))))
    return Outcome("end", None, (*(t.detach() for t in found), *gradients))


def difference(upstream: Outcome, ours: Outcome, coarsest: torch.dtype | None = None) -> str | None:
    """How two outcomes differ for a user, or ``None`` where they do not.

    Args:
        upstream: the one that is right.
        ours: the other one.
        coarsest: the dtype of all that was computed of, in whose rounding, of the largest value,
            results may differ; default: the dtype of each, for values of order one.
    """
    if upstream[:2] != ours[:2] or len(upstream.results) != len(ours.results):
        return f"upstream {upstream}\n    ours {ours}"
    for position, (a, b) in enumerate(zip(upstream.results, ours.results, strict=True)):
        if a is None or b is None:
            zeros = [t for t in (a, b) if t is not None and t.any()]
            if zeros:
                return f"result {position} has a gradient in one of them only"
        elif a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
            return f"result {position}: {a.dtype} {list(a.shape)}, {b.dtype} {list(b.shape)}"
        elif a.is_meta:
            continue
        elif a.layout != b.layout:
            return f"result {position}: {a.layout}, {b.layout}"
        elif not _is_close(a, b, coarsest):
            return f"result {position} differs by {(a - b).abs().max()}"
    return None


def _is_close(a: Tensor, b: Tensor, coarsest: torch.dtype | None) -> bool:
    if a.layout != torch.strided:
        a, b = a.to_dense(), b.to_dense()
    allowed = largest = _TOLERANCE[a.dtype]
    if coarsest is not None:
        allowed = max(allowed, _TOLERANCE.get(coarsest, 0.0))
        finite = a[a.isfinite()].abs()
        largest = allowed * max(1.0, float(finite.max()) if finite.numel() else 0.0)
    return torch.allclose(a, b, rtol=allowed, atol=largest, equal_nan=True)


# Different orders of summation: some tens of roundings, of values of order one.
_TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-4,
    torch.bfloat16: 5e-2,
    torch.float16: 1e-2,
}


def differences(module: nn.Module, calls: dict[str, Arguments], **options: Any) -> dict[str, str]:
    """Where calls end differently under fastgraph, by the names of calls."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        upstream = {name: outcome(module, call) for name, call in calls.items()}
        # Once for all calls, as putting routes in place takes as long as a hundred of these.
        with fastgraph.enabled(min_edges=0, **options):
            ours = {name: outcome(module, call) for name, call in calls.items()}
    found = {name: difference(upstream[name], ours[name]) for name in calls}
    return {name: differs for name, differs in found.items() if differs is not None}
