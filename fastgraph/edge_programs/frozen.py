"""Values that functions of users read, as objects that tell whether they have changed."""

from __future__ import annotations

import enum
import functools
import inspect
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fastgraph.upstream import PACKAGES

TRUSTED = frozenset(
    (
        *("torch", *PACKAGES, "abc", "collections", "contextlib", "copy", "dataclasses"),
        *(
            "enum",
            "functools",
            "inspect",
            "itertools",
            "math",
            "numbers",
            "operator",
            "re",
            "types",
        ),
        *("typing", "typing_extensions", "warnings", "weakref"),
    )
)
"""Packages whose globals do not change."""

PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)

_UNCHANGED = (types.ModuleType, types.GetSetDescriptorType, staticmethod, classmethod, property)
"""Kinds of values that code does not change, or that are looked at once it has run."""

MISSING = object()
"""In the place of a value that is not there."""


class UnknownError(Exception):
    """A value of which nobody can tell whether it has changed."""


def frozen(value: Any, *, is_attribute: bool = False) -> Any:
    """An object that is equal to that of another value only if both are the same to a message.

    Args:
        value: of any kind.
        is_attribute: true if it is one of a module, whose lists, dictionaries and sets tracing
            watches. Others may be changed by a message.

    Raises:
        UnknownError: the value may change without being replaced.
    """
    kind = type(value)
    if kind in PLAIN:
        # 0.0 and -0.0 are equal, but not the same.
        return (kind, value) if value else (kind, repr(value))
    if isinstance(value, _FIXED) or _is_library_function(value) or _is_ufunc(value):
        return value
    if isinstance(value, types.ModuleType) and is_trusted(value.__name__):
        return value
    if kind is tuple:
        return (kind, *map(frozen, value))
    if kind is functools.partial:
        named = ((name, frozen(v)) for name, v in value.keywords.items())
        return (kind, frozen(value.func), frozen(value.args), *named)
    if is_attribute and kind is dict:
        return (kind, *((frozen(key), frozen(v)) for key, v in value.items()))
    if is_attribute and kind in (list, set):
        return (kind, *map(frozen, value))
    raise UnknownError(f"a {kind.__name__}")


def _is_ufunc(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ufunc)


_FIXED = (
    *(type, types.FunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(enum.Enum, torch._ops.OpOverload),
)


_BUILTINS = ("builtins", "_operator", "_functools")


def _is_library_function(value: Any) -> bool:
    if not isinstance(value, types.BuiltinFunctionType):
        return False
    owner = value.__self__
    if owner is None:
        return True
    if isinstance(owner, types.ModuleType):
        return is_trusted(owner.__name__) or owner.__name__ in _BUILTINS
    return isinstance(owner, type) and is_trusted(owner.__module__)


def is_trusted(module: str | None) -> bool:
    """True for the name of a module whose globals do not change."""
    return (module or "").partition(".")[0] in TRUSTED


def changing_global(variables: Mapping[str, Any], name: str, chain: Sequence[str]) -> str | None:
    """Why code may not name a global variable, such as a list, which it may change unnoticed.

    Args:
        variables: the global ones of the code.
        name: of the variable.
        chain: the attributes that follow it in the code.

    Returns:
        ``None`` for a variable that is no such one as far as is known before the code runs.
    """
    value = variables.get(name, MISSING)
    for follower in chain:
        is_class = isinstance(value, type) and not is_trusted(value.__module__)
        is_module = isinstance(value, types.ModuleType) and not is_trusted(value.__name__)
        if not (is_class or is_module):
            break
        name, value = f"{name}.{follower}", inspect.getattr_static(value, follower, MISSING)
    if value is MISSING or isinstance(value, _UNCHANGED):
        return None
    try:
        frozen(value)
    except UnknownError as unknown:
        return f"it reads {name}, {unknown} that may change unnoticed"
    return None
