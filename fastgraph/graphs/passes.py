"""Look-ups of an operator of a forward pass, for those of its backward pass.

Eager code keeps a graph between its passes by tensors of the graph's own. Compiled code has the
caller's tensors only, and compares their content with what is remembered at each call. That a
backward pass means the edges of its forward pass is known without: the forward operator also
returns a *token*, a small tensor that compilers keep for the backward pass as they keep any other.

Its memory owns what was looked up, which so lives until the backward pass has run, whatever is
forgotten in between. Where something has copied a token, and the original is gone, a checksum in it
tells whether edges are still those of the forward pass.
"""

from __future__ import annotations

import itertools
import os
import threading
from array import array
from collections.abc import Callable
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Value = TypeVar("Value")
Key = tuple[object, ...]

TOKEN_SHAPE = (2,)
"""A token has a number and a checksum, in int64."""

_UNKNOWN = 0


class Entry(Protocol):
    """A value that is remembered under a key."""

    storages: tuple[StorageWeakRef, ...]

    @property
    def content(self) -> tuple[int, ...] | None:
        """Bits that tell the content of the tensors it was made of, if they are known."""
        ...


class _Memory(array):  # type: ignore[type-arg]  # its buffer is that of a token
    entries: dict[Key, Any]


_BY_NUMBER: WeakValueDictionary[int, _Memory] = WeakValueDictionary()

# A token that comes from another process, in a file, must not name anything in this one.
_NUMBERS = itertools.count(int.from_bytes(os.urandom(8), "little") >> 2)


class _Thread(threading.local):
    """Of the operator that a thread computes for compiled code."""

    given: dict[Key, Any] | None = None
    found: dict[Key, Any] | None = None
    index: Tensor | None = None
    content: int = _UNKNOWN  # of the edges, when they were looked up last


_THREAD = _Thread()


def note(key: Key, entry: Entry, index: Tensor) -> None:
    """Take down that compiled code has looked up an entry.

    Args:
        key: of the entry.
        entry: confirmed, or made.
        index: the first tensor that the key was made of.
    """
    if _THREAD.found is not None:
        _THREAD.found[key] = entry
        if index is _THREAD.index:
            content = entry.content
            _THREAD.content = _UNKNOWN if content is None else hash(content) or 1


def is_given() -> bool:
    """True in a backward pass of compiled code whose forward pass has looked something up."""
    return bool(_THREAD.given)


def given_entry(key: Key) -> Any | None:
    """The entry of the forward pass under this key, if a backward pass of compiled code asks."""
    given = _THREAD.given
    if given is None:
        return None
    entry = given.get(key)
    # Of temporary tensors in the forward pass the memory may be that of others by now.
    if entry is None or any(storage.expired() for storage in entry.storages):
        return None
    return entry


def finding(
    implementation: Callable[..., Value], index: Tensor, arguments: tuple[Any, ...]
) -> tuple[Value, Tensor]:
    """The results of an operator, and the token of what it looked up.

    Args:
        implementation: of the operator.
        index: that of the arguments which names the edges.
        arguments: all of them.
    """
    result, found, content = _watched(implementation, index, arguments, None)
    memory = _Memory("q", (next(_NUMBERS), content))
    memory.entries = found
    _BY_NUMBER[memory[0]] = memory
    return result, torch.frombuffer(memory, dtype=torch.int64)


def given(
    operator: str,
    implementation: Callable[..., Value],
    token: Tensor,
    index: Tensor,
    arguments: tuple[Any, ...],
) -> Value:
    """The results of an operator with what :func:`finding` looked up for these edges.

    Args:
        operator: its name.
        implementation: of it.
        token: what :func:`finding` returned, or a copy.
        index: that of the arguments which names the edges.
        arguments: all of them.

    Raises:
        RuntimeError: that is gone, and the edges are other ones now.
    """
    number, expected = token.tolist()
    memory = _BY_NUMBER.get(number)
    entries = {} if memory is None else memory.entries
    result, _, content = _watched(implementation, index, arguments, entries)
    if _UNKNOWN != content != expected != _UNKNOWN:
        raise RuntimeError(
            f"{operator}: the edges needed for gradient computation have been modified between the "
            "forward pass and the backward pass of compiled code, which keeps no copy of them: "
            "expected what they were, found others"
        )
    return result


def _watched(
    implementation: Callable[..., Value],
    index: Tensor,
    arguments: tuple[Any, ...],
    entries: dict[Key, Any] | None,
) -> tuple[Value, dict[Key, Any], int]:
    """Results and look-ups of an operator, and the content of its edges, if that was seen."""
    thread = _THREAD
    before = thread.given, thread.found, thread.index, thread.content
    found: dict[Key, Any] = {}
    thread.given, thread.found, thread.index, thread.content = entries, found, index, _UNKNOWN
    try:
        return implementation(*arguments), found, thread.content
    finally:
        thread.given, thread.found, thread.index, thread.content = before
