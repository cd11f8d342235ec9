"""Rules for indexing: selecting rows of sharded tensors and assigning to them."""

from __future__ import annotations

import operator
from types import EllipsisType
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.own_device import HOST
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.collectives import sum_of_ranks
from fastgraph.dist.tensor.digests import DIGESTS
from fastgraph.dist.tensor.exchange import plan, take
from fastgraph.dist.tensor.layout import Layout, usual
from fastgraph.dist.tensor.memo import cached, on, on_host
from fastgraph.dist.tensor.sharded import (
    CopiedView,
    Index,
    ShardedTensor,
    Source,
    aligned,
    copied_view,
    enter,
    is_sharded,
    placed,
    version,
)
from fastgraph.dist.tensor.table import (
    NoRuleError,
    TorchFunction,
    is_in_place,
    name_of,
    rule,
    unpacked,
)

_ALL = (slice(None),)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


Entry = int | slice | Tensor | EllipsisType | None
"""The entry of an index for one dimension, once numbers and lists of all kinds are made alike."""


class _Key(NamedTuple):
    """The parts of an index: the entry for the sharded dimension, and those for all others.

    Attributes:
        local: the index for local rows, with all rows at the sharded dimension.
        rows: the entry for the sharded dimension.
        axis: where that dimension is after ``local`` was applied.
        is_basic: whether upstream gives a view for ``local``.
    """

    local: tuple[Entry, ...]
    rows: Entry
    axis: int
    is_basic: bool


def _is_all(entry: object) -> bool:
    return isinstance(entry, slice) and entry == slice(None)


def _as_entry(entry: Index) -> Entry:
    if isinstance(entry, CopiedView):
        entry = entry.as_subclass(Tensor)
    if isinstance(entry, (list, range)) or type(entry).__name__ == "ndarray":
        entry = torch.as_tensor(list(entry) if isinstance(entry, range) else entry, device=HOST)
    if isinstance(entry, bool) or (isinstance(entry, Tensor) and entry.dtype == torch.uint8):
        raise NoRuleError
    if isinstance(entry, Tensor):
        if entry.dim() > 1 or (
            entry.dim() == 0 and (is_sharded(entry) or entry.dtype == torch.bool)
        ):
            raise NoRuleError
        return int(entry) if entry.dim() == 0 else entry
    if not (entry is None or entry is Ellipsis or isinstance(entry, slice)):
        try:
            return operator.index(entry)
        except TypeError:
            raise NoRuleError from None
    found: Entry = entry
    return found


def _key_of(x: ShardedTensor, index: Index) -> _Key:
    entries = [_as_entry(e) for e in (index if isinstance(index, tuple) else (index,))]
    used = sum(e is not None and e is not Ellipsis for e in entries)
    if used > x.local.dim() or sum(e is Ellipsis for e in entries) > 1:
        raise NoRuleError  # upstream's own message
    at = next((i for i, e in enumerate(entries) if e is Ellipsis), len(entries))
    entries[at : at + 1] = [slice(None)] * (x.local.dim() - used)
    dim = axis = place = 0
    rows: Entry = slice(None)
    other_tensors = 0
    for i, entry in enumerate(entries):
        if entry is None:
            axis += dim <= x.axis
            continue
        if dim == x.axis:
            rows, place, entries[i] = entry, axis, slice(None)
        elif isinstance(entry, Tensor):
            other_tensors += 1
            if is_sharded(entry):
                raise NoRuleError
        if not isinstance(entry, int):
            axis += 1
        dim += 1
    if other_tensors > 1 or (other_tensors and not _is_all(rows)):
        raise NoRuleError
    return _Key(tuple(entries), rows, place, not other_tensors)


class _Choice(NamedTuple):
    """The selected local rows, on the host or where they were found, and the result's layout."""

    local: Tensor
    rows: Layout


