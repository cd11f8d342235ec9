"""The ``fastgraph`` operator namespace of torch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from operator import itemgetter, or_
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import Node

from fastgraph.graphs.memo import called_by_dispatcher, called_from_eager_code
from fastgraph.graphs.witness import spoil_stale_results
from fastgraph.ops.compiled_forms import Forms, forms_of, token_of_forward_pass, with_token
from fastgraph.ops.gradient_batches import is_batch

Overload = torch._ops.OpOverload
Keys = torch._C.DispatchKeySet

LIBRARY = torch.library.Library("fastgraph", "DEF")

_TAGS = (
    torch.Tag.pt2_compliant_tag,
    # The implementations look at the identity of the index tensors on the host, which a replayed
    # CUDA graph would not do again.
    torch.Tag.cudagraph_unsafe,
)


class Context(FunctionCtx, Node):
    """The state of a function with a gradient between its passes; subclasses say what they keep.

    In the backward pass it is the function's node of autograd.

    Attributes:
        saved_tensors: those that were saved; asking again for them computes a checkpoint again.
        needs_input_grad: for each argument, whether its gradient is wanted.
        token: while compilers record, of what the forward pass looks up; see
            :mod:`fastgraph.ops.compiled_forms`.
    """

    saved_tensors: tuple[Any, ...]  # tensors, and None where that was saved
    needs_input_grad: tuple[bool, ...]
    token: Tensor | None = None

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Save tensors; torch's own has no type for ``None``, which it takes."""


DEFINING: set[type] = set()
"""Subclasses of tensors that say themselves what operators do with them."""


def is_defined_by(*tensors: Tensor | None) -> bool:
    """True if one of them says itself what an operator does."""
    return any(type(tensor) in DEFINING for tensor in tensors)


def reduces_on_ranks(x: Tensor) -> bool:
    """True if ranks send each other what operators make of their edges, besides what these take."""
    return bool(getattr(x, "reduces_on_ranks", False))


Arguments = Sequence[Any]  # of an operator, whose schema says their types
Operator = Callable[..., Any]  # with a schema, which says what it takes and gives


class Gradient(NamedTuple):
    """The derivative of an operator.

    Attributes:
        differentiable: positions of the arguments that may require a gradient.
        save: stores on ``ctx`` what ``backward`` needs, given the arguments and the result.
        backward: the gradients of all arguments, of the tensors of a list one by one, given ``ctx``
            and those of the results, ``None`` for a result that played no part.
    """

    differentiable: tuple[int, ...]
    save: Callable[[Any, Arguments, Any], None]  # each with a context of its own
    backward: Callable[..., tuple[Tensor | None, ...]]


def define(
    schema: str,
    implementation: Operator,
    fake: Operator,
    gradient: Gradient | None = None,
) -> Operator:
    """Declare an operator with its implementation for all devices and its shape rule.

    Args:
        schema: as for ``torch.library.define``; of arguments that are ``Tensor``, ``Tensor?``,
            ``SymInt``, ``int``, ``float``, ``bool``, ``bool[]`` or ``str``, of which the first may
            be ``Tensor[]``, without defaults, as callers pass all of them by position.
        implementation: checks the arguments, looks the kernel up and calls it.
        fake: the shape rule, with the same checks of shapes and dtypes; that tensors are on one
            device is checked before it.
        gradient: ``None`` for what is not differentiated, such as a backward pass.

    Returns:
        The operator, to call.
    """
    implementation = _spoiled_if_stale(schema.partition("(")[0], implementation)
    fake = _on_one_device(_names_of_arguments(schema), fake)
    operator = _declared(schema, implementation, fake)
    has_gradient = gradient is not None
    forms = forms_of(_declared, schema, implementation, fake, has_gradient=has_gradient)
    direct = implementation
    if gradient is not None:
        direct = _define_gradient(operator, implementation, gradient, forms)
    types = [_TYPES[str(argument.type)] for argument in operator._schema.arguments]
    valued = [
        position
        for position, argument in enumerate(operator._schema.arguments)
        if "Tensor" in str(argument.type) and argument.name not in _TOPOLOGY
    ]
    is_of_list = _begins_with_a_list(operator)
    if is_of_list:
        del valued[0]
    values_of = _getter(valued)
    fitting: set[tuple[type, ...]] = set()
    dispatched = called_from_eager_code(operator)

    def call(*arguments: Any) -> object:
        if torch.compiler.is_compiling():
            # Dynamo records the operator itself, and would compare the forms at each call.
            if not torch.compiler.is_dynamo_compiling() and forms is not None:
                token = token_of_forward_pass()
                if token is not None:
                    return forms.given(token, *arguments)
            return operator(*arguments)
        # What types have fitted once is known, as looking at each takes longer.
        given = tuple(map(type, arguments))
        if given not in fitting:
            if not all(map(isinstance, arguments, types)):
                return dispatched(*arguments)
            fitting.add(given)
        # The dispatcher's two turns, each through Python, are a good part of what a call on a small
        # graph costs.
        values = values_of(arguments)
        tensors: Arguments = arguments
        if is_of_list:
            listed = arguments[0]
            if not all(map(isinstance, listed, _TENSORS)):
                return dispatched(*arguments)
            values = (*values, *listed)
            tensors = (*listed, *arguments[1:])
        if _is_profiling() or not is_ordinary(tensors, values):
            return dispatched(*arguments)
        return direct(*arguments)

    _DIRECT[call] = direct
    return call


