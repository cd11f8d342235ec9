"""Python that begins with torch and PyG imported: forks of a process that has done nothing else.

To import both takes three seconds, and most programs of tests take less. What is told apart by a
fresh interpreter alone (its options, what is imported first, what torch reads while it is loaded)
is for ``tests.cli.commands``. Here nothing of fastgraph is imported, which is for the program.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import pickle
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from tests import collectives
from tests.cli.commands import environment

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch_geometric.nn"])

_SECONDS = 300.0


def call(
    function: Callable[..., None],
    *arguments: Any,
    folder: Path,
    variables: Mapping[str, str],
    out: Path,
    err: Path | None = None,
    timeout: float = _SECONDS,
) -> int | None:
    """Call a function in a process of its own.

    Args:
        function: can be imported, as its arguments can be pickled.
        arguments: of the function.
        folder: in which it works.
        variables: all of its environment.
        out: file for what it prints.
        err: file for its errors; by default the same.
        timeout: seconds after which it is killed.

    Returns:
        Its exit code, which is negative for a signal.
    """
    process = begin(function, *arguments, folder=folder, variables=variables, out=out, err=err)
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
    return process.exitcode


def begin(
    function: Callable[..., None],
    *arguments: Any,
    folder: Path,
    variables: Mapping[str, str],
    out: Path,
    err: Path | None = None,
) -> BaseProcess:
    """Start the child process of :func:`call`."""
    given = (function, arguments, folder, dict(variables), out, err)
    process = _CONTEXT.Process(target=_in_child, args=given)
    process.start()
    return process


def _in_child(
    function: Callable[..., None],
    arguments: tuple[Any, ...],
    folder: Path,
    variables: dict[str, str],
    out: Path,
    err: Path | None,
) -> None:
    gc.freeze()  # what was imported lives as long as the process, and need not be looked through
    for path, streams in ((out, [1] if err else [1, 2]), (err, [2])):
        if path is not None:
            with path.open("wb") as file:
                for stream in streams:
                    os.dup2(file.fileno(), stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    multiprocessing.set_start_method(None, force=True)  # of its children; that of its own is kept
    try:
        function(*arguments)
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out


def python(*words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """``python words...``: a script, ``-c`` or ``-m``, with the package importable."""
    return _finished(_run_program, words, cwd, variables)


def fastgraph(*words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """``python -m fastgraph words...``, fully enabled."""
    return python("-m", "fastgraph", *words, cwd=cwd, **variables)


def _finished(
    run: Callable[..., None], words: Sequence[str], cwd: Path, variables: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as name:
        out, err = Path(name, "out"), Path(name, "err")
        given = environment(**variables)
        code = call(run, *words, folder=cwd, variables=given, out=out, err=err)
        texts = (path.read_text(errors="backslashreplace") for path in (out, err))
        return subprocess.CompletedProcess(words, -9 if code is None else code, *texts)


def _run_program(*words: str) -> None:
    """Run a program as the interpreter does with these words."""
    sys.orig_argv[:] = [sys.executable, *words]
    first, *rest = words
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    entry = {"-c": "", "-m": os.getcwd()}.get(first, str(Path(first).resolve().parent))
    sys.path[:0] = [entry, *filter(None, paths)]
    try:
        if first == "-m":
            sys.argv[:] = rest
            sys.modules.pop(rest[0], None)
            runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
            return
        if first == "-c":
            code, sys.argv[:] = compile(rest[0], "<string>", "exec"), ["-c", *rest[1:]]
        else:
            code, sys.argv[:] = compile(Path(first).read_bytes(), first, "exec"), [*words]
            main.__file__ = first
        exec(code, vars(main))
    except Exception:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        sys.exit(1)


def become(words: Sequence[str], variables: Mapping[str, str]) -> NoReturn:
    """``python words...`` with these variables, in a process that was forked for it."""
    code = 1
    atexit._clear()  # what ends its parent
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    try:
        os.environ.clear()
        os.environ.update(variables)
        _run_program(*words)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    finally:
        atexit._run_exitfuncs()
        for file in (sys.stdout, sys.stderr):
            file.flush()
        os._exit(code)


def on_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    timeout: float = _SECONDS,
    diverges: bool = False,
) -> list[Any]:
    """The results of :func:`fastgraph.dist.ranks.spawning.run_on_ranks`.

    Args:
        function: see there, and so are ``world_size``, ``arguments`` and ``timeout``.
        diverges: ranks ask for different collectives on purpose.

    Raises:
        RankError: a rank failed, with what it wrote to standard error.
        AssertionError: ranks asked for different collectives.
    """
    from fastgraph.dist.ranks.spawning import pickler

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "call").write_bytes(pickler().dumps((sys.path, function, arguments)))
        calls = [(folder, 0.9 * timeout, rank, world_size) for rank in range(world_size)]
        _run_ranks(_rank, calls, Path.cwd(), dict(os.environ), timeout, diverges)
        return [
            pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world_size)
        ]


def launched(ranks: int, *words: str, cwd: Path, diverges: bool = False, **variables: str) -> str:
    """The output of ``python words...`` on rank 0 of ranks, as ``torchrun`` would start them.

    Raises:
        RankError: a rank failed, with what all printed up to then.
        AssertionError: ranks asked for different collectives, and not on purpose (``diverges``).
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
    # Forks have the hashes of one process. Without the variable each rank would start Python again.
    variables.setdefault("PYTHONHASHSEED", "0")
    given = environment(**variables, **place, WORLD_SIZE=str(ranks))
    return _run_ranks(_run_program, [words] * ranks, cwd, given, _SECONDS, diverges)[0]


def _run_ranks(
    function: Callable[..., None],
    calls: Sequence[tuple[Any, ...]],
    cwd: Path,
    variables: dict[str, str],
    timeout: float,
    diverges: bool,
) -> list[str]:
    """The output of each call of a function, one for each rank."""
    from fastgraph.dist.ranks.spawning import RankError

    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as issued:
        files = [Path(name, str(rank)) for rank in range(len(calls))]
        variables = {**variables, collectives.FOLDER: issued}

        def difference() -> str:
            return collectives.difference(collectives.read(Path(issued), len(calls)))

        ranks = [
            begin(
                *(_one_thread, function, *call),
                folder=cwd,
                variables={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                out=files[rank],
            )
            for rank, call in enumerate(calls)
        ]
        waiting = dict(enumerate(ranks))
        deadline = time.monotonic() + timeout
        try:
            while waiting:
                for rank, process in list(waiting.items()):
                    if process.exitcode is None and time.monotonic() < deadline:
                        continue
                    if process.exitcode != 0:
                        said = files[rank].read_text(errors="replace")
                        raise RankError(
                            f"rank {rank} ended with {process.exitcode}:\n{said}\n{difference()}"
                        )
                    del waiting[rank]
                time.sleep(0.02)
        finally:
            for process in waiting.values():
                process.kill()
                process.join()
        assert diverges or not difference(), difference()
        return [file.read_text(errors="replace") for file in files]


def _one_thread(function: Callable[..., None], *arguments: Any) -> None:
    import torch

    torch.set_num_threads(1)
    collectives.install()
    function(*arguments)


def _rank(folder: Path, timeout: float, rank: int, world_size: int) -> None:
    from fastgraph.dist.running import child

    for name in ("RANK", "LOCAL_RANK"):
        del os.environ[name]
    try:
        child.main(folder, timeout, rank, world_size)
    except Exception:
        # Which ends the process for certain: the group waits for collectives that never end.
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        sys.exit(1)
