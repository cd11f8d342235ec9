"""The command line of the interpreter itself, and what it has put on the path for us.

Imports nothing, so that it can run before anything is looked for on that path.
"""

from __future__ import annotations

import os
import sys

_TAKE_VALUE = "cmWX"


def module_to_run(words: list[str]) -> str | None:
    """The module that ``python -m MODULE`` was told to run, if it was.

    Args:
        words: the interpreter and its arguments, as in ``sys.orig_argv``. What follows a script,
            ``-c CODE`` or ``-m MODULE`` belongs to the program, whatever it looks like.
    """
    rest = iter(words[1:])
    for word in rest:
        if word == "--check-hash-based-pycs":
            next(rest, None)
        elif word in ("-", "--") or not word.startswith("-"):
            return None
        elif not word.startswith("--"):
            for end, letter in enumerate(word[1:], start=2):
                if letter in _TAKE_VALUE:
                    value = word[end:] or next(rest, None)
                    if letter in "cm":
                        return value if letter == "m" else None
                    break
    return None


class _FirstEntry:
    """The first entry of ``sys.path``, which python makes for what it runs."""

    def __init__(self) -> None:
        self._is_ours = not sys.flags.safe_path

    def remove(self) -> None:
        """Take out the working directory, which ``python -m fastgraph`` has put there.

        A module there that has the name of one that we import is none of our business.
        """
        # Python puts nothing there where the working directory is gone.
        if self._is_ours and sys.path[0] == working_directory():
            del sys.path[0]
        self._is_ours = False

    def replace(self, entry: str | None) -> None:
        """Put ``entry`` where python puts that of the program, or nothing."""
        if self._is_ours:
            del sys.path[0]
        if entry is not None:
            sys.path.insert(0, entry)


FIRST_ENTRY = _FirstEntry()


def working_directory() -> str | None:
    """Its path, or ``None`` where it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None