def _chosen(x: ShardedTensor, entry: Entry) -> _Choice:
    """The rows of a slice, a mask or replicated positions; each stays with its owner."""
    rows = x.rows
    if isinstance(entry, slice):
        start, stop, step = entry.indices(rows.n)
        if step < 0:
            raise NoRuleError
        DIGESTS.compare(torch.tensor([start, stop, step], device=HOST), "a slice")

        def make_slice() -> _Choice:
            found = rows.span(start, stop, step)
            return _Choice(
                rows.held(torch.arange(start, stop, step, device=HOST)[found.position]).row, found
            )

        sliced: _Choice = rows.derived.get(("slice", start, stop, step), make_slice)
        return sliced
    if not isinstance(entry, Tensor) or entry.dim() != 1:
        raise NoRuleError
    if entry.dtype == torch.bool:
        if entry.shape[0] != rows.n:
            raise NoRuleError  # upstream's own message
        mask = entry if isinstance(entry, ShardedTensor) else placed(entry, rows, 0)
        if mask.rows is not rows:
            mask = ShardedTensor(mask.aligned(rows), rows, 0)
        return _true(mask)
    if is_sharded(entry) or entry.dtype not in _INTEGERS:
        raise NoRuleError
    DIGESTS.compare(entry)

    def make() -> _Choice:
        given = on_host(entry)
        positions = torch.where(given < 0, given + rows.n, given).long()
        if positions.numel() and not (int(positions.min()) >= 0 and int(positions.max()) < rows.n):
            raise IndexError(f"an index is out of range for a dimension of size {rows.n}")
        found = rows.at(positions)
        return _Choice(rows.held(positions[found.key]).row, found)

    return cached(entry, ("chosen", rows), make)


def _true(mask: ShardedTensor) -> _Choice:
    def make() -> _Choice:
        local = mask.local.nonzero().view(-1)
        found = Layout(mask.rows.key[on_host(local)], mask.rows.bound)
        return _Choice(local, mask.rows if found.n == mask.rows.n else found)

    return mask.cached(("true",), make)


def _selected(x: ShardedTensor, chosen: _Choice) -> Tensor:
    return x.local.index_select(x.axis, on(chosen.local, x.local.device))


@rule("__getitem__")
@unpacked
def getitem(func: TorchFunction, x: Tensor, index: Index) -> Tensor:
    """``x[index]``."""
    if is_sharded(index) and index.dim() > 1 and index.dtype in _INTEGERS and x.dim():
        return x[index.reshape(-1)].reshape(*index.shape, *x.shape[1:])
    if not is_sharded(x):
        return _of_replicated(x, index)
    if _is_mask_of_batch(index, x):
        return x.squeeze(0)[index.squeeze(0)]
    key = _key_of(x, index)
    trivial = all(_is_all(e) for e in key.local)
    y = x if trivial else ShardedTensor(x.local[key.local], x.rows, key.axis)
    entry = key.rows
    if _is_all(entry):
        return y
    if not isinstance(entry, (int, slice)) or not key.is_basic:
        if is_sharded(entry) and entry.dtype in _INTEGERS:
            return ShardedTensor(take(y.local, y.axis, entry.local, y.rows), entry.rows, y.axis)
        chosen = _chosen(y, entry)
        return ShardedTensor(_selected(y, chosen), chosen.rows, y.axis)
    source = Source(x, index, version(x))
    if isinstance(entry, int):
        return copied_view(_one_row(y, entry), source)
    chosen = _chosen(y, entry)
    return ShardedTensor(_selected(y, chosen), chosen.rows, y.axis, source)


def _is_mask_of_batch(index: object, x: ShardedTensor) -> TypeGuard[Tensor]:
    """True if a mask is for a batch of one set of rows, as ``to_dense_batch`` of PyG makes both."""
    return (
        isinstance(index, Tensor)
        and index.dtype == torch.bool
        and x.axis == 1
        and x.shape[0] == 1
        and index.shape == x.shape[:2]
    )


def _one_row(x: ShardedTensor, index: int) -> Tensor:
    """One row, broadcast by its owner."""
    DIGESTS.compare(index)
    if not -x.rows.n <= index < x.rows.n:
        raise IndexError(
            f"index {index} is out of bounds for dimension {x.axis} with size {x.rows.n}"
        )
    index %= x.rows.n
    owner, place = x.rows.held(index)
    if int(owner) == WORLD.rank:
        row = x.local.select(x.axis, int(place))
    else:
        row = x.local.narrow(x.axis, 0, 0).sum(x.axis).to(x.dtype)
    return sum_of_ranks(row).to(x.dtype)


