"""The command line of the interpreter itself."""

from __future__ import annotations

from collections.abc import Sequence

_TAKE_VALUE = "cmWX"


def module_to_run(words: Sequence[str]) -> str | None:
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
