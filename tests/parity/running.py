"""Running a suite in processes that may die or hang: both are outcomes of a case."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from tests.parity.records import Event, finished, read, under_way, write
from tests.parity.suites import Suite

ROOT = Path(__file__).parents[2]
WAYS = ("plain", "fastgraph")
_POLL = 0.2


def run_tests(
    suite: Suite, source: Path, way: str, parts: Sequence[str], record: Path, seconds: float
) -> None:
    """Run the tests that a record has no outcome of, in one process as long as none dies.

    Args:
        suite: which tests.
        source: its unpacked sources.
        way: ``"plain"`` or ``"fastgraph"``.
        parts: files and folders.
        record: the file of outcomes, which grows.
        seconds: after which a case is ended, and counts as timed out; ten times that for what
            comes between cases.

    Raises:
        RuntimeError: a process died outside of any case, or before the first.
    """
    command = [sys.executable, "-m", "pytest", *suite.options, "-p", "tests.parity.recorder"]
    command += ["-p", "no:cacheprovider", "-p", "no:randomly", "--continue-on-collection-errors"]
    command += ["--record", str(record.resolve())]
    if way == "fastgraph":
        command += ["--fastgraph"]
    elif suite.name == "dgl":
        command += ["--fix-import"]
    log = record.with_suffix(".log")
    while True:
        before = len(finished(read(record)))
        with log.open("ab") as output:
            code = _watched([*command, *parts], suite, source, record, seconds, output)
        case = under_way(read(record))
        if case is None:
            if code in (0, 1, 5):  # passed, failed, nothing left
                return
            raise RuntimeError(f"{suite.name}, {way}: ended with {code} outside of a case: {log}")
        if code is None:
            write(record, Event(case, "timed out", f"after {seconds:g} s"))
        else:
            write(record, Event(case, "crashed", _named(code)))
        if len(finished(read(record))) == before:
            raise RuntimeError(f"{suite.name}, {way}: {case} ends and is run again: {log}")


def _watched(
    command: list[str],
    suite: Suite,
    source: Path,
    record: Path,
    seconds: float,
    output: IO[bytes],
) -> int | None:
    """The exit code of a process; ``None`` where a case took too long."""
    process = subprocess.Popen(
        command,
        cwd=source,
        env=environment(suite, source),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,  # with what it starts, it ends as a whole
    )
    started, size = time.monotonic(), -1
    try:
        while True:
            try:
                return process.wait(_POLL)
            except subprocess.TimeoutExpired:
                pass
            now = record.stat().st_size if record.exists() else 0
            if now != size:
                started, size = time.monotonic(), now
            waited = time.monotonic() - started
            # Between cases modules are imported, which is no case's fault.
            if waited > seconds and (under_way(read(record)) or waited > 10 * seconds):
                return None
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_examples(
    suite: Suite,
    source: Path,
    way: str,
    scripts: Sequence[str],
    record: Path,
    seconds: float,
    options: Sequence[str] = (),
) -> None:
    """Run the scripts that a record has no outcome of, each in a process of its own.

    Args:
        suite: whose examples.
        source: its unpacked sources.
        way: as for :func:`run_tests`.
        scripts: each a path within the sources, with arguments after it.
        record: as for :func:`run_tests`.
        seconds: after which a script is ended.
        options: of ``tests.parity.seeded``.
    """
    for case in scripts:
        if case in finished(read(record)):
            continue
        script, *arguments = case.split()
        runner = ["-m", "fastgraph", "--min-edges", "0"] if way == "fastgraph" else []
        process = subprocess.Popen(
            [
                *(sys.executable, *runner, "-m", "tests.parity.seeded", *options),
                *(Path(script).name, *arguments),
            ],
            cwd=(source / script).parent,
            env=environment(suite, source) | {"PYTHONHASHSEED": "0", "TQDM_DISABLE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            write(record, Event(case, "timed out", f"after {seconds:g} s"))
            continue
        finally:
            _end(process)
        if process.returncode == 0:
            write(record, Event(case, "passed", "", without_times(out.decode(errors="replace"))))
        else:
            said = err.decode(errors="replace").strip().splitlines() or [""]
            outcome = "failed" if process.returncode > 0 else "crashed"
            why = said[-1] if process.returncode > 0 else _named(process.returncode)
            write(record, Event(case, outcome, why))


_TIMES = re.compile(r"(?i)(time[^\n:=]*[:=]\s*)\d[\d.e-]*\s*\w*|\b\d[\d.]*\s?(ms|s|seconds|it/s)\b")


def without_times(text: str) -> str:
    """A program's output without numbers of seconds, which differ from run to run."""
    return _TIMES.sub(lambda found: f"{found[1] or ''}...", text)


def environment(suite: Suite, source: Path) -> dict[str, str]:
    """Our own environment, in which our package and what the tests expect can be imported."""
    paths = [*(str(source / path) for path in suite.paths), str(ROOT)]
    own = {k: v for k, v in os.environ.items() if not k.startswith(("FASTGRAPH", "PYTHONPATH"))}
    return {**own, "DGLBACKEND": "pytorch", "PYTHONPATH": os.pathsep.join(paths)}


def _named(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
