"""The refusal of kernels that their operator could not call.

A kernel with other parameters would fail at its first call, maybe on a device that no test has.
"""

from __future__ import annotations

import functools
import inspect

from fastgraph.plugins.backend import Kernel
from fastgraph.registry.operators import BUILDING, SIGNATURES


# Each time fastgraph is switched on, for all dtypes: reading a signature takes 50 us.
@functools.lru_cache(maxsize=512)
def check_signature(backend: str, operator: str, kernel: Kernel) -> None:
    """Refuse a kernel that the operator could not call.

    Raises:
        TypeError: naming backend, operator and the argument that does not fit.
    """
    try:
        signature = inspect.signature(kernel)
    except ValueError:  # of a function in another language, which does not say
        return
    positional, keywords = SIGNATURES.get(operator) or BUILDING[operator]
    called = ", ".join([*positional, *(f"{name}=" for name in keywords)])
    wrong = f"the kernel {operator!r} of backend {backend!r} must take ({called}), but takes "
    try:
        bound = signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        raise TypeError(f"{wrong}{signature}: {error}") from None
    for parameter, name in bound.arguments.items():
        is_one = signature.parameters[parameter].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        if is_one and parameter in positional and parameter != name:
            raise TypeError(f"{wrong}{signature}: {parameter!r} stands in the place of {name!r}")
