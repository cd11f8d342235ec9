"""Outcomes of many calls, in forks of this process that may die or hang."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import pickle
import resource
import select
import signal
import struct
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import fastgraph
from tests.outcomes import Outcome, outcome
from tests.wrong_calls.cases import Case

_LENGTH = struct.Struct("q")
_MEMORY = 4 * 2**30  # bytes beyond what a fork begins with
_PATIENCE = 100  # times as long a call may take that waits for a processor

Ended = Outcome | str
"""How a call ended; as a text, that its process did."""


def warm_up() -> None:
    """Load what forks would load one by one, and let none of them copy what is collected."""
    with fastgraph.enabled():
        pass
    gc.disable()
    gc.freeze()


def outcomes(
    module: nn.Module,
    cases: Sequence[Case],
    seconds: float,
    *,
    routed: bool,
    isolated: bool = False,
) -> list[Ended]:
    """How calls end, one after another in one process as long as none of them ends it.

    Args:
        module: the layer, of which each call gets a copy.
        cases: the calls.
        seconds: of processor time after which a call is ended.
        routed: with fastgraph; ``False``: upstream alone.
        isolated: whether each call gets a process of its own.
    """
    found: list[Ended] = []
    while len(found) < len(cases):
        end = len(found) + 1 if isolated else len(cases)
        some = cases[len(found) : end]
        got, ending = _read(
            lambda write, some=some: _run(module, some, seconds, routed, write), seconds
        )
        found += got
        if len(got) < len(some):
            found.append(ending)
    return found


def _run(
    module: nn.Module,
    cases: Sequence[Case],
    seconds: float,
    routed: bool,
    write: Callable[[Any], None],
) -> None:
    torch.set_num_threads(1)  # a fork has no threads but its own
    ways = fastgraph.enabled(min_edges=0) if routed else contextlib.nullcontext()
    with ways, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in cases:
            end = math.ceil(time.process_time() + seconds)
            resource.setrlimit(resource.RLIMIT_CPU, (end, resource.RLIM_INFINITY))
            torch.manual_seed(0)
            write(outcome(module, case.call, case.edit))


def _read(
    work: Callable[[Callable[[Any], None]], None], seconds: float
) -> tuple[list[Outcome], str]:
    """The outcomes that a fork writes, and how it ended."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _in_child(work, reading, writing)
    os.close(writing)
    found: list[Outcome] = []
    ending = "ended"
    with os.fdopen(reading, "rb") as pipe:
        while (head := _bytes(pipe.fileno(), _LENGTH.size, seconds)) is not None and head:
            (length,) = _LENGTH.unpack(head)
            body = _bytes(pipe.fileno(), length, seconds)
            if not body:
                break
            found.append(pickle.loads(body))
        if head is None:
            os.kill(child, signal.SIGKILL)
            ending = f"ran for more than {seconds:g} s"
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if head is not None and code != 0:
        ending = f"died of {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if code == -signal.SIGXCPU:
            ending = f"ran for more than {seconds:g} s"
    return found, ending


def _bytes(pipe: int, count: int, seconds: float) -> bytes | None:
    """As many bytes; none at the end; ``None`` where the time is up before."""
    found, end = b"", time.monotonic() + _PATIENCE * seconds
    while len(found) < count:
        ready, _, _ = select.select([pipe], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return None
        part = os.read(pipe, count - len(found))
        if not part:
            return b""
        found += part
    return found


def _in_child(work: Callable[[Callable[[Any], None]], None], reading: int, writing: int) -> None:
    code = 1
    try:
        os.close(reading)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with open("/proc/self/statm") as statm:
            now = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + _MEMORY, now + _MEMORY))

        def write(value: Any) -> None:
            body = pickle.dumps(value)
            message = memoryview(_LENGTH.pack(len(body)) + body)
            while message:
                message = message[os.write(writing, message) :]

        work(write)
        code = 0
    finally:
        os._exit(code)
