"""Rows of a table of biases by the types of entries, pairs of nodes or edges, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def of_types(table: Tensor, types: Tensor, name: str) -> Tensor:
    """The bias of each entry, ``[entries, heads]``.

    Args:
        table: ``[types, heads]``.
        types: integers ``[entries]``.
        name: of the argument that these are.

    Raises:
        IndexError: the table has no such type.
    """
    check_types(table, types, name)
    return table.index_select(0, as_index(types))


def check_types(table: Tensor, types: Tensor, name: str) -> None:
    """Raise IndexError for types that a table lacks; without tensors of their size."""
    if types.numel() == 0:
        return
    for bad in torch.stack(torch.aminmax(types)).tolist():
        if not 0 <= bad < len(table):
            raise IndexError(f"{name} holds {bad}, expected 0 <= type < {len(table)}")


def as_index(types: Tensor) -> Tensor:
    """Types in a dtype that torch indexes by."""
    return types if types.itemsize >= 4 else types.int()
