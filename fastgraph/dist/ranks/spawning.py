"""Running a function on several ranks of this machine, from a process that is none of them."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TypeVar

Value = TypeVar("Value")

_SECONDS_BETWEEN_LOOKS = 0.05


class RankError(RuntimeError):
    """A rank that was started here has failed."""


def run_on_ranks(
    function: Callable[..., Value],
    world_size: int,
    *arguments: object,
    timeout: float = 600.0,
    prefixes: Sequence[Sequence[str]] | None = None,
) -> list[Value]:
    """The values that a function returns on new processes, which are the ranks of one world.

    Each has one thread, and calls :func:`fastgraph.dist.init` before the function.

    Args:
        function: is pickled with its arguments; with ``cloudpickle`` installed it need not be
            importable.
        world_size: the number of ranks.
        arguments: of the function.
        timeout: seconds, after which all are ended.
        prefixes: words before the command of each rank, which must replace themselves by it, such
            as ``ip netns exec NAME``.

    Returns:
        The results in the order of ranks.

    Raises:
        ValueError: ``world_size`` is not above 0, or there is not one prefix for each rank.
        RankError: a rank failed or took too long; with what it wrote to standard error.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be an integer above 0, got {world_size}")
    before: Sequence[Sequence[str]] = [()] * world_size if prefixes is None else prefixes
    if len(before) != world_size:
        raise ValueError(f"prefixes must be {world_size}, one for each rank, got {len(before)}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "call").write_bytes(pickler().dumps((sys.path, function, arguments)))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        # Ranks say where they wait before they are ended.
        child = [sys.executable, "-m", "fastgraph.dist.running.child", name, str(0.9 * timeout)]
        processes = [
            subprocess.Popen(
                [*before[rank], *child, str(rank), str(world_size)],
                env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stderr=(folder / f"errors-{rank}").open("wb"),
            )
            for rank in range(world_size)
        ]
        try:
            _wait(processes, folder, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [
            pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world_size)
        ]


def pickler() -> ModuleType:
    """The module that pickles functions: ``cloudpickle`` if it is installed, else ``pickle``."""
    try:
        import cloudpickle
    except ModuleNotFoundError:
        return pickle
    found: ModuleType = cloudpickle
    return found


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, deadline: float) -> None:
    waiting = dict(enumerate(processes))
    while waiting:
        for rank, process in list(waiting.items()):
            code = process.poll()
            if code is None:
                continue
            del waiting[rank]
            if code != 0:
                raise RankError(f"rank {rank} ended with {code}:\n{_errors(folder, rank)}")
        if waiting and time.monotonic() > deadline:
            errors = "".join(f"\nrank {rank}:\n{_errors(folder, rank)}" for rank in waiting)
            raise RankError(f"ranks {sorted(waiting)} did not end in time{errors}")
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _errors(folder: Path, rank: int) -> str:
    return (folder / f"errors-{rank}").read_text(errors="replace").strip()
