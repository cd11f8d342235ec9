"""What was derived from a tensor, remembered for as long as that tensor lives unchanged.

A key names the tensor's storage, view and version counter, so an in-place edit misses. A weak
reference to the storage is kept beside the value: while it is held the storage's address cannot be
reused, so a new tensor is never mistaken for a freed one.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fastgraph import settings


def tensor_key(tensor: Tensor) -> tuple[object, ...]:
    """What identifies the content of a strided tensor for as long as its storage lives.

    Inference tensors have no version counter and cannot be keyed.
    """
    return (
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor._version,
    )


class _Entry(NamedTuple):
    value: Any
    storages: tuple[StorageWeakRef, ...]


class Memo:
    """A mapping bounded by bytes whose entries die with their tensors, or least recently used."""

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[object, ...], _Entry] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[object, ...]) -> Any | None:
        """The value stored under a key made of :func:`tensor_key` of living tensors."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        with self._lock:
            if key in self._entries:  # another thread may have evicted it since
                self._entries.move_to_end(key)
        return entry.value

    def put(self, key: tuple[object, ...], value: Any, *tensors: Tensor | None) -> None:
        """Remember ``value`` (with an attribute ``nbytes``) until one of ``tensors`` is freed.

        The value must not hold the tensors themselves, which would keep them alive.
        """
        storages = tuple(StorageWeakRef(t.untyped_storage()) for t in tensors if t is not None)
        with self._lock:
            self._entries[key] = _Entry(value, storages)
            self._drop()

    def trim(self) -> None:
        """Release what belongs to freed tensors or exceeds the ``cache_bytes`` setting."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        freed = [k for k, e in self._entries.items() if any(s.expired() for s in e.storages)]
        for key in freed:
            del self._entries[key]
        excess = self.nbytes - settings.current().cache_bytes
        while excess > 0 and self._entries:
            _, entry = self._entries.popitem(last=False)
            excess -= entry.value.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes held by all values."""
        return sum(entry.value.nbytes for entry in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()


MEMO = Memo()
