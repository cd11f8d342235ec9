"""The functions that users pass to DGL's message passing, with the variables around them."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.jit import ScriptModule

from fastgraph.edge_programs.frozen import UnknownError, frozen
from fastgraph.edge_programs.reading import Reading
from fastgraph.layers.tracing import stand_in
from fastgraph.plugins.refusal import Refusal

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class UserFunction:
    """A function of one argument, a batch of edges or of nodes.

    Attributes:
        function: itself, or that of a method.
        layer: the module that it is a method of, or that is a variable around it; ``None`` for
            none.
        is_method: true if the layer is its first argument.
        tensors: the variables around it that are tensors.
        state: what tells it from others with the same code, but for the layer and these.
    """

    function: types.FunctionType
    layer: nn.Module | None
    is_method: bool
    tensors: Mapping[str, Tensor]
    state: tuple[object, ...]

    def reading(self, layer: nn.Module | None) -> Reading:
        """The function as a message that is read.

        Args:
            layer: a stand-in for its layer.
        """
        own = layer if self.layer is not None else None
        return Reading(self.function, own, self.is_method, has_variables=False)

    def with_variables(
        self, layer: nn.Module | None, tensors: Mapping[str, Tensor]
    ) -> types.FunctionType:
        """The function with others in the place of its layer and its tensors."""
        own = self.function
        if not own.__closure__ or self.is_method:
            return own
        cells = []
        for name, cell in zip(own.__code__.co_freevars, own.__closure__, strict=True):
            content = cell.cell_contents
            if content is self.layer and layer is not None:
                content = layer
            cells.append(types.CellType(tensors.get(name, content)))
        made = types.FunctionType(
            own.__code__, own.__globals__, own.__name__, own.__defaults__, tuple(cells)
        )
        made.__kwdefaults__ = own.__kwdefaults__
        made.__dict__.update(own.__dict__)
        return made


def user_function(given: Any) -> UserFunction | Refusal:
    """A function that a user passes to DGL, or why nothing is known of it."""
    if isinstance(given, nn.Module):
        if any(map(vars(given).__getitem__, _HOOKS)) or "forward" in vars(given):
            return Refusal("a module as a function that has hooks, or whose forward is replaced")
        if type(given).__call__ is not nn.Module.__call__ or isinstance(given, ScriptModule):
            return Refusal("a module as a function whose call is not that of its forward")
        given = types.MethodType(type(given).forward, given)
    layer, is_method = None, False
    function = given
    if isinstance(given, types.MethodType):
        layer, function, is_method = given.__self__, given.__func__, True
        if not isinstance(layer, nn.Module):
            return Refusal(f"a method of a {type(layer).__name__}, which is no module")
    if not isinstance(function, types.FunctionType):
        return Refusal(f"a {type(function).__name__} as a function")
    return _with_variables(function, layer, is_method)


def _with_variables(
    function: types.FunctionType, layer: Any, is_method: bool
) -> UserFunction | Refusal:
    tensors: dict[str, Tensor] = {}
    state: list[object] = [id(function.__globals__)]
    text = "its message is no edge program: it reads"
    try:
        for default in (function.__defaults__, *(function.__kwdefaults__ or {}).items()):
            state.append(frozen(default))
    except UnknownError as unknown:
        return Refusal(f"{text} a default value, {unknown} that may change unnoticed")
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            content = cell.cell_contents
        except ValueError:
            return Refusal(f"{text} {name}, which has no value yet")
        if isinstance(content, nn.Module):
            if is_method or layer not in (None, content):
                return Refusal("its functions belong to several modules")
            layer = content
            state.append(name)
        elif isinstance(content, Tensor) and not is_method:
            tensors[name] = content
        else:
            try:
                state.append((name, frozen(content)))
            except UnknownError as unknown:
                return Refusal(f"{text} {name}, {unknown} that may change unnoticed")
    return UserFunction(function, layer, is_method, tensors, tuple(state))


@dataclass(frozen=True)
class Pair:
    """A message function and the function that reduces its messages, if users wrote that, too.

    Attributes:
        message: the first; ``None`` for one of DGL's.
        reduce: the second; ``None`` for one of DGL's.
        layer: of both.
    """

    message: UserFunction | None
    reduce: UserFunction | None
    layer: nn.Module | None

    @functools.cached_property
    def functions(self) -> tuple[UserFunction, ...]:
        """Those that users wrote."""
        return tuple(f for f in (self.message, self.reduce) if f is not None)

    def stand_in(self) -> Any:
        """A copy of the layer, in which tracing puts other tensors; ``None`` for none."""
        return None if self.layer is None else stand_in(self.layer)


def pair_of(message: Any, reduce: Any) -> Pair | Refusal:
    """The functions of users in a call of message passing, or why they are left to upstream.

    Args:
        message: what the user passed; ``None`` for a function of DGL's.
        reduce: the same.
    """
    found: list[UserFunction | None] = []
    layer = None
    for given in (message, reduce):
        function = None if given is None else user_function(given)
        if isinstance(function, Refusal):
            return function
        if function is not None and function.layer is not None:
            if layer not in (None, function.layer):
                return Refusal("its functions belong to several modules")
            layer = function.layer
        found.append(function)
    return Pair(found[0], found[1], layer)
