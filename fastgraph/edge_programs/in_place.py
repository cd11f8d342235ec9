"""Operators that work in place, as those that do not."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from fastgraph.edge_programs.calls import Call, aten
from fastgraph.edge_programs.dtypes import without_data


def out_of_place(call: Call) -> Call | None:
    """The same call of the operator that leaves its argument alone; ``None`` if there is none."""
    name = call.operation.__name__
    if not name.endswith("_") or name.endswith("__") or not hasattr(aten, name[:-1]):
        return None
    func = getattr(getattr(aten, name[:-1]), call.func._overloadname, None)
    if func is None or func._schema.is_mutable:
        return None
    return Call(func, call.args, call.kwargs)


def aliases(edited: Tensor, known: Iterable[Tensor]) -> list[Tensor] | None:
    """Other tensors with the same memory as one; ``None`` if they have only a part of it in common.

    Args:
        edited: the tensor.
        known: all tensors that there may be.
    """
    (own,) = without_data((edited,))
    memory = own.untyped_storage()._cdata
    found = []
    for tensor in known:
        (other,) = without_data((tensor,))
        if other is own or other.untyped_storage()._cdata != memory:
            continue
        if not (own.is_contiguous() and other.is_contiguous() and own.numel() == other.numel()):
            return None
        found.append(tensor)
    return found
