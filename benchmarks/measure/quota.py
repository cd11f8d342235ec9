"""A share of a core for processes: by a control group, or else by stopping and continuing it."""

from __future__ import annotations

import contextlib
import itertools
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

_WEIGHT, _SHARES = "10000", "262144"
"""The largest there are, of the second and of the first version of control groups."""

_numbers = itertools.count()

Quota = tuple[str, str]
"""The kind, ``"cgroup v2"``, ``"cgroup v1"`` or ``"stopped"``, and a path or numbers."""


@contextlib.contextmanager
def quotas_of(share: float, count: int, period: int) -> Iterator[list[Quota]]:
    """As many quotas of one share and period, each for a process."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(quota_of(share, period)) for _ in range(count)]


@contextlib.contextmanager
def quota_of(share: float, period: int = _PERIOD) -> Iterator[Quota]:
    """How a process may limit itself to a share of a core, for :func:`limit_this_process`.

    Args:
        share: of a core.
        period: microseconds, in each of which it gets its share. Processes that wait for each
            other want it short, as any of them may have to wait for the next one.
    """
    made = _group(share, period)
    if made is None:
        yield "stopped", f"{share} {period}"
        return
    kind, folder = made
    try:
        yield kind, str(folder)
    finally:
        _remove(folder)


def kept_open(quota: Quota) -> tuple[list[str], Quota]:
    """The words before a command that has another ``/sys``, and the quota as it will see it.

    ``ip netns exec`` mounts ``/sys`` anew, without control groups.
    """
    kind, value = quota
    if kind == "stopped":
        return [], quota
    return ["sh", "-c", 'exec 9<"$0"; exec "$@"', value], (kind, "/proc/self/fd/9")


def _group(share: float, period: int) -> tuple[str, Path] | None:
    name = f"fastgraph-benchmark-{os.getpid()}-{next(_numbers)}"
    quota = int(share * period)
    is_second = "cpu" in _text(_ROOT / "cgroup.controllers").split()
    kind, folder = ("cgroup v2", _ROOT / name) if is_second else ("cgroup v1", _ROOT / "cpu" / name)
    try:
        folder.mkdir()
        # A share that is there whatever else this machine does.
        if is_second:
            (folder / "cpu.weight").write_text(_WEIGHT)
            (folder / "cpu.max").write_text(f"{quota} {period}")
        else:
            (folder / "cpu.shares").write_text(_SHARES)
            (folder / "cpu.cfs_period_us").write_text(str(period))
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


def limit_this_process(quota: Quota) -> None:
    """Obey a quota from now on, until this process ends."""
    kind, value = quota
    if kind != "stopped":
        (Path(value) / "cgroup.procs").write_text(str(os.getpid()))
        return
    subprocess.Popen([sys.executable, __file__, str(os.getpid()), *value.split()])


def _stop_and_go(process: int, share: float, period: float) -> None:
    """Stop a process for the rest of each period (seconds), for as long as it lives."""
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(process, signal.SIGCONT)
            time.sleep(share * period)
            os.kill(process, signal.SIGSTOP)
            time.sleep((1 - share) * period)


if __name__ == "__main__":
    _stop_and_go(int(sys.argv[1]), float(sys.argv[2]), 1e-6 * float(sys.argv[3]))
