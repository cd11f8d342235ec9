"""Running a program in place of ``python -m fastgraph``, as plain python would run it."""

from __future__ import annotations

import builtins
import importlib.machinery
import os
import pkgutil
import runpy
import sys
import types
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from fastgraph.cli import profiled
from fastgraph.cli.children import enable_in_children
from fastgraph.cli.execution import run_file, run_stdin, run_string
from fastgraph.cli.shadowing import forget_shadowed
from fastgraph.ending import print_at_exit
from fastgraph.interpreter import FIRST_ENTRY, working_directory
from fastgraph.settings import NOT_ENABLED, Settings, variables

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""The variable by which torch is asked for huge pages, read when torch is loaded."""


@dataclass(frozen=True)
class Target:
    """The program: a script's path, a module's name, code, or standard input (``-`` or empty)."""

    kind: Literal["script", "module", "code", "stdin"]
    value: str
    arguments: list[str]


@dataclass(frozen=True)
class Options:
    """Options given before the program; ``None`` leaves a choice to the environment."""

    report: bool = False
    backend: str | None = None
    strict: bool | None = None
    min_edges: int | None = None
    verbose: bool | None = None
    profile: profiled.Outputs | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of ``fastgraph.enable()``."""
        return {
            "backend": self.backend,
            "strict": self.strict,
            "min_edges": self.min_edges,
            "verbose": self.verbose,
        }

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that say the same."""
        names = variables()
        return {
            names[argument]: str(int(value) if isinstance(value, bool) else value)
            for argument, value in self.arguments.items()
            if value is not None
        }


def run(target: Target, options: Options) -> None:
    """Enable fastgraph and run ``target`` as ``__main__``.

    The process ends as it would after running the program itself: what the program raises is
    reported without our frames, and the exit status is the same.

    Raises:
        SystemExit: the program ended with an exception, or could not be started.
    """
    # Before torch is imported, so that imports see the path that they would see without us.
    entry, container = _set_path_and_argv(target)
    is_file = target.kind == "script" and not container
    descriptor = _open(target.value) if is_file else None
    _enable(options)
    if entry is not None:
        forget_shadowed(entry)
    _fresh_main()
    if descriptor is not None:
        succeeded = run_file(descriptor, _absolute(target.value))
    elif target.kind == "stdin":
        succeeded = run_stdin()
    elif target.kind == "code":
        succeeded = run_string(_encoded(target.value))
    else:
        _run_module(target.value if target.kind == "module" else None)
        succeeded = True
    # Told to inspect, python goes on with a prompt, and ends as that does.
    if not succeeded and not sys.flags.inspect:
        sys.exit(1)


def _run_module(name: str | None) -> None:
    """Run a module, or without a name the ``__main__`` of the first entry of the path."""
    try:
        if name is None:
            runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        else:
            runpy._run_module_as_main(name)  # type: ignore[attr-defined]
    except BaseException as error:
        _hide_own_frames(error)
        raise


def _encoded(code: str) -> bytes:
    try:
        # python adds the line's end, without which a trailing comment or block would differ.
        return f"{code}\n".encode()
    except UnicodeEncodeError as error:
        _say("Unable to decode the command from the command line:")
        _hide_own_frames(error)
        raise


def _set_path_and_argv(target: Target) -> tuple[str | None, bool]:
    """Set ``sys.path`` and ``sys.argv`` as python does before it starts a program.

    Returns:
        The directory or archive whose modules the program sees before all others, if any, and
        whether the program is its ``__main__``.
    """
    first = {"module": "-m", "code": "-c"}.get(target.kind, target.value)
    sys.argv[:] = [first, *target.arguments]
    container = target.kind == "script" and pkgutil.get_importer(target.value) is not None
    entry: str | None
    if container:
        entry = _absolute(target.value)
    elif sys.flags.safe_path:
        entry = None
    elif target.kind == "script":
        entry = _folder(target.value)
    elif target.kind == "module":
        entry = working_directory()
    else:
        entry = ""
    FIRST_ENTRY.replace(entry)
    return entry, container


def _folder(script: str) -> str:
    """The directory of a script, links followed."""
    try:
        script = os.path.realpath(script, strict=True)
    except OSError:  # a pipe, whose link leads nowhere, or the working directory was removed
        if os.path.islink(script):
            script = os.path.join(os.path.dirname(script), os.readlink(script))
    return os.path.dirname(script)


def _absolute(path: str) -> str:
    """An absolute path in python's spelling of ``__file__``, which is not normalised."""
    folder = working_directory()
    if folder is None:
        return path
    return folder if path in ("", ".") else os.path.join(folder, path)


def _open(path: str) -> int:
    """Open the script, once: a pipe cannot be read twice."""
    try:
        return os.open(path, os.O_RDONLY)
    except OSError as error:
        _exit(
            f"{sys.executable}: can't open file {_absolute(path)!r}: "
            f"[Errno {error.errno}] {error.strerror}",
            2,
        )


def _enable(options: Options) -> None:
    try:
        switched_off = Settings.from_environment().enabled is False
    except ValueError as error:
        _exit(f"fastgraph: {error}", 2)
    if switched_off:
        if options.report or options.profile:
            print_at_exit(lambda: f"{NOT_ENABLED}\n")
        return
    # A fresh tensor of 100 MB then costs 50 page faults instead of 25,000, which take longer than
    # computing it.
    os.environ.setdefault(HUGE_PAGES, "1")
    try:
        import fastgraph

        fastgraph.enable(**options.arguments)
    except ValueError as error:
        _exit(f"fastgraph: {error}", 2)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        _exit(
            f"fastgraph cannot be enabled: {type(error).__name__}: {error}\n"
            "`python -m fastgraph info` describes the installation; "
            "FASTGRAPH=0 runs the program without fastgraph.",
            1,
        )
    enable_in_children(options.variables)
    if options.report:
        print_at_exit(lambda: str(fastgraph.status()))
    if options.profile is not None:
        profiled.begin(options.profile)


def _exit(message: str, code: int) -> NoReturn:
    _say(message)
    sys.exit(code)


def _say(message: str) -> None:
    if sys.stderr is not None:  # print() would take standard output instead
        print(message, file=sys.stderr)


def _fresh_main() -> None:
    """Put a new module in place of ours, with the attributes that python's own starts with."""
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    module.__loader__ = importlib.machinery.BuiltinImporter
    if sys.version_info < (3, 14):
        module.__annotations__ = {}
    sys.modules["__main__"] = module
    if "__mp_main__" in sys.modules:  # an alias that multiprocessing has made, which torch imports
        sys.modules["__mp_main__"] = module


def _hide_own_frames(error: BaseException) -> None:
    """Have the interpreter's report of ``error`` start at the program's first frame."""
    shown = error.__traceback__
    while shown is not None and shown.tb_frame.f_globals is globals():
        shown = shown.tb_next
    report: Any = getattr(sys, "excepthook", None)
    if report is None:  # the program's doing: python says so, and reports all frames
        return

    def excepthook(
        kind: type[BaseException], value: BaseException, trace: types.TracebackType | None
    ) -> None:
        sys.excepthook = report
        if value is error:
            value, trace = value.with_traceback(shown), shown
            sys.last_traceback = shown
        report(kind, value, trace)

    sys.excepthook = excepthook
