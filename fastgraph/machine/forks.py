"""Locks that a child of ``os.fork()`` can take, whatever other threads of its parent were doing."""

from __future__ import annotations

import os
import threading


def lock_across_forks() -> threading.RLock:
    """A lock of something that lives as long as the process.

    A child made by ``os.fork()``, as a worker of a data loader is, has no other thread of its
    parent, and would wait forever for what one of these held. So a fork waits until the lock is
    free. Locks are taken from the latest one made to the first, as modules that import others make
    theirs after these: whoever holds two must have taken the later one first.

    The same thread can take it twice: handlers of signals and finalizers run while it is held.
    """
    lock = threading.RLock()
    os.register_at_fork(
        before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
    )
    return lock
