"""The dtypes of messages: tensors that stand for those of the CPU, and conversions in float64."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from fastgraph.edge_programs.reading import unread

aten = torch.ops.aten

HALVES = frozenset((torch.bfloat16, torch.float16))
DTYPES = (*HALVES, torch.float32, torch.float64)
"""Those that a message may compute with."""


def widest(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype that values of several are promoted to: at least one, each that of a tensor."""
    return functools.reduce(torch.promote_types, dtypes)


def is_narrower(dtype: torch.dtype, other: torch.dtype) -> bool:
    """True if a dtype does not have all numbers of another."""
    return widest(dtype, other) is not dtype


def autocasting(dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Autocast on the CPU to a dtype, or as it is."""
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype)


class StandIn(Tensor):
    """A tensor without data that stands for one on the CPU.

    Autocast looks at tensors by their device, and leaves those of the device ``meta`` alone.

    Args:
        of: a tensor of the device ``meta``.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    without_data: Tensor

    @staticmethod
    def __new__(cls, of: Tensor) -> StandIn:
        """A tensor of the same shape and dtype."""
        made = Tensor._make_wrapper_subclass(
            cls, of.shape, strides=of.stride(), dtype=of.dtype, device=torch.device("cpu")
        )
        made.without_data = of
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"{func} was called of a tensor that is there while a message is traced")


def without_data(arguments: Any) -> Any:
    """Arguments of an operator, with tensors of the device ``meta`` for those that stand for some.

    Args:
        arguments: a tuple, a list or a dictionary of them.
    """
    return tree_map_only(StandIn, lambda tensor: tensor.without_data, arguments)


def in_double() -> AbstractContextManager[object]:
    """A mode in which conversions to any floating-point dtype give float64.

    So a message that converts values can be compared with its program digit by digit.
    """
    return _InDouble()  # type: ignore[no-untyped-call]


class _InDouble(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = dict(kwargs or {})
        dtype = kwargs.get("dtype")
        if func is aten._to_copy.default and dtype is not None and dtype.is_floating_point:
            if args[0].dtype is torch.float64:
                del kwargs["dtype"]
            elif not args[0].is_floating_point():  # to meet what stays float64
                kwargs["dtype"] = torch.float64
        return unread(functools.partial(func, *args, **kwargs))
