"""Programs in a control group with so much memory, pages of files included, and what they took."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path("/sys/fs/cgroup/memory")
"""Of version 1 of control groups, whose groups have files of their own for memory."""


def reason_without() -> str | None:
    """Why no group can be made here; ``None`` if one can."""
    if not (ROOT / "memory.limit_in_bytes").exists():
        return f"{ROOT} has no memory.limit_in_bytes: no control groups of version 1"
    if not os.access(ROOT, os.W_OK) or os.geteuid() != 0:
        return f"{ROOT} may not be written"
    return None


@contextmanager
def memory_group(limit: int | None) -> Iterator[Path | None]:
    """The folder of a new group, which is removed in the end; ``None`` without a limit."""
    if limit is None:
        yield None
        return
    group = ROOT / f"fastgraph-benchmark-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit))
        yield group
    finally:
        group.rmdir()


def measured(command: list[str], group: Path | None, env: dict[str, str]) -> dict[str, Any]:
    """Run a program; its output, seconds and bytes.

    ``anonymous`` is the most of the program's own, by the kernel's account, looked at 50 times a
    second; ``read`` the bytes that came from the disk, ``usage`` the most that was charged to the
    group, with pages of files.
    """

    def join() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    begin = time.perf_counter()
    peak = {"anonymous": 0}
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, text=True, preexec_fn=join
    ) as child:
        watching = threading.Thread(target=_watch, args=(child.pid, peak))
        watching.start()
        assert child.stdout is not None
        output = child.stdout.read()
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        watching.join()
    return {
        "code": child.returncode,
        "output": output,
        "wall": time.perf_counter() - begin,
        "processor": used.ru_utime + used.ru_stime,
        "read": used.ru_inblock * 512,
        "major_faults": used.ru_majflt,
        **peak,
        "usage": int((group / "memory.max_usage_in_bytes").read_text()) if group else None,
    }


def _watch(pid: int, peak: dict[str, int]) -> None:
    status = Path(f"/proc/{pid}/status")
    while True:
        try:
            lines = status.read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            return
        found = [int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon")]
        if not found:  # it has ended
            return
        peak["anonymous"] = max(peak["anonymous"], found[0])
        time.sleep(0.02)


def drop_pages(folder: Path) -> None:
    """Have the system forget the files of a folder, so that whoever reads them is charged."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
