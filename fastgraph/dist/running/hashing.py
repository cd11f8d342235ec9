"""One order of sets on all ranks.

Hashes of strings are random numbers of a process, and with them the order of a set of strings, from
which scripts number classes. They are drawn when Python starts.
"""

from __future__ import annotations

import os
import sys

from fastgraph.dist.ranks import transport

_VARIABLE = "PYTHONHASHSEED"


def for_ranks() -> None:
    """Have the ranks that this process is going to start hash alike."""
    if os.environ.get(_VARIABLE, "random") == "random":
        os.environ[_VARIABLE] = "0"


def start_again_with_common_hashes() -> None:
    """Where each rank would have its own hashes, start Python again, in this process.

    Nothing must have been joined or opened yet.
    """
    is_one_of_several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if is_one_of_several and os.environ.get(_VARIABLE, "random") == "random":
        for_ranks()
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def check_common_hashes() -> None:
    """All ranks have the same hashes.

    Raises:
        RuntimeError: on all ranks, if one has others.
    """
    if len(set(transport.gather_objects(hash("fastgraph")))) > 1:
        raise RuntimeError(
            f"ranks have different hashes of strings, and so sets in different orders: set "
            f"{_VARIABLE} to the same number for all of them, and start Python without -E, -I or -R"
        )
