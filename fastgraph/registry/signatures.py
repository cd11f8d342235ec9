"""The refusal of kernels that their operator could not call, and of such builders of graphs.

A kernel with other parameters would fail at its first call, maybe on a device that no test has.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from fastgraph.plugins.backend import Builder, Kernel
from fastgraph.registry.operators import COMPANIONS, SIGNATURES


# Each time fastgraph is switched on, for all dtypes: reading a signature takes 50 us.
@functools.lru_cache(maxsize=512)
def check_signature(backend: str, operator: str, kernel: Kernel) -> None:
    """Refuse a kernel that the operator could not call.

    Raises:
        TypeError: naming backend, operator and the argument that does not fit.
    """
    signature = SIGNATURES.get(operator) or COMPANIONS[operator]
    _check(f"the kernel {operator!r} of backend {backend!r}", kernel, *signature)


def check_builder(backend: str, builder: Builder) -> None:
    """Refuse a builder that a graph could not call.

    Raises:
        TypeError: naming backend, method and the argument that does not fit.
    """
    for name, promised in inspect.getmembers(Builder, inspect.isfunction):
        if not name.startswith("_"):
            named = f"the builder's {name!r} of backend {backend!r}"
            method = getattr(builder, name, None)
            if method is None:
                raise TypeError(f"{named} is missing")
            _check(named, method, list(inspect.signature(promised).parameters)[1:])


def _check(
    named: str,
    function: Callable[..., Any],
    positional: Sequence[str],
    keywords: Sequence[str] = (),
) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # of a function in another language, which does not say
        return
    called = ", ".join([*positional, *(f"{name}=" for name in keywords)])
    wrong = f"{named} must take ({called}), but takes "
    try:
        bound = signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        raise TypeError(f"{wrong}{signature}: {error}") from None
    for parameter, name in bound.arguments.items():
        is_one = signature.parameters[parameter].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        if is_one and parameter in positional and parameter != name:
            raise TypeError(f"{wrong}{signature}: {parameter!r} stands in the place of {name!r}")
