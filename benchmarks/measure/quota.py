"""A share of a core for a process: by a control group, or else by stopping and continuing it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_PERIOD = 100_000
"""Microseconds, the default of Linux."""


@contextlib.contextmanager
def quota_of(share: float) -> Iterator[tuple[str, str]]:
    """How a process may limit itself to a share of a core, for :func:`limit_this_process`.

    Yields the kind, ``"cgroup v2"``, ``"cgroup v1"`` or ``"stopped"``, and a path or a number.
    """
    made = _group(share)
    if made is None:
        yield "stopped", str(share)
        return
    kind, folder = made
    try:
        yield kind, str(folder)
    finally:
        _remove(folder)


def _group(share: float) -> tuple[str, Path] | None:
    name = f"fastgraph-benchmark-{os.getpid()}"
    quota = int(share * _PERIOD)
    is_second = "cpu" in _text(_ROOT / "cgroup.controllers").split()
    kind, folder = ("cgroup v2", _ROOT / name) if is_second else ("cgroup v1", _ROOT / "cpu" / name)
    try:
        folder.mkdir()
        if is_second:
            (folder / "cpu.max").write_text(f"{quota} {_PERIOD}")
        else:
            (folder / "cpu.cfs_period_us").write_text(str(_PERIOD))
            (folder / "cpu.cfs_quota_us").write_text(str(quota))
    except OSError:
        with contextlib.suppress(OSError):
            folder.rmdir()
        return None
    return kind, folder


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _remove(folder: Path) -> None:
    """A group can be removed once its processes have ended, which takes a moment."""
    for _ in range(50):
        try:
            folder.rmdir()
        except OSError:
            time.sleep(0.1)
        else:
            return


def limit_this_process(quota: tuple[str, str]) -> None:
    """Obey a quota from now on, until this process ends."""
    kind, value = quota
    if kind != "stopped":
        (Path(value) / "cgroup.procs").write_text(str(os.getpid()))
        return
    subprocess.Popen([sys.executable, __file__, str(os.getpid()), value])


def _stop_and_go(process: int, share: float) -> None:
    """Stop a process for the rest of each period, for as long as it lives."""
    period = _PERIOD * 1e-6
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(process, signal.SIGCONT)
            time.sleep(share * period)
            os.kill(process, signal.SIGSTOP)
            time.sleep((1 - share) * period)


if __name__ == "__main__":
    _stop_and_go(int(sys.argv[1]), float(sys.argv[2]))
