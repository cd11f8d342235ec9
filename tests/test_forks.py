"""A child of ``os.fork()`` has no other thread of its parent, and must not wait for one's locks."""

from __future__ import annotations

import ast
import gc
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastgraph.graphs.memo import MEMO
from fastgraph.layers import constant
from fastgraph.machine import forks
from fastgraph.machine.forks import lock_across_forks
from fastgraph.machine.memory import POOL
from fastgraph.profiling.profile import Profile
from fastgraph.pyg.traced import KNOWN
from fastgraph.routing import observing, status
from fastgraph.routing.switch import SWITCH

PACKAGE = Path(__file__).parents[1] / "fastgraph"

LOCKS: dict[str, Callable[[], Any]] = {
    "a new one": lock_across_forks,
    "graphs": lambda: MEMO._lock,
    "first uses": lambda: constant._SIGHTS._lock,
    "results": lambda: POOL._lock,
    "messages that are traced": lambda: KNOWN._lock,
    "counts": lambda: status._lock,
    "listeners": lambda: observing._lock,
    "routes": lambda: SWITCH._lock,
}


def _exit_code(child: Callable[[], int]) -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(child())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("name", LOCKS)
def test_a_child_can_take_what_another_thread_held(name: str) -> None:
    lock, is_held = LOCKS[name](), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            threading.Event().wait(0.2)  # while the process forks

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    assert _exit_code(lambda: 0 if lock.acquire(timeout=1) else 1) == 0
    thread.join()


def test_a_thread_forks_while_it_holds_a_lock() -> None:
    lock = lock_across_forks()
    with lock:
        assert _exit_code(lambda: 0 if lock.acquire(timeout=1) else 1) == 0


def test_a_profile_leaves_nothing_behind() -> None:
    """Whoever takes many in one process does not make its forks slower."""
    gc.collect()
    before = len(forks._LOCKS)
    kept = [Profile() for _ in range(10)]
    assert len(forks._LOCKS) == before + 10
    lock = weakref.ref(kept[0]._lock)
    del kept
    gc.collect()
    assert lock() is None and len(forks._LOCKS) == before


def test_locks_are_taken_from_the_latest_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    class Lock:
        def __init__(self, name: str) -> None:
            self.name = name

        def acquire(self) -> None:
            taken.append(self.name)

        def release(self) -> None:
            taken.append(f"not {self.name}")

    locks = [Lock("first"), Lock("second")]
    monkeypatch.setattr(forks, "_LOCKS", dict(enumerate(locks)))
    assert _exit_code(lambda: 0 if len(taken) == 4 else 1) == 0
    assert taken[:2] == ["second", "first"] and len(taken) == 4


def test_every_lock_is_one_that_forks_wait_for() -> None:
    made = {
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "threading"
        and node.attr in ("Lock", "RLock", "Condition", "Semaphore")
        if path != PACKAGE / "machine" / "forks.py"
    }
    assert not made