def _declared(schema: str, implementation: Operator, fake: Operator) -> Overload:
    """An operator without a gradient."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=_TAGS)
    LIBRARY.impl(name, called_by_dispatcher(implementation), "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastgraph::{name}", fake, lib=LIBRARY)
    operator: Overload = getattr(torch.ops.fastgraph, name).default
    return operator


def _names_of_arguments(schema: str) -> list[str]:
    return [argument.name for argument in torch._C.parse_schema(schema).arguments]


_DIRECT: dict[Operator, Operator] = {}


def without_dispatcher(operator: Operator) -> Operator:
    """An operator for calls whose arguments are known to fit, in which torch would do nothing else.

    That it would is what :func:`needs_no_dispatcher` tells.

    Args:
        operator: as :func:`define` returns it.
    """
    return _DIRECT[operator]


_TENSORS = itertools.repeat(Tensor)


def _getter(positions: Sequence[int]) -> Callable[[Arguments], Arguments]:
    """A function of arguments that gives those at some positions."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda arguments: [arguments[position] for position in positions]


def _spoiled_if_stale(name: str, implementation: Operator) -> Operator:
    @functools.wraps(implementation)
    def call(*arguments: Any) -> Any:
        result = implementation(*arguments)
        spoil_stale_results(name, result)
        return result

    return call


def _on_one_device(names: Sequence[str], fake: Operator) -> Operator:
    """A shape rule for tensors on one device; seeds are on the CPU.

    torch takes the shape rule for the implementation as soon as one tensor is on ``meta``, and the
    result for uninitialised memory where the others are.
    """

    @functools.wraps(fake)
    def call(*arguments: Any) -> Any:
        tensors = [
            (name, tensor)
            for name, value in zip(names, arguments, strict=True)
            for tensor in (value if isinstance(value, (list, tuple)) else [value])
            if isinstance(tensor, Tensor) and name != "seed"
        ]
        first, expected = tensors[0]
        for name, tensor in tensors[1:]:
            if tensor.device != expected.device:
                raise ValueError(
                    f"{name} must be on the device of {first}, {expected.device}, "
                    f"got {tensor.device}"
                )
        return fake(*arguments)

    return call


def wanted_gradients(ctx: Context) -> Sequence[bool]:
    """For each argument of an autograd function, true if its gradient is asked for now.

    ``ctx.needs_input_grad`` says what the forward pass saw. ``torch.autograd.grad(out, x)`` and
    ``backward(inputs=...)`` ask for less, which torch's own functions look up in the engine.

    Args:
        ctx: what ``backward`` is given, of a function that runs in the backward pass.

    Returns:
        As many as ``ctx.needs_input_grad`` has, at least one of them true if that has one.
    """
    needed = ctx.needs_input_grad
    # A function runs because a gradient is wanted. Compilers ask for those that they need.
    if needed.count(True) < 2 or torch.compiler.is_compiling():
        return needed
    # Those of the arguments that require a gradient, in their order.
    following = [node for node, _ in ctx.next_functions if node is not None]
    wanted = list(needed)
    for position in range(len(needed) - 1, -1, -1):
        if needed[position]:
            node = following.pop()
            if not following and True not in wanted[position + 1 :] and _will_run(ctx):
                break  # the engine runs the function for this one, of which it need not be asked
            wanted[position] = _will_run(node)
    return wanted if True in wanted else needed  # it is called by something else than the engine


def _will_run(node: Node) -> bool:
    """True if the backward pass that is in progress needs an autograd node, or none is.

    That is false for the node that it begins with, as torch does not count it.
    """
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # of a leaf that is wanted, after 20 us, or of any node outside the engine
        return True


def needs_torch_operations(*grads: Tensor | None) -> bool:
    """True if gradients for these gradients of results must be made of torch's own operations.

    So they must where they will themselves be differentiated, backward or forward, and for a batch
    of ``grads`` at once. Compilers trace with gradients enabled, too, but differentiate once.
    """
    if torch.compiler.is_compiling():
        return False
    return torch.is_grad_enabled() or is_transformed(*grads)


def is_transformed(*grads: Tensor | None) -> bool:
    """True if gradients are differentiated forward, or for a batch of ``grads`` at once."""
    return forward_ad._current_level >= 0 or any(g is not None and is_batch(g) for g in grads)


