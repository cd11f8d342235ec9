"""What is remembered with a tensor, for as long as it lives and is not edited."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_remembered = WeakTensorKeyDictionary()

Value = TypeVar("Value")


def remembered(tensor: Tensor, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """What ``make`` returned for this tensor and key, which must not refer to the tensor.

    Views share the memory of one tensor: what is remembered is theirs by offset, shape and strides.
    """
    if tensor.is_inference():  # its edits are not counted
        return make()
    base = tensor if tensor._base is None else tensor._base
    found = _remembered.get(base)
    if found is None:
        found = _remembered[base] = {}
    key = (*key, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
    version, value = found.get(key, (None, None))
    if version != base._version:
        value = made(make)
        found[key] = base._version, value
    return value


def forget(part: object) -> None:
    """Drop everything that was remembered by a key with this object, and so the object."""
    for found in _remembered.values():
        for key in [key for key in found if any(one is part for one in key)]:
            del found[key]


def made(make: Callable[[], Value]) -> Value:
    """What ``make`` returns, made to serve training as well, if inference comes first."""
    if not torch.is_inference_mode_enabled():
        return make()
    with torch.inference_mode(False), torch.no_grad():
        return make()
