"""``python -m fastgraph --profile``: a profile from the program's begin to its exit."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fastgraph.ending import print_at_exit


@dataclass(frozen=True)
class Outputs:
    """The forms in which a profile is shown.

    Attributes:
        text: true to print its tables.
        html: the file for a page; ``None`` for none.
        trace: the file for a trace; ``None`` for none.
    """

    text: bool
    html: Path | None
    trace: Path | None

    @classmethod
    def of(cls, text: bool, html: Path | None, trace: Path | None) -> Outputs:
        """With absolute paths, since the program may change its working directory.

        Raises:
            OSError: a file could not be written at the end; the message names the option.
        """
        for option, path in (("--profile-html", html), ("--profile-trace", trace)):
            if path is not None and not os.access(path.absolute().parent, os.W_OK):
                raise OSError(f"{option}: expected a file in a writable directory, got {path}")
        return cls(text, html and html.absolute(), trace and trace.absolute())


def begin(outputs: Outputs) -> None:
    """Profile from now on, and show what is asked for at the process's exit."""
    from fastgraph.profiling import installing, tables

    taken = installing.begin()

    def shown() -> str:
        installing.end(taken)
        lines = [str(taken)] if outputs.text else []
        for path, write in ((outputs.html, tables.write_html), (outputs.trace, tables.write_trace)):
            if path is None:
                continue
            try:
                write(taken, path)
            except OSError as error:
                lines.append(f"fastgraph: the profile could not be written: {error}\n")
            else:
                lines.append(f"Wrote {path}\n")
        return "".join(lines)

    print_at_exit(shown)
