"""Cache of results derived from tensors, each kept while its tensor lives unchanged.

A key names the tensor's storage, view and version counter, so an in-place edit misses. A weak
reference to the storage is kept beside the value: while it is held the storage's address cannot be
reused, so a new tensor is never mistaken for a freed one.

Not every edit is counted, and compiled code puts one intermediate tensor where another was. So a
witness of the content (:mod:`fastgraph.graphs.witness`) has to confirm what the key has found.

What a captured CUDA graph uses is kept until everything is forgotten: its replays look nothing up.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fastgraph import settings
from fastgraph.graphs.graph import normal_mode
from fastgraph.graphs.passes import given_entry, note
from fastgraph.graphs.witness import Checksum, Guard, StaleGraphError, Witness, witness_of
from fastgraph.machine import capture
from fastgraph.machine.forks import lock_across_forks


def tensor_key(tensor: Tensor) -> tuple[object, ...]:
    """The key of a strided tensor, and of its content as far as torch counts edits.

    Inference tensors have no version counter and cannot be keyed. Two views of the same memory may
    differ in their sign alone: torch negates lazily.
    """
    return (
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.is_neg(),
        tensor._version,
    )


def is_recording() -> bool:
    """True if operations are being recorded, where a remembered result would be a constant."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


class _Calls(threading.local):
    from_compiled_code = False
    from_eager_code = False  # through the dispatcher


_CALLS = _Calls()


