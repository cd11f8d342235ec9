"""Running a copy of a module forward and backward."""

from __future__ import annotations

import copy
import inspect
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fastgraph import settings
from fastgraph.comparison.dropout import drop_no_attention, drops_attention
from fastgraph.comparison.values import is_differentiable, map_tensors, named_tensors, to_double
from fastgraph.enabling import enabled
from fastgraph.machine.randomness import kept_random_states
from fastgraph.routing.switch import SWITCH

_INPUT, _PARAMETER = "input", "parameter"


@dataclass(frozen=True)
class Results:
    """The results of one forward and backward pass, by name."""

    outputs: dict[str, Tensor]
    input_gradients: dict[str, Tensor]
    parameter_gradients: dict[str, Tensor]


class Call:
    """A module's call on copies of the module and of its inputs, for as many runs as needed.

    Gradients are taken with respect to all parameters that require one, and to the inputs that
    require one; where no input does, to all floating-point ones. Nothing that belongs to the caller
    is written to.

    Args:
        module: copied; hooks and training mode come along.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        double: whether everything is cast to float64.
        without_dropout: names of attention layers whose dropout is set to zero.
    """

    def __init__(
        self,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        double: bool = False,
        without_dropout: Sequence[str] = (),
    ) -> None:
        self.module = copy.deepcopy(module)
        self.double = double
        if double:
            _cast_to_double(self.module)
        for name in without_dropout:
            drop_no_attention(self.module.get_submodule(name))
        given = _named_arguments(module, args, kwargs)
        wanted = _differentiated_inputs(given)
        self._leaves: dict[tuple[str, str], Tensor] = {}
        self._output_gradients: list[Tensor] | None = None
        # By number of the original, which is kept: DGL makes some anew whenever they are asked for.
        copies: dict[int, tuple[Tensor, Tensor]] = {}

        def own(name: str, tensor: Tensor) -> Tensor:
            if id(tensor) not in copies:
                copied = to_double(tensor.detach()) if double else tensor.detach()
                if not is_differentiable(tensor):
                    # The very same graph, so that what is remembered of it serves every run.
                    copied = copied if double or tensor.requires_grad else tensor
                elif copied.data_ptr() == tensor.data_ptr():
                    copied = copied.clone()
                if name in wanted:
                    self._leaves[_INPUT, name] = copied.requires_grad_()
                copies[id(tensor)] = tensor, copied
            return copies[id(tensor)][1]

        own_arguments = list(map_tensors(given, own, "").items())
        self._args = [value for _, value in own_arguments[: len(args)]]
        self._kwargs = dict(own_arguments[len(args) :])
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                self._leaves[_PARAMETER, name] = parameter

    def run(self) -> Results:
        """One forward and backward pass."""
        outputs = self.forward()
        gradients = self.backward(outputs)
        named: dict[str, dict[str, Tensor]] = {_INPUT: {}, _PARAMETER: {}}
        for (kind, name), gradient in gradients.items():
            named[kind][name] = gradient
        detached = {name: out.detach() for name, out in outputs.items()}
        return Results(detached, named[_INPUT], named[_PARAMETER])

    def forward(self) -> dict[str, Tensor]:
        """The dense tensors of the output, by name."""
        with _precision(self.double):
            found = named_tensors(self.module(*self._args, **self._kwargs), "output")
        return {name: out for name, out in found.items() if out.layout == torch.strided}

    def backward(self, outputs: Mapping[str, Tensor]) -> dict[tuple[str, str], Tensor]:
        """Gradients for random gradients of the outputs, which are the same in every run."""
        roots = [out for out in outputs.values() if out.requires_grad]
        if not roots or not self._leaves:
            return {}
        if self._output_gradients is None:
            generator = torch.Generator().manual_seed(0)
            # Rounded to the coarsest dtype, so that all dtypes get the same values.
            self._output_gradients = [
                torch.randn(root.shape, generator=generator).bfloat16().to(root) for root in roots
            ]
        gradients = torch.autograd.grad(
            roots, list(self._leaves.values()), self._output_gradients, allow_unused=True
        )
        return {
            key: torch.zeros_like(leaf) if gradient is None else gradient
            for (key, leaf), gradient in zip(self._leaves.items(), gradients, strict=True)
        }


