"""How operators call kernels, and the refusal of a kernel that cannot be called so.

A kernel with other parameters would fail at its first call, maybe on a device that no test has.
"""

from __future__ import annotations

import inspect
from typing import NamedTuple

from fastgraph.backends.base import Kernel


class Signature(NamedTuple):
    """The arguments of a kernel: by position, and by keyword."""

    positional: tuple[str, ...]
    keywords: tuple[str, ...] = ()


def _signature(positional: str, *keywords: str) -> Signature:
    return Signature(tuple(positional.split()), keywords)


# The tensors of attention operators, and the option of each.
_ATTENTION = {
    "gatv2": ("x_src x_dst att edge weight_edge", "slope"),
    "gat": ("x score_src score_dst score_edge", "slope"),
    "attention": ("query key value edge", "scale"),
}

SIGNATURES: dict[str, Signature] = {
    "spmm": _signature("graph x weight reduce transpose"),
    "sddmm": _signature("graph grad x reduce transpose"),
    "segment_reduce": _signature("graph x weight reduce transpose ties"),
    "segment_reduce_backward": _signature("graph grad x weight out record transpose ties"),
    "head_scores": _signature("x att"),
    "head_scores_backward": _signature("x att grad", "addend"),
}
for _name, (_tensors, _option) in _ATTENTION.items():
    SIGNATURES[_name] = _signature(
        f"graph {_tensors} transpose {_option} dropout seed weights", "addend"
    )
    SIGNATURES[f"{_name}_backward"] = _signature(
        f"graph grad grad_alpha {_tensors} stats transpose {_option} dropout seed"
    )
"""By operator; :mod:`fastgraph.backends.base` says what the arguments are."""


def check_signature(backend: str, operator: str, kernel: Kernel) -> None:
    """Refuse a kernel that the operator could not call.

    Raises:
        TypeError: naming backend, operator and the argument that does not fit.
    """
    try:
        signature = inspect.signature(kernel)
    except ValueError:  # of a function in another language, which does not say
        return
    positional, keywords = SIGNATURES[operator]
    try:
        signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        called = ", ".join([*positional, *(f"{name}=" for name in keywords)])
        raise TypeError(
            f"the kernel {operator!r} of backend {backend!r} must take ({called}), "
            f"but takes {signature}: {error}"
        ) from None
