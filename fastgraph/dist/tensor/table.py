"""The table of rules: functions that compute operations on sharded tensors, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Arguments = tuple[Any, ...]
Options = dict[str, Any]
Rule = Callable[[Any, Arguments, Options], Any]
"""Does a call: takes the function, its arguments and its keyword arguments."""


class NoRuleError(Exception):
    """A rule does not cover a call, which must not have changed or sent anything yet.

    All ranks must come to the same conclusion, so it may depend on shapes and layouts, but not on
    what this rank holds.
    """


METADATA: set[str] = set()
"""The names of operations that do not look at the values of a tensor."""

OF_WRAPPER: set[Any] = set()
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


KNOWN: dict[Any, Dispatch] = {}
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


def dispatch_of(function: Any) -> Dispatch:
    """The entry of a function in the table, which :data:`KNOWN` has from now on."""
    name = name_of(function)
    found = KNOWN[function] = Dispatch(name, find(name), name not in METADATA)
    return found


def name_of(function: Any) -> str:
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


def counts_edits(function: Any) -> bool:
    """True if torch counts what a function edits: its own functions, but for fused optimizers."""
    name = name_of(function)
    return not (name.startswith("_fused_") or "." in name or "::" in name)


def is_in_place(name: str) -> bool:
    """True if an operation of this name changes its first argument."""
    if name.endswith("__"):
        return name in _IN_PLACE_OPERATORS or name == "__setitem__"
    return name.endswith("_")


REQUIRED = object()


def bound(args: Arguments, kwargs: Options, **parameters: Any) -> list[Any]:
    """The values of a call's parameters, in their order; of a rule that knows just these.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
        parameters: names, with defaults or :data:`REQUIRED`.

    Raises:
        NoRuleError: the call has other arguments, or lacks one.
    """
    if len(args) > len(parameters) or not kwargs.keys() <= parameters.keys():
        raise NoRuleError
    values = dict(parameters)
    values.update(zip(parameters, args, strict=False))
    if values.keys() & kwargs.keys() & set(list(parameters)[: len(args)]):
        raise NoRuleError
    values.update(kwargs)
    if any(value is REQUIRED for value in values.values()):
        raise NoRuleError
    return list(values.values())