@contextmanager
def upstream() -> Iterator[None]:
    """Upstream's own code, whatever the caller has enabled."""
    was_active = SWITCH.active
    SWITCH.turn(False)
    try:
        yield
    finally:
        SWITCH.turn(was_active)


@contextmanager
def ours() -> Iterator[None]:
    """Our routes: as the caller has enabled it, or with the settings of the environment.

    Graphs count as large enough to gain, unless the setting ``min_edges`` says otherwise.

    Raises:
        RuntimeError: ``FASTGRAPH=0`` forbids it.
    """
    with nullcontext() if SWITCH.active else enabled():
        if not SWITCH.active:
            raise RuntimeError("fastgraph is switched off by FASTGRAPH=0: nothing to compare")
        with settings.of_any_size():
            yield


_comparing: ContextVar[bool] = ContextVar("fastgraph_comparing", default=False)


@contextmanager
def comparing() -> Iterator[None]:
    """A context in which all calls are part of a comparison, and are not compared themselves."""
    token = _comparing.set(True)
    try:
        yield
    finally:
        _comparing.reset(token)


def is_comparing() -> bool:
    """True if a comparison is under way in this thread."""
    return _comparing.get()


def tensors_of(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """All parameters and inputs of a call."""
    inputs = named_tensors((tuple(args), dict(kwargs)), "").values()
    return [*module.parameters(), *inputs]


@contextmanager
def untouched_randomness(seed: int, tensors: Sequence[Tensor]) -> Iterator[None]:
    """All random streams start from ``seed`` in the block, and continue after it as before it."""
    devices = sorted({tensor.get_device() for tensor in tensors if tensor.is_cuda})
    numpy = sys.modules.get("numpy")
    with kept_random_states(), torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed)
        yield


def check_type(module: object) -> None:
    """Refuse what is no module.

    Raises:
        TypeError: not a ``torch.nn.Module``.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")


def check_module(module: nn.Module) -> None:
    """Refuse what cannot be copied and run.

    Raises:
        TypeError: not a ``torch.nn.Module``.
        ValueError: parameters whose shape is not known yet.
    """
    check_type(module)
    lazy = [name for name, parameter in module.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ValueError(
            f"module must have been run once: the shapes of {', '.join(lazy)} are not known yet"
        )


def attention_dropout(module: nn.Module) -> list[str]:
    """Attention layers whose dropout is active; their random stream differs from upstream's."""
    return [name for name, layer in module.named_modules() if drops_attention(layer)]


@contextmanager
def _precision(double: bool) -> Iterator[None]:
    with ExitStack() as stack:
        if double:  # the truth must not be rounded by the caller's autocast
            for device_type in ("cpu", "cuda"):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


def _cast_to_double(module: nn.Module) -> None:
    module.double()
    for layer in module.modules():
        for name, value in list(vars(layer).items()):
            # Parameters and buffers are done; what is left are tensors such as a layer's cache.
            if name not in ("_parameters", "_buffers", "_modules") and any(
                tensor.is_floating_point() for tensor in named_tensors(value, name).values()
            ):
                vars(layer)[name] = map_tensors(value, lambda _, tensor: to_double(tensor), name)


def _named_arguments(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments by the names that ``forward`` gives them, positional ones first."""
    names = [
        parameter.name
        for parameter in inspect.signature(module.forward).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    positional = {
        (names[i] if i < len(names) and names[i] not in kwargs else f"args[{i}]"): value
        for i, value in enumerate(args)
    }
    return {**positional, **kwargs}


def _differentiated_inputs(arguments: dict[str, Any]) -> set[str]:
    found = named_tensors(arguments, "")
    dense = {name: tensor for name, tensor in found.items() if is_differentiable(tensor)}
    return {name for name, tensor in dense.items() if tensor.requires_grad} or set(dense)
