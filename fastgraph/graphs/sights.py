"""First uses of tensors, for which nothing is worth being remembered."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fastgraph.machine.forks import lock_across_forks

MOST = 64


class Sights:
    """Keys under which something was done, while the tensors that it was done with live.

    Args:
        uses: how often it is done before something is worth being remembered.
    """

    def __init__(self, uses: int = 1) -> None:
        self.uses = uses
        self._seen: OrderedDict[tuple[object, ...], tuple[int, list[StorageWeakRef]]]
        self._seen = OrderedDict()
        self._lock = lock_across_forks()

    def is_enough(self, key: tuple[object, ...], tensors: list[Tensor]) -> bool:
        """True if the same tensors were seen under this key before, as often as they are used."""
        with self._lock:
            count, storages = self._seen.pop(key, (0, []))
            # Mini-batches are often where the last one was.
            if count and any(storage.expired() for storage in storages):
                count = 0
            if count >= self.uses:
                return True
            if not count:
                storages = [StorageWeakRef(t.untyped_storage()) for t in tensors]
            self._seen[key] = count + 1, storages
            if len(self._seen) > MOST:
                self._seen.popitem(last=False)
            return False
