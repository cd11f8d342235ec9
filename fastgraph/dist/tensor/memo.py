"""The cache of ``fastgraph.dist``: values that are made once for an owner, and die with it.

An owner is a tensor, or an object that does not change, as layouts and graphs are. All ranks hit or
miss together, since making a value may ask for collectives. So nothing decides that a rank knows
alone: neither how many bytes there are, nor what its part of a sharded tensor holds.

- A replicated tensor is confirmed by its content, the same on all ranks, as torch does not count
  every edit (:mod:`fastgraph.graphs.witness`); of an index on a device a later use tells that.
- A part of a sharded tensor is told by edits that were counted. No operation gives away its memory
  (there is no ``data_ptr``, ``numpy`` gives a copy), so that every edit is an operation on the
  sharded tensor, which all ranks count.
- Beyond a number of values of an owner, those that were used least recently go.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from fastgraph import settings
from fastgraph.dist.ranks.own_device import HOST
from fastgraph.dist.tensor.contents import IndexOnDevice, flat
from fastgraph.graphs.witness import Witness, witness_of

_LIMIT = 256

Value = TypeVar("Value")


class _Entry(NamedTuple, Generic[Value]):
    value: Value
    state: tuple[int, int] | None = None
    witness: Witness | None = None

    def holds(self, tensor: Tensor | None, state: tuple[int, int] | None) -> bool:
        """True if the owner is what it was."""
        if self.state != state:
            return False
        return tensor is None or self.witness is None or self.witness.confirms([flat(tensor)])


_AnyEntry = _Entry[Any]  # of the type that the function has which is given with its key


class Recent:
    """The values of one owner that were used last, by key."""

    def __init__(self, limit: int = _LIMIT) -> None:
        self._limit = limit
        self._entries: OrderedDict[Hashable, _AnyEntry] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of a key, made if it is not there, of an owner that does not change."""
        found = self.find(key)
        value: Value = self.add(key, _Entry(made(make))) if found is None else found.value
        return value

    def find(
        self, key: Hashable, tensor: Tensor | None = None, state: tuple[int, int] | None = None
    ) -> _AnyEntry | None:
        """The entry of a key that still holds; ``tensor`` and ``state`` are of the owner."""
        entry = self._entries.get(key)
        if entry is None or not entry.holds(tensor, state):
            return None
        self._entries.move_to_end(key)
        return entry

    def add(self, key: Hashable, entry: _Entry[Value]) -> Value:
        """Keep an entry, and return its value."""
        self._entries[key] = entry
        self._entries.move_to_end(key)
        while len(self._entries) > self._limit:
            self._entries.popitem(last=False)
        return entry.value

    def forget(self, part: object) -> None:
        """Drop the entries whose keys name an object, and so the object."""
        named = [
            key
            for key in self._entries
            if isinstance(key, tuple) and any(one is part for one in key)
        ]
        for key in named:
            del self._entries[key]


_of_objects: weakref.WeakKeyDictionary[object, Recent] = weakref.WeakKeyDictionary()


def derived(owner: object, key: Hashable, make: Callable[[], Value]) -> Value:
    """The result of ``make``, cached with an object that does not change, until that is freed."""
    values = _of_objects.get(owner)
    if values is None:
        values = _of_objects[owner] = Recent()
    return values.get(key, make)


class _OfStorage(Recent):
    """The values of the tensors in a storage, and its edits that torch does not count.

    Attributes:
        storage: torch keeps one object for each storage, for as long as the storage lives.
        edits: how often it was edited through an alias with a version of its own; ``None`` if there
            is no such alias.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        super().__init__()
        name = id(storage)
        self.storage = weakref.ref(storage, lambda _: _storages.pop(name, None))
        self.edits: int | None = None


_storages: dict[int, _OfStorage] = {}


def cached(
    tensor: Tensor, key: tuple[Hashable, ...], make: Callable[[], Value], *, is_part: bool = False
) -> Value:
    """The result of ``make``, cached with a tensor until that is edited or freed.

    Views of one storage have values of their own, by offset, shape and strides.

    Args:
        tensor: that something is derived from, by which ``make`` must not be kept alive.
        key: tells it from what else is derived from this tensor.
        make: computes it.
        is_part: true if the tensor is this rank's part of a sharded one.
    """
    if tensor.is_inference():  # its edits are not counted
        return make()
    values = _of_storage(tensor)
    key = (*key, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
    state = tensor._version, values.edits or 0
    entry = values.find(key, tensor, state)
    value: Value
    if entry is not None:
        value = entry.value
        return value
    value = made(make)
    return values.add(key, _Entry(value, state, None if is_part else fingerprint(tensor)))


def cached_with_all(
    tensors: Sequence[tuple[Tensor, bool]], key: tuple[Hashable, ...], make: Callable[[], Value]
) -> Value:
    """:func:`cached` with several tensors, each with ``is_part``.

    Each keeps an object that stands for its content, and the last one the result by these.
    """
    *others, (last, is_part) = tensors
    same = [cached(x, ("is the same",), object, is_part=part) for x, part in others]
    return cached(last, (*key, *same), make, is_part=is_part)


def fingerprint(tensor: Tensor) -> Witness | None:
    """That of the content of a replicated tensor; ``None`` if the settings want none."""
    if not settings.current().check_cache:
        return None
    if tensor.device != HOST and not (tensor.is_floating_point() or tensor.is_complex()):
        return IndexOnDevice(tensor)
    return witness_of([flat(tensor)], may_raise=False)


def _of_storage(tensor: Tensor) -> _OfStorage:
    storage = tensor.untyped_storage()
    values = _storages.get(id(storage))
    if values is None:
        values = _storages[id(storage)] = _OfStorage(storage)
    return values


def watch_edits(tensor: Tensor) -> None:
    """Have edits of the memory of a tensor counted here, as an alias has a version of its own."""
    values = _of_storage(tensor)
    values.edits = values.edits or 0


def count_edit(tensor: Tensor) -> None:
    """The tensor of this rank was edited."""
    values = _storages.get(id(tensor.untyped_storage())) if _storages else None
    if values is not None and values.edits is not None:
        values.edits += 1


def edits_of(tensor: Tensor) -> int:
    """The number of edits of the memory of a tensor that were counted here."""
    values = _storages.get(id(tensor.untyped_storage())) if _storages else None
    return 0 if values is None else values.edits or 0


def forget(part: object) -> None:
    """Drop everything that was cached with tensors by a key with this object."""
    for values in list(_storages.values()):
        values.forget(part)


def on(index: Tensor, device: torch.device) -> Tensor:
    """An index tensor, or its copy on a device, which lives as long as it does.

    Who owns which row is found out on the host, once. A device gets a copy of what it selects by
    when it does so first.

    Args:
        index: which nobody edits.
        device: of the tensor whose rows it names.
    """
    if index.device == device:
        return index
    return cached(index, ("on", device), lambda: index.to(device), is_part=True)


def on_host(x: Tensor) -> Tensor:
    """A tensor whose values ranks plan by, for which the host waits where a device has them."""
    return x if x.device == HOST else x.detach().to(HOST)


def made(make: Callable[[], Value]) -> Value:
    """The result of ``make``, made to serve training as well, if inference comes first."""
    if not torch.is_inference_mode_enabled():
        return make()
    with torch.inference_mode(False), torch.no_grad():
        return make()