def _of_replicated(x: Tensor, index: Index) -> Tensor:
    """Rows of a replicated tensor at sharded positions, or by a sharded mask."""
    entries = index if isinstance(index, tuple) else (index,)
    at = [(i, entry) for i, entry in enumerate(entries) if is_sharded(entry)]
    if len(at) != 1 or at[0][1].dim() != 1:
        raise NoRuleError
    dim, entry = at[0]
    if not all(_is_all(e) for i, e in enumerate(entries) if i != dim) or dim >= x.dim():
        raise NoRuleError
    if entry.dtype == torch.bool:
        if x.shape[dim] != entry.rows.n:
            raise NoRuleError
        return placed(x, entry.rows, dim)[tuple(entries)]
    if entry.dtype not in _INTEGERS:
        raise NoRuleError
    return _rows_of_replicated(x, dim, entry)


def _rows_of_replicated(x: Tensor, dim: int, index: ShardedTensor) -> ShardedTensor:
    plan_of_range(index, x.shape[dim])
    local = torch.where(index.local < 0, index.local + x.shape[dim], index.local)
    return ShardedTensor(enter(x).index_select(dim, local), index.rows, dim)


def plan_of_range(index: ShardedTensor, n: int) -> None:
    """Check that the entries of an index are in range on all ranks.

    Raises:
        IndexError: on all ranks.
    """

    def make() -> bool:
        outside = (index.local < -n) | (index.local >= n)
        return not transport.agree(not bool(outside.any()))

    if index.cached(("range", n), make):
        raise IndexError(f"an index is out of range for a dimension of size {n}")


@rule("__setitem__")
@unpacked
def setitem(func: TorchFunction, x: Tensor, index: Index, value: Tensor | float) -> None:
    """``x[index] = value``."""
    if not is_sharded(x):
        _set_replicated(x, index, value)
        return
    if _is_mask_of_elements(index, x) and not (isinstance(value, Tensor) and value.dim()):
        x.local[aligned(index, x.rows, x.axis)] = enter(value)
        return
    key = _key_of(x, index)
    entry = key.rows
    if _is_all(entry):
        result = x.local[key.local]
        # `aligned` would gather nothing, but a value of more dimensions has leading ones to lose.
        if isinstance(value, Tensor) and value.dim() > result.dim():
            raise NoRuleError
        x.local[key.local] = aligned(value, x.rows, key.axis - result.dim())
        return
    if not key.is_basic:
        raise NoRuleError
    view = x.local[key.local]
    if isinstance(value, Tensor) and value.dim() > view.dim():
        raise NoRuleError
    if isinstance(entry, int):
        _set_row(view, x.rows, key.axis, entry, value)
        return
    if is_sharded(entry) and entry.dtype in _INTEGERS:
        found = plan(entry.local, x.rows)
        if found.remote:
            raise NoRuleError
        chosen = _Choice(found.place, entry.rows)
    else:
        chosen = _chosen(ShardedTensor(view, x.rows, key.axis), entry)
    local = aligned(value, chosen.rows, key.axis - view.dim())
    at: tuple[slice | Tensor, ...] = (*_ALL * key.axis, on(chosen.local, view.device))
    view[at] = local


def _is_mask_of_elements(index: object, x: ShardedTensor) -> TypeGuard[Tensor]:
    """True if a mask has the sharded dimension and others."""
    return (
        isinstance(index, Tensor)
        and index.dtype == torch.bool
        and index.dim() > max(x.axis, 1)
        and index.shape == x.shape[: index.dim()]
    )


def _set_replicated(x: Tensor, index: Index, value: Tensor | float) -> None:
    """Assign one number to all rows of a replicated tensor at the positions of any rank."""
    if not (is_sharded(index) and index.dim() == 1 and index.dtype in _INTEGERS) or not x.dim():
        raise NoRuleError
    if isinstance(value, Tensor) and (value.dim() or is_sharded(value)):
        raise NoRuleError
    plan_of_range(index, x.shape[0])
    named = torch.zeros(x.shape[0], dtype=torch.bool, device=x.device)
    named[index.local] = True
    x[transport.all_reduce(named) > 0] = value


