"""First uses of tensors, of which nothing is worth being remembered."""

from __future__ import annotations

import threading
from collections import OrderedDict

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

MOST = 64


class Sights:
    """Keys under which something was done once, while the tensors that it was done with live."""

    def __init__(self) -> None:
        self._tensors: OrderedDict[tuple[object, ...], list[StorageWeakRef]] = OrderedDict()
        self._lock = threading.Lock()

    def is_second(self, key: tuple[object, ...], tensors: list[Tensor]) -> bool:
        """True if the same tensors were seen under this key before, once."""
        with self._lock:
            before = self._tensors.pop(key, None)
            # Mini-batches are often where the last one was.
            if before is not None and not any(storage.expired() for storage in before):
                return True
            self._tensors[key] = [StorageWeakRef(t.untyped_storage()) for t in tensors]
            if len(self._tensors) > MOST:
                self._tensors.popitem(last=False)
            return False
