"""The table of rules: functions that compute operations on sharded tensors, by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

Arguments = tuple[object, ...]
Options = dict[str, object]
TorchFunction = Callable[..., Any]  # of which torch says no types
"""A function of torch or of another library, or a class of functions with gradients."""

Result = TypeVar("Result")
Rule = Callable[[TorchFunction, Arguments, Options], object]
"""Does a call: takes the function, its arguments and its keyword arguments."""


class NoRuleError(Exception):
    """A rule does not cover a call, which must not have changed or sent anything yet.

    All ranks must come to the same conclusion, so it may depend on shapes and layouts, but not on
    what this rank holds.
    """


METADATA: set[str] = set()
"""The names of operations that do not look at the values of a tensor."""

OF_WRAPPER: set[TorchFunction] = set()
"""Functions of a tensor's shape, dtype and the like, which a wrapper without memory has."""


class Dispatch(NamedTuple):
    """How calls of a function are done.

    Attributes:
        name: see :func:`name_of`.
        rule: that does its calls, if there is one.
        reads_values: true unless it is of shapes, dtypes and layouts alone.
    """

    name: str
    rule: Rule | None
    reads_values: bool


KNOWN: dict[TorchFunction, Dispatch] = {}
"""Functions that were looked up by :func:`dispatch_of` since a rule was registered last."""

_rules: dict[str, Rule] = {}
_in_place: dict[str, Rule] = {}

_IN_PLACE_OPERATORS = frozenset(
    f"__i{name}__"
    for name in (
        *("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow"),
        *("and", "or", "xor", "lshift", "rshift"),
    )
)


def rule(names: str, *, in_place: bool = False, of_values: bool = True) -> Callable[[Rule], Rule]:
    """Register a rule for operations.

    Args:
        names: of the operations, between blanks.
        in_place: whether the rule is for the variants that end in an underscore, too.
        of_values: whether results depend on more than shapes, dtypes and layouts.

    Raises:
        ValueError: an operation has a rule, where calls that it refuses are to be covered.
    """

    def register(function: Rule) -> Rule:
        for name in names.split():
            if name in _rules:
                there = _rules[name]
                raise ValueError(f"{name} has a rule: {there.__module__}.{there.__qualname__}")
        KNOWN.clear()
        if not of_values:
            METADATA.update(names.split())
        for name in names.split():
            _rules[name] = function
            if in_place:
                _in_place[f"{name}_"] = function
        return function

    return register


def find(name: str) -> Rule | None:
    """The rule for an operation, if there is one."""
    return _rules.get(name) or _in_place.get(name)


def dispatch_of(function: TorchFunction) -> Dispatch:
    """The entry of a function in the table, which :data:`KNOWN` has from now on."""
    name = name_of(function)
    found = KNOWN[function] = Dispatch(name, find(name), name not in METADATA)
    return found


def name_of(function: TorchFunction) -> str:
    """The name of an operation: that of the schema for torch's operators.

    Functions of other libraries get a name that no rule has.
    """
    if isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(
            function._qualified_op_name
            if isinstance(function, torch._ops.OpOverloadPacket)
            else function._schema.name
        ).removeprefix("aten::")
    name: str = function.__name__
    module = getattr(function, "__module__", None)
    if isinstance(module, str) and module.partition(".")[0] != "torch":
        return f"{module}.{name}"
    return name


def counts_edits(function: TorchFunction) -> bool:
    """True if torch counts what a function edits: its own functions, but for fused optimizers."""
    name = name_of(function)
    return not (name.startswith("_fused_") or "." in name or "::" in name)


def is_in_place(name: str) -> bool:
    """True if an operation of this name changes its first argument."""
    if name.endswith("__"):
        return name in _IN_PLACE_OPERATORS or name == "__setitem__"
    return name.endswith("_")


def unpacked(
    rule: Callable[..., Result],
) -> Callable[[TorchFunction, Arguments, Options], Result]:
    """A rule from one that takes a call's arguments as parameters, behind the function.

    Their order, names and defaults are those of the operation. A call with other arguments, or one
    too few, raises :class:`NoRuleError`: it may be of another version of the operation.
    """
    _, *parameters = inspect.signature(rule).parameters.values()
    named = [p for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    defaults = {parameter.name: parameter.default for parameter in named}
    count = len(defaults)
    takes_rest = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
    takes_options = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)

    def by_parameters(func: TorchFunction, args: Arguments, kwargs: Options) -> Result:
        if not kwargs and (len(args) == count or (takes_rest and len(args) > count)):
            return rule(func, *args)
        rest = args[count:] if takes_rest else ()
        options = {k: v for k, v in kwargs.items() if k not in defaults} if takes_options else {}
        given = {k: v for k, v in kwargs.items() if k not in options}
        return rule(func, *_bound(args[: len(args) - len(rest)], given, defaults), *rest, **options)

    return functools.wraps(rule)(by_parameters)


def _bound(args: Arguments, kwargs: Options, defaults: Mapping[str, object]) -> Iterable[object]:
    """The values of a call's parameters, in their order.

    Raises:
        NoRuleError: the call has other arguments, or lacks one.
    """
    if len(args) > len(defaults) or not kwargs.keys() <= defaults.keys():
        raise NoRuleError
    by_position = dict(zip(defaults, args, strict=False))
    if by_position.keys() & kwargs.keys():
        raise NoRuleError
    values = {**defaults, **by_position, **kwargs}
    if any(value is inspect.Parameter.empty for value in values.values()):
        raise NoRuleError
    return values.values()