def called_by_dispatcher(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """An operator's implementation, for calls that compiled code may make.

    In these versions of tensors may not tell all, unless :func:`called_from_eager_code`.
    """

    @functools.wraps(implementation)
    def call(*arguments: Any) -> Any:
        before, _CALLS.from_compiled_code = _CALLS.from_compiled_code, not _CALLS.from_eager_code
        try:
            return implementation(*arguments)
        finally:
            _CALLS.from_compiled_code = before

    return call


def is_called_by_compiled_code() -> bool:
    """True in the implementation of an operator that compiled code may have called."""
    return _CALLS.from_compiled_code


def called_from_eager_code(operator: Callable[..., Any]) -> Callable[..., Any]:
    """An operator for eager code that needs the dispatcher: in a profiler, of lazy views, ...

    What an operator of compiled code calls is compiled code's.
    """

    def call(*arguments: Any) -> Any:
        before = _CALLS.from_eager_code
        _CALLS.from_eager_code = not _CALLS.from_compiled_code
        try:
            return operator(*arguments)
        finally:
            _CALLS.from_eager_code = before

    return call


@dataclass(slots=True)
class _Entry:
    device: int  # as Tensor.get_device() numbers GPUs, -1 for the CPU
    value: Any
    nbytes: int
    storages: tuple[StorageWeakRef, ...]
    witness: Witness | None
    used: int  # when it was used last, counted by uses of all entries

    @property
    def content(self) -> tuple[int, ...] | None:
        """Bits that tell the content of its tensors, as far as a witness has them."""
        return None if self.witness is None else self.witness.bits


class _Noted(NamedTuple):
    key: tuple[object, ...]
    value: Any
    storages: tuple[StorageWeakRef, ...]
    witness: Witness | None


def _are_freed(storages: tuple[StorageWeakRef, ...]) -> bool:
    """True if one of them is."""
    return any(storage.expired() for storage in storages)


_MOST_NOTED = 64


class Memo:
    """A mapping bounded by bytes on each device, whose entries die with their tensors.

    Beyond the bound the least recently used go.

    The bound is not for what captured CUDA graphs use.

    What costs less than to remember it, and may never be used again, can be noted first
    (:meth:`note`), and is remembered at its second use.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[object, ...], _Entry] = {}
        self._noted: dict[tuple[object, ...], tuple[StorageWeakRef, ...]] = {}
        self._latest: _Noted | None = None
        self._captured: dict[int, Any] = {}
        self._nbytes: Counter[int] = Counter()  # by device
        self._added = 0
        self._uses = itertools.count()
        self._lock = lock_across_forks()

    def get(self, key: tuple[object, ...], *tensors: Tensor | None) -> Any | None:
        """The value stored under a key made of :func:`tensor_key` of these tensors.

        ``None`` if there is none, or if the tensors do not hold any more what they did.

        Raises:
            RuntimeError: nothing is stored, and a CUDA graph is being captured, in which it cannot
                be computed.
            StaleGraphError: on a GPU, the tensors did not at an earlier call.
        """
        is_compiled = _CALLS.from_compiled_code
        entry: _Entry | None = given_entry(key) if is_compiled else None
        is_given = entry is not None
        if entry is None:
            entry = self._entries.get(key)
        if entry is None or (is_compiled and not is_given and not _may_compare(entry.witness)):
            capture.refuse_to_capture("the structure of a graph", *tensors)
            return None
        if capture.is_capturing(tensors[0]):
            self._captured[id(entry.value)] = entry.value  # nobody can compare tensors now
        elif entry.witness is not None and not is_given:
            try:
                if not entry.witness.confirms(_present(tensors)):
                    return None
            except StaleGraphError:
                with self._lock:
                    self._remove(key)
                raise
        entry.used = next(self._uses)
        if is_compiled and not is_given:
            note(key, entry, _present(tensors)[0])
        return entry.value

    def put(
        self,
        key: tuple[object, ...],
        value: Any,
        *tensors: Tensor | None,
        held: Sequence[Tensor] | None = None,
        checksum: Checksum | None = None,
    ) -> None:
        """Remember ``value`` (with an attribute ``nbytes``) until one of ``tensors`` is freed.

        The value must not hold the tensors themselves, which would keep them alive.

        Args:
            key: made of :func:`tensor_key` of the tensors, or says as much.
            value: anything.
            tensors: what it was made of.
            held: indices that the value holds, one for each tensor, with the same numbers.
            checksum: of the tensors, if they are on the CPU and it is known.
        """
        present = _present(tensors)
        storages = tuple(StorageWeakRef(tensor.untyped_storage()) for tensor in present)
        is_compiled = _CALLS.from_compiled_code
        # Compiled code may put one tensor where another was, which is no error, and tells its
        # backward pass what the content was.
        witness: Witness | None = None
        if is_compiled:
            witness = checksum or witness_of(present, may_raise=False)
        elif settings.current().check_cache:
            witness = checksum or witness_of(present, may_raise=True, held=held)
        nbytes = value.nbytes + (0 if witness is None else witness.nbytes)
        device = max(tensor.get_device() for tensor in present)
        entry = _Entry(device, value, nbytes, storages, witness, next(self._uses))
        if is_compiled:
            note(key, entry, present[0])
        with self._lock:
            self._remove(key)
            self._entries[key] = entry
            self._nbytes[device] += nbytes
            self._added += 1
            # Looking at every entry each time would make many live graphs slow to add.
            if 2 * self._added >= len(self._entries):
                self._remove_freed()
            self._remove_excess(device)

    def note(
        self,
        key: tuple[object, ...],
        value: Any,
        tensors: Sequence[Tensor],
        witness: Witness | None,
    ) -> None:
        """Take down a first use of tensors on the CPU, and keep what was made of them for a while.

        That takes a third of the time of :meth:`put`. Only the latest value is kept, which serves
        several layers that use the same graph one after the other.

        Args:
            key: made of the :func:`tensor_key` of the tensors.
            value: as for :meth:`put`; ``None`` where it is not to be kept.
            tensors: what it was made of.
            witness: of their content; ``None`` where nobody looks at it.
        """
        noted = self._noted
        if len(noted) >= _MOST_NOTED:
            for known, storages in list(noted.items()):
                if _are_freed(storages):
                    noted.pop(known, None)
            if len(noted) >= _MOST_NOTED:
                noted.clear()
        noted[key] = storages = tuple([StorageWeakRef(t.untyped_storage()) for t in tensors])
        has_room = value is not None and self._nbytes[-1] + value.nbytes <= bound_of(-1)
        self._latest = _Noted(key, value, storages, witness) if has_room else None

    def noted(self, key: tuple[object, ...], *tensors: Tensor) -> tuple[bool, Any | None]:
        """True if a use was taken down, and the value if it is there and the content the same.

        It is for the caller to :meth:`put` the value now.

        Args:
            key: as for :meth:`note`.
            tensors: the same.
        """
        storages, latest = self._noted.get(key), self._latest
        if storages is None or _are_freed(storages):
            if latest is not None and _are_freed(latest.storages):
                self._latest = None  # so that what is computed now finds its memory, in caches yet
            return False, None
        self._noted.pop(key, None)
        if latest is None or latest.key != key or _are_freed(latest.storages):
            return True, None
        self._latest = None
        is_same = latest.witness is None or latest.witness.confirms(tensors)
        return True, latest.value if is_same else None

    def forget(self, key: tuple[object, ...]) -> bool:
        """Drop what is stored under a key; true if there was something."""
        with self._lock:
            before = len(self._entries)
            self._remove(key)
            return len(self._entries) < before

    def forget_named(self, name: str) -> None:
        """Drop what is stored under keys that begin with a name."""
        with self._lock:
            for key in [key for key in self._entries if key[0] == name]:
                self._remove(key)

    def has_room_for(self, nbytes: int, device: int) -> bool:
        """True if what takes so many bytes leaves as many to the graphs of a device."""
        return 2 * nbytes <= bound_of(device)

    def trim(self) -> None:
        """Release what belongs to freed tensors or exceeds the ``cache_bytes`` setting."""
        latest = self._latest
        if latest is not None and (
            _are_freed(latest.storages) or latest.value.nbytes > bound_of(-1)
        ):
            self._latest = None
        with self._lock:
            self._remove_freed()
            for device in self._nbytes:
                self._remove_excess(device)

    def recount(self) -> None:
        """Learn how large values have become, and keep to the bound."""
        with self._lock:
            self._nbytes.clear()
            for entry in self._entries.values():
                witness = 0 if entry.witness is None else entry.witness.nbytes
                entry.nbytes = entry.value.nbytes + witness
                self._nbytes[entry.device] += entry.nbytes
            for device in list(self._nbytes):
                self._remove_excess(device)

    def _remove(self, key: tuple[object, ...]) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._nbytes[entry.device] -= entry.nbytes

    def _remove_freed(self) -> None:
        self._added = 0
        freed = [k for k, e in self._entries.items() if any(s.expired() for s in e.storages)]
        for key in freed:
            self._remove(key)

    def _remove_excess(self, device: int) -> None:
        bound = bound_of(device)
        if self._nbytes[device] <= bound:
            return
        entries = [(e.used, k) for k, e in self._entries.items() if e.device == device]
        for _, key in sorted(entries, key=itemgetter(0)):
            self._remove(key)
            if self._nbytes[device] <= bound:
                return

    @property
    def nbytes(self) -> int:
        """Bytes held by all entries, and by the latest value that was noted."""
        latest = self._latest
        return self._nbytes.total() + (0 if latest is None else latest.value.nbytes)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: tuple[object, ...]) -> bool:
        return key in self._entries

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
            self._captured.clear()
            self._nbytes.clear()
            self._noted.clear()
            self._latest = None


def bound_of(device: int) -> int:
    """Bytes that the setting ``cache_bytes`` allows on a device; see :func:`quarter_of_memory`."""
    given = settings.current().cache_bytes
    return quarter_of_memory(device) if given is None else given


@functools.cache
def quarter_of_memory(device: int) -> int:
    """Of the machine, or of a GPU: its programs need as much for graphs as it is large.

    Args:
        device: its number among those of torch's accelerator, of which there is one kind; -1 for
            the machine.
    """
    if device < 0:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    return int(module.get_device_properties(device).total_memory) // 4


def _may_compare(witness: Witness | None) -> bool:
    """True if compiled code, which may bring other content, learns of it before it computes."""
    return witness is not None and not isinstance(witness, Guard)


def _present(tensors: tuple[Tensor | None, ...]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


MEMO = Memo()

AGGREGATION = "aggregation"
"""The name of what :mod:`fastgraph.layers.constant` keeps, which goes when routes do."""

Value = TypeVar("Value")

REMEMBERING: dict[type, Callable[..., Any]] = {}
"""Replacements of :func:`remembered` for subclasses of tensors that have no memory of their own."""


def remembered(name: str, compute: Callable[..., Value], *given: object) -> Value:
    """``compute(*given)``: one result for as long as the tensors among ``given`` live unchanged.

    Args:
        name: tells it from what else is derived from these tensors.
        compute: a function of ``given`` alone, whose result has an attribute ``nbytes`` and does
            not refer to them.
        given: its arguments.
    """
    if is_recording():
        return compute(*given)
    parts: list[object] = [name]
    tensors = []
    for value in given:
        if isinstance(value, Tensor):
            if type(value) in REMEMBERING:
                result: Value = REMEMBERING[type(value)](name, compute, *given)
                return result
            if value.is_inference():
                return compute(*given)
            tensors.append(value)
            parts.append(tensor_key(value))
        else:
            parts.append(value)
    return recalled(tuple(parts), compute, given, tensors)


def recalled(
    key: tuple[object, ...],
    compute: Callable[..., Value],
    given: Sequence[object],
    tensors: Sequence[Tensor],
    held: Callable[[Value], Sequence[Tensor]] | None = None,
) -> Value:
    """:func:`remembered` under a key that says already which tensors are meant.

    Args:
        key: for nothing but ``compute`` and these arguments.
        compute: as for :func:`remembered`.
        given: its arguments.
        tensors: those among them.
        held: gives what the result holds of each of them, if all are indices.
    """
    known: Value | None = MEMO.get(key, *tensors)
    if known is None:
        with normal_mode():  # what is made here must still serve training
            known = compute(*given)
        MEMO.put(key, known, *tensors, held=None if held is None else held(known))
    return known
