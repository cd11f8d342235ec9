"""Locks that a child of ``os.fork()`` can take, whatever other threads of its parent were doing."""

from __future__ import annotations

import itertools
import os
import threading
from weakref import WeakValueDictionary

_LOCKS: WeakValueDictionary[int, threading.RLock] = WeakValueDictionary()  # the first made first
_NUMBERS = itertools.count()


def lock_across_forks() -> threading.RLock:
    """A lock that forks wait for.

    A child made by ``os.fork()``, as a worker of a data loader is, has no other thread of its
    parent, and would wait forever for what one of these held. So a fork waits until the lock is
    free. Locks are taken from the latest one made to the first, as modules that import others make
    theirs after these: whoever holds two must have taken the later one first.

    The same thread can take it twice: handlers of signals and finalizers run while it is held.
    """
    lock = threading.RLock()
    _LOCKS[next(_NUMBERS)] = lock
    return lock


class _Thread(threading.local):
    """The locks that a thread has taken to fork."""

    held: tuple[threading.RLock, ...] = ()


_THREAD = _Thread()


def _take_all() -> None:
    locks = tuple(reversed(list(_LOCKS.values())))
    for lock in locks:
        lock.acquire()
    _THREAD.held = locks


def _release_all() -> None:
    locks, _THREAD.held = _THREAD.held, ()
    for lock in locks:
        lock.release()


# Once: what is registered stays for as long as the process lives.
os.register_at_fork(before=_take_all, after_in_parent=_release_all, after_in_child=_release_all)
