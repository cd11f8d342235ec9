"""Running a program in place of ``python -m fastgraph``, as plain python would run it."""

from __future__ import annotations

import builtins
import importlib.machinery
import io
import os
import pkgutil
import runpy
import sys
import types
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from fastgraph.cli.children import enable_in_children
from fastgraph.cli.ending import print_at_exit
from fastgraph.settings import NOT_ENABLED, Settings

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

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of ``fastgraph.enable()``."""
        return {"backend": self.backend, "strict": self.strict, "min_edges": self.min_edges}


def run(target: Target, options: Options) -> None:
    """Enable fastgraph and run ``target`` as ``__main__``.

    Whatever the program raises comes out, ``SystemExit`` included, so that the interpreter ends as
    it would after running the program itself; only our frames are missing from the traceback.
    """
    # Before torch is imported, so that imports see the path that they would see without us.
    container = _set_path_and_argv(target)
    if target.kind == "script" and not container:
        _check_readable(target.value)
    _enable(options)
    main_module = _fresh_main()
    try:
        if target.kind == "module":
            runpy._run_module_as_main(target.value)  # type: ignore[attr-defined]
        elif container:
            runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        else:
            exec(_code(target, main_module), main_module.__dict__)
    except BaseException as error:
        _hide_own_frames(error)
        raise


def _set_path_and_argv(target: Target) -> bool:
    """What python does before it starts; true for a directory or archive with a ``__main__``."""
    first = {"module": "-m", "code": "-c"}.get(target.kind, target.value)
    sys.argv[:] = [first, *target.arguments]
    container = target.kind == "script" and pkgutil.get_importer(target.value) is not None
    if container:
        entry = _absolute(target.value)
    elif target.kind == "script":
        entry = os.path.dirname(os.path.realpath(target.value))
    elif target.kind == "module":
        entry = os.getcwd()
    else:
        entry = ""
    if not sys.flags.safe_path:
        sys.path[0] = entry
    elif container:
        sys.path.insert(0, entry)
    return container


def _absolute(path: str) -> str:
    """An absolute path in python's spelling of ``__file__``, which is not normalised."""
    return os.path.join(os.getcwd(), path)


def _check_readable(path: str) -> None:
    try:
        with open(path, "rb"):
            pass
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
        if options.report:
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
    enable_in_children(options.arguments)
    if options.report:
        print_at_exit(lambda: str(fastgraph.status()))


def _exit(message: str, code: int) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(code)


def _fresh_main() -> types.ModuleType:
    """A new module in place of ours, with the attributes that python's own starts with."""
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    module.__loader__ = importlib.machinery.BuiltinImporter
    if sys.version_info < (3, 14):
        module.__annotations__ = {}
    sys.modules["__main__"] = module
    if "__mp_main__" in sys.modules:  # an alias that multiprocessing has made, which torch imports
        sys.modules["__mp_main__"] = module
    return module


def _code(target: Target, main_module: types.ModuleType) -> types.CodeType:
    if target.kind == "code":
        # python adds the line's end, without which a trailing comment or block would differ.
        return _compile(target.value + "\n", "<string>")
    if target.kind == "stdin":
        main_module.__file__ = "<stdin>"
        main_module.__dict__["__cached__"] = None
        return _compile(sys.stdin.buffer.read(), "<stdin>")
    path = _absolute(target.value)
    main_module.__file__ = path
    main_module.__dict__["__cached__"] = None
    with io.open_code(path) as file:
        bytecode: types.CodeType | None = pkgutil.read_code(file)
        if bytecode is not None:
            main_module.__loader__ = importlib.machinery.SourcelessFileLoader("__main__", path)
            return bytecode
        file.seek(0)
        main_module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
        return _compile(file.read(), path)


def _compile(source: str | bytes, filename: str) -> types.CodeType:
    # Our own `from __future__` must not reach the program.
    return compile(source, filename, "exec", dont_inherit=True)


def _hide_own_frames(error: BaseException) -> None:
    """Have the interpreter's report of ``error`` start at the program's first frame."""
    shown = error.__traceback__
    while shown is not None and shown.tb_frame.f_globals is globals():
        shown = shown.tb_next
    report = sys.excepthook

    def excepthook(
        kind: type[BaseException], value: BaseException, trace: types.TracebackType | None
    ) -> None:
        if value is error:
            value, trace = value.with_traceback(shown), shown
        report(kind, value, trace)

    sys.excepthook = excepthook
