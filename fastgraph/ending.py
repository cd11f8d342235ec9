"""Messages that are printed after a program has ended."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable


def print_at_exit(text: Callable[[], str]) -> None:
    """Print ``text()`` to standard error after the program and its own exit handlers."""
    owner = os.getpid()

    def report() -> None:
        # A child made by os.fork() inherits exit handlers.
        if os.getpid() != owner or sys.stderr is None or sys.stderr.closed:
            return
        if sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()
        sys.stderr.write(text())

    atexit.register(report)
