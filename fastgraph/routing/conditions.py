"""Conditions that every route shares, each answering with a :class:`Refusal` or ``None``."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import Parameter, UninitializedParameter
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from fastgraph import settings
from fastgraph.ops.library import DEFINING
from fastgraph.plugins.refusal import Refusal


def execution_mode() -> Refusal | None:
    """Upstream's own code must run where an operator would be opaque or silently wrong."""
    if torch.compiler._is_exporting_flag:  # before torch 2.12 Dynamo took the function for True
        return Refusal("exporting a program, which must run without fastgraph")
    if torch.compiler.is_compiling():
        return Refusal("exporting to ONNX") if torch.onnx.is_in_onnx_export() else None
    if torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
        return Refusal("torch.jit is tracing")
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return Refusal("inside a torch.func transform")
    if forward_ad._current_level >= 0:
        return Refusal("forward-mode automatic differentiation is active")
    if (
        torch._C._len_torch_dispatch_stack() > 0 or torch._C._len_torch_function_stack() > 0
    ) and _is_watched():
        return Refusal("a mode of torch looks at all operations")
    return None


INDIFFERENT_MODES: list[type[TorchFunctionMode | TorchDispatchMode]] = [DeviceContext]
"""Modes to which it is the same by which operations a layer is computed.

Any other may count, record or change those of upstream, which an operator does not call. A default
device is one, so that programs that set it keep their routes.
"""


def _is_watched() -> bool:
    indifferent = tuple(INDIFFERENT_MODES)
    modes = *_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()
    return not all(isinstance(mode, indifferent) for mode in modes)


_PLAIN = (Tensor, Parameter)


def is_plain(*values: object) -> bool:
    """True if there is no subclass among tensors."""
    return all(type(value) in _PLAIN for value in values if isinstance(value, Tensor))


def operand(name: str, value: object) -> Refusal | None:
    """:func:`plain_tensor`, or a subclass that says itself what operators do with it.

    What layers do around operators must work for these, too.
    """
    return None if type(value) in DEFINING else plain_tensor(name, value)


def plain_tensor(name: str, value: object) -> Refusal | None:
    """Tensor subclasses (DTensor, FakeTensor, ...) and nested tensors behave in their own way."""
    if type(value) in _PLAIN:
        is_nested = isinstance(value, Tensor) and value.is_nested  # without one shape
        return Refusal(f"{name} is a nested tensor") if is_nested else None
    if torch.compiler.is_compiling() and isinstance(value, Tensor):
        return None
    return Refusal(f"{name} is a {type(value).__name__}, not a plain tensor")


def plain_parameters(module: nn.Module) -> Refusal | None:
    """:func:`plain_tensor` of all parameters, with those of submodules.

    ``module.parameters()`` would give the same, but take a tenth of a call on a small graph.
    """
    if torch.compiler.is_compiling():  # to which all are plain
        return None
    for parameter in module._parameters.values():
        # A lazy projection gets its weight when it is called.
        if parameter is not None and not isinstance(parameter, UninitializedParameter):
            refusal = plain_tensor("a parameter", parameter)
            if refusal is not None:
                return refusal
    for child in module._modules.values():
        refusal = None if child is None else plain_parameters(child)
        if refusal is not None:
            return refusal
    return None


def too_few_edges(num_edges: int) -> Refusal | None:
    """A call costs more than it gains on a graph below the ``min_edges`` setting."""
    least = settings.current().min_edges
    if least is None or num_edges >= least:
        return None
    return Refusal(f"fewer than min_edges={least} edges")