def _set_row(view: Tensor, rows: Layout, axis: int, index: int, value: Tensor | float) -> None:
    if is_sharded(value):
        raise NoRuleError
    DIGESTS.compare(index)
    if not -rows.n <= index < rows.n:
        raise IndexError(f"index {index} is out of bounds for a dimension of size {rows.n}")
    index %= rows.n
    value = enter(value)
    owner, place = rows.held(index)
    mine = int(owner) == WORLD.rank
    local = torch.tensor([int(place)] if mine else [], dtype=torch.int64, device=view.device)
    if isinstance(value, Tensor) and value.dim():
        if value.dim() > view.dim() - 1:
            raise NoRuleError
        shape = [size for dim, size in enumerate(view.shape) if dim != axis]
        value = value.expand(shape).unsqueeze(axis)
        if not mine:
            value = value.narrow(axis, 0, 0)
    at: tuple[slice | Tensor, ...] = (*_ALL * axis, local)
    view[at] = value


@rule("index_select")
@unpacked
def index_select(func: TorchFunction, x: Tensor, dim: int, index: Tensor) -> ShardedTensor:
    """``index_select``: the rows at given positions."""
    if not isinstance(dim, int) or not -x.dim() <= dim < x.dim() or index.dim() > 1:
        raise NoRuleError
    dim %= x.dim()
    if index.dtype not in _INTEGERS or index.dim() == 0:
        raise NoRuleError
    if is_sharded(index):
        if not is_sharded(x):
            return _rows_of_replicated(x, dim, index)
        if x.axis != dim:
            raise NoRuleError
        return ShardedTensor(take(x.local, dim, index.local, x.rows), index.rows, dim)
    if not is_sharded(x):
        raise NoRuleError
    if x.axis != dim:
        return ShardedTensor(x.local.index_select(dim, index), x.rows, x.axis)
    chosen = _chosen(x, index)
    return ShardedTensor(_selected(x, chosen), chosen.rows, dim)


@rule("index_copy", in_place=True)
@unpacked
def index_copy(func: TorchFunction, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """Assign to the rows at given positions."""
    in_place = is_in_place(name_of(func))
    if not x.dim() or dim not in (0, -x.dim()) or source.dim() != x.dim():
        raise NoRuleError
    if not is_sharded(x) and not in_place:
        x = placed(x, usual(x.shape[0]), 0)
    if not is_sharded(x) or x.axis != 0:
        raise NoRuleError
    out = x if in_place else x.clone()
    out[index] = source
    return out


@rule("masked_select")
@unpacked
def masked_select(func: TorchFunction, x: Tensor, mask: Tensor) -> Tensor:
    """``masked_select`` by a mask, both with one dimension."""
    if x.dim() != 1 or mask.dim() != 1 or not is_sharded(x):
        raise NoRuleError
    return x[mask]


@rule("embedding")
@unpacked
def embedding(
    func: TorchFunction, index: Tensor, table: Tensor, *rest: object, **options: object
) -> ShardedTensor:
    """``embedding``: the rows of a replicated table."""
    if is_sharded(table) or not is_sharded(index):
        raise NoRuleError
    plan_of_range(index, table.shape[0])
    local = func(index.local, enter(table), *rest, **options)
    return ShardedTensor(local, index.rows, index.axis)


@rule("one_hot")
@unpacked
def one_hot(func: TorchFunction, x: ShardedTensor, num_classes: int = -1) -> ShardedTensor:
    """``one_hot``: classes as unit vectors."""
    largest = int(x.max()) if x.numel() else -1
    if x.numel() and (int(x.min()) < 0 or 0 <= num_classes <= largest):
        raise NoRuleError  # upstream's own message
    if num_classes < 0 and not x.numel():
        raise NoRuleError
    classes = largest + 1 if num_classes < 0 else num_classes
    return ShardedTensor(func(x.local, classes), x.rows, x.axis)


@rule("nonzero")
@unpacked
def nonzero(func: TorchFunction, x: Tensor, as_tuple: bool = False) -> Tensor | tuple[Tensor]:
    """``nonzero``: the positions of the nonzero elements of a vector."""
    if x.dim() != 1:
        raise NoRuleError
    mask = x if x.dtype == torch.bool else x != 0
    assert is_sharded(mask)
    chosen = _true(mask)
    position = mask.rows.position_on(chosen.local.device)
    positions = ShardedTensor(position[chosen.local], chosen.rows, 0)
    return (positions,) if as_tuple else positions.unsqueeze(1)
