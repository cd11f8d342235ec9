"""Checks of the types by which entries, pairs of nodes or edges, take biases from a table."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgraph.registry.operators import Size

ENTRY_TYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)
"""The dtypes of types of entries, each of which is a row of a table of biases."""


def check_entry_types(name: str, types: Tensor, entries: Size, like: Tensor) -> None:
    """Types are integers, one for each entry, on the device of another tensor.

    That the table has such rows is for kernels to check, which read by them.

    Args:
        name: of the argument.
        types: the tensor.
        entries: how many there are, or a name if that is not known yet.
        like: the other tensor.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    if types.dtype not in ENTRY_TYPES:
        raise ValueError(f"{name} must be uint8, int16, int32 or int64, got {types.dtype}")
    is_vector = types.layout is torch.strided and types.dim() == 1
    if not is_vector or (type(entries) is not str and types.shape[0] != entries):
        raise ValueError(
            f"{name} must be dense [{entries}], got shape {list(types.shape)}, "
            f"layout {types.layout}"
        )
    if types.device != like.device:
        raise ValueError(f"{name} must be on query's device {like.device}, got {types.device}")


def refuse_types_alone(name: str, types: Tensor | None, bias: Tensor | None) -> None:
    """There is a table that types are rows of.

    Raises:
        ValueError: there are types and no bias.
    """
    if types is not None and bias is None:
        raise ValueError(f"{name} must be None without bias, got a tensor")