def _define_gradient(
    operator: Overload, implementation: Operator, gradient: Gradient, forms: Forms | None
) -> Operator:
    """Do what ``torch.library.register_autograd`` does, without handling defaults at every call.

    On a graph of Cora's size that cost is visible.

    Returns:
        The operator for calls in which the dispatcher would do nothing else.
    """

    def below_autograd(keys: Keys | None, arguments: Arguments) -> object:
        if keys is None:  # it is not the dispatcher that calls
            return implementation(*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keys & torch._C._after_autograd_keyset, *arguments)

    def recorded(keys: Keys, arguments: Arguments) -> tuple[object, Tensor | None]:
        """The results that compilers record, with the token of what is looked up."""
        if forms is None or forms.finding is None or is_defined_by(*arguments):
            return below_autograd(keys, arguments), None
        with torch._C._AutoDispatchBelowAutograd():
            found = forms.finding.redispatch(keys & torch._C._after_autograd_keyset, *arguments)
        *results, token = found
        return (results[0] if len(results) == 1 else tuple(results)), token

    is_of_list = _begins_with_a_list(operator)
    num_others = len(operator._schema.arguments) - 1

    def flat(arguments: Arguments) -> Arguments:
        """The arguments as autograd sees tensors: none of them in a list."""
        return (*arguments[0], *arguments[1:]) if is_of_list else arguments

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Context, *inputs: Any) -> object:
            *arguments, keys = inputs
            if is_of_list:
                count = len(arguments) - num_others
                arguments = [arguments[:count], *arguments[count:]]
            if keys is not None and torch.compiler.is_compiling():
                result, ctx.token = recorded(keys, arguments)
            else:
                result = below_autograd(keys, arguments)
            result = tuple(result) if isinstance(result, list) else result
            # Zeros for what cannot have a gradient would be as large as the result.
            ctx.set_materialize_grads(False)
            gradient.save(ctx, arguments, result)
            return result

        @staticmethod
        def backward(ctx: Context, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
            if all(g is None for g in gradients):
                return (None,) * len(ctx.needs_input_grad)
            if torch.compiler.is_compiling():
                found = with_token(ctx.token, gradient.backward, ctx, *gradients)
            else:
                found = gradient.backward(ctx, *gradients)
            return *found, None

    apply: Callable[..., object] = Function.apply
    # Without what torch does before it for transforms of torch.func.
    plain_apply: Callable[..., object] = super(torch.autograd.Function, Function).apply

    def is_differentiated(arguments: Arguments) -> bool:
        if forward_ad._current_level >= 0:  # gets an error there, where it would get zeros below
            return True
        if torch.is_grad_enabled():
            for position in gradient.differentiable:
                argument = arguments[position]
                if is_of_list and position == 0:
                    if any(tensor.requires_grad for tensor in argument):
                        return True
                elif argument is not None and argument.requires_grad:
                    return True
        return False

    def autograd(keys: Keys, *arguments: object) -> object:
        if is_differentiated(arguments):
            return apply(*flat(arguments), keys)
        return below_autograd(keys, arguments)

    def direct(*arguments: object) -> object:
        if is_differentiated(arguments):
            return plain_apply(*flat(arguments), None)
        return implementation(*arguments)

    LIBRARY.impl(operator, autograd, "Autograd", with_keyset=True)
    return direct


def _begins_with_a_list(operator: Overload) -> bool:
    """True if the first argument of an operator is a list of tensors."""
    return str(operator._schema.arguments[0].type) == "List[Tensor]"


# What arguments must be lest the dispatcher complain, or convert them.
_TYPES: dict[str, type | tuple[type, ...]] = {
    "Tensor": Tensor,
    "Optional[Tensor]": (Tensor, NoneType),
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "List[bool]": (list, tuple),
    "List[Tensor]": (list, tuple),
}


def _bits(*names: str) -> int:
    keys = (torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)) for name in names)
    return functools.reduce(or_, (key.raw_repr() for key in keys))


_AUTOGRAD = _bits("AutogradCPU", "AutogradCUDA", "AutogradOther")
_ORDINARY = _AUTOGRAD | _bits(
    "CPU", "CUDA", "AutocastCPU", "AutocastCUDA", "ADInplaceOrView", "BackendSelect"
)


_SPECIAL = ~_ORDINARY


def needs_no_dispatcher(tensors: Arguments) -> bool:
    """True if torch does nothing with a call on tensors but compute it, and record its gradient.

    Args:
        tensors: all of the call, with ``None`` in the place of some.
    """
    if torch.compiler.is_compiling() or _is_profiling():
        return False
    return is_ordinary(tensors, tensors)


# Asked of every call, so that looking up their names would show.
_has_torch_function = torch._C._has_torch_function
_keys_of = torch._C._dispatch_keys
_included = torch._C._dispatch_tls_local_include_set
_excluded = torch._C._dispatch_tls_local_exclude_set

_TOPOLOGY = ("index", "ptr")
"""Arguments whose values torch never puts off: it negates lazily, but no integers."""


def is_ordinary(arguments: Arguments, valued: Arguments) -> bool:
    """True if tensors among the arguments mean to torch what they mean to a kernel, and no more.

    False for subclasses and lazy views, and while a mode or a transform is active.

    Args:
        arguments: of an operator.
        valued: those of them that may be lazy views.
    """
    if _has_torch_function(arguments):
        return False
    keys = _included().raw_repr()
    for argument in valued:
        if argument is not None:
            keys |= _keys_of(argument).raw_repr()
    return not keys & _SPECIAL and not _excluded().raw_repr() & _AUTOGRAD


# A profiler lists the operators that the dispatcher calls.
_is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled
