"""A cache kept with the memory of a tensor, for as long as that lives and is not edited."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fastgraph import settings
from fastgraph.graphs.witness import Witness, witness_of

Value = TypeVar("Value")


class _Entry(NamedTuple):
    version: int
    edits: int
    witness: Witness | None
    value: Any

    def holds(self, state: tuple[int, int], tensor: Tensor) -> bool:
        """True if the tensor is what it was."""
        if (self.version, self.edits) != state:
            return False
        return self.witness is None or self.witness.confirms([flat(tensor)])


class _Memory:
    """A storage, the entries that are remembered with it, and its edits that torch does not count.

    Attributes:
        storage: torch keeps one object for each storage, for as long as the storage lives.
        edits: how often it was edited through an alias with a version of its own; ``None`` if there
            is no such alias.
        entries: by key.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        name = id(storage)
        self.storage = weakref.ref(storage, lambda _: _memories.pop(name, None))
        self.edits: int | None = None
        self.entries: dict[tuple[Any, ...], _Entry] = {}


_memories: dict[int, _Memory] = {}


def remembered(
    tensor: Tensor, key: tuple[Any, ...], make: Callable[[], Any], *, is_part: bool = False
) -> Any:
    """The result of ``make``, cached by tensor and key; it must not refer to the tensor.

    Views of one memory have entries of their own, by offset, shape and strides. Torch does not
    count every edit, so that the content of a replicated tensor has to be confirmed. All ranks hold
    the same content, and come to the same answer.

    Args:
        tensor: that something is derived from.
        key: tells it from what else is derived from this tensor.
        make: computes it.
        is_part: true if the tensor is this rank's part of a sharded one. Its content says nothing
            of the other parts; but all of its edits are operations on the sharded tensor, which are
            counted on all ranks.
    """
    if tensor.is_inference():  # its edits are not counted
        return make()
    memory = _memory_of(tensor)
    key = (*key, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
    state = tensor._version, memory.edits or 0
    entry = memory.entries.get(key)
    if entry is not None and entry.holds(state, tensor):
        return entry.value
    value = made(make)
    compares = not is_part and settings.current().check_cache
    witness = witness_of([flat(tensor)], may_raise=False) if compares else None
    memory.entries[key] = _Entry(*state, witness, value)
    return value


def flat(tensor: Tensor) -> Tensor:
    """A tensor of one or two dimensions with all elements, as checksums are taken of these."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor if 1 <= tensor.dim() <= 2 else tensor.reshape(-1)


def _memory_of(tensor: Tensor) -> _Memory:
    storage = tensor.untyped_storage()
    memory = _memories.get(id(storage))
    if memory is None:
        memory = _memories[id(storage)] = _Memory(storage)
    return memory


def watch_edits(tensor: Tensor) -> None:
    """Have edits of the memory of a tensor counted here, as an alias has a version of its own."""
    memory = _memory_of(tensor)
    memory.edits = memory.edits or 0


def count_edit(tensor: Tensor) -> None:
    """The tensor of this rank was edited."""
    memory = _memories.get(id(tensor.untyped_storage())) if _memories else None
    if memory is not None and memory.edits is not None:
        memory.edits += 1


def edits_of(tensor: Tensor) -> int:
    """The number of edits of the memory of a tensor that were counted here."""
    memory = _memories.get(id(tensor.untyped_storage())) if _memories else None
    return 0 if memory is None else memory.edits or 0


def forget(part: object) -> None:
    """Drop everything that was remembered by a key with this object, and so the object."""
    for memory in list(_memories.values()):
        for key in [key for key in memory.entries if any(one is part for one in key)]:
            del memory.entries[key]


def made(make: Callable[[], Value]) -> Value:
    """The result of ``make``, made to serve training as well, if inference comes first."""
    if not torch.is_inference_mode_enabled():
        return make()
    with torch.inference_mode(False), torch.no_grad():
        return make()
