"""Running source by the functions of python's C API by which ``python`` itself runs it.

They read a file, pipe or terminal as python does, fill in what it adds to ``__main__``, print a
traceback that starts at the program, and end the process where the program raises ``SystemExit``.
``compile()`` and ``exec()`` differ in all of these.
"""

from __future__ import annotations

import ctypes
import os
import sys


class _Flags(ctypes.Structure):
    """``PyCompilerFlags``."""

    _fields_ = (("flags", ctypes.c_int), ("feature_version", ctypes.c_int))


_IGNORE_COOKIE = 0x0800  # PyCF_IGNORE_COOKIE: a string is UTF-8, whatever encoding it declares

_libc = ctypes.CDLL(None)
_libc.fdopen.argtypes = [ctypes.c_int, ctypes.c_char_p]
_libc.fdopen.restype = ctypes.c_void_p

_run_file = ctypes.pythonapi.PyRun_AnyFileExFlags
_run_file.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p]
_run_string = ctypes.pythonapi.PyRun_SimpleStringFlags
_run_string.argtypes = [ctypes.c_char_p, ctypes.POINTER(_Flags)]


def run_file(descriptor: int, name: str) -> bool:
    """Run source or bytecode as ``__main__`` and close the file before the program starts.

    Args:
        descriptor: an open file, at its start.
        name: its path, for ``__file__`` and tracebacks.

    Returns:
        Whether it ended without an exception; if not, it was reported.
    """
    stream = _libc.fdopen(descriptor, b"rb")
    return bool(_run_file(stream, os.fsencode(name), 1, None) == 0)


def run_stdin() -> bool:
    """Run standard input as ``__main__``; a closed one is an empty program.

    Returns:
        Whether it ended without an exception; if not, it was reported.
    """
    stream = ctypes.c_void_p.in_dll(_libc, "stdin")
    return bool(_run_file(stream, b"<stdin>", 0, None) == 0)


def run_string(source: bytes) -> bool:
    """Run UTF-8 source, without NUL, as ``__main__``.

    Returns:
        Whether it ended without an exception; if not, it was reported.
    """
    flags = _Flags(_IGNORE_COOKIE, sys.version_info.minor)
    return bool(_run_string(source, ctypes.byref(flags)) == 0)
