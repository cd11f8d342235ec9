"""Rows of a table of biases by the types of entries, pairs of nodes or edges, in plain torch."""

from __future__ import annotations

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
    index = as_index(types)  # to compare, too: as a byte, a table's length of 300 is 44
    for bad in index[(index < 0) | (index >= len(table))][:1].tolist():
        raise IndexError(f"{name} holds {bad}, expected 0 <= type < {len(table)}")
    return table.index_select(0, index)


def as_index(types: Tensor) -> Tensor:
    """Types in a dtype that torch indexes by."""
    return types if types.itemsize >= 4 else types.int()
