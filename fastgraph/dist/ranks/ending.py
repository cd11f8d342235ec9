"""The end of a rank, which the others must know of lest they wait for it."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from types import TracebackType

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from fastgraph.dist.ranks.board import BOARD
from fastgraph.dist.ranks.world import BEGINNING, WORLD, CollectiveError

_SECONDS = 5.0
"""For which a failed rank goes on: threads of the program and what it does at its end."""

_PATIENCE = 20.0
"""Seconds for which a rank whose collective did not end waits for what has started the ranks, which
sees the rank that failed first, and ends the others.
"""


class _Ends:
    """The end of this process.

    Attributes:
        is_watched: whether what has started the ranks ends all of them when one has failed.
        has_failed: whether the program has ended by an error.
        is_told: whether the others will know of it.
    """

    is_watched = "TORCHELASTIC_RUN_ID" in os.environ
    has_failed = False
    is_told = False


def watched() -> None:
    """Say that what has started this rank ends all ranks when one has failed."""
    _Ends.is_watched = True


def tell() -> None:
    """Have the others know of the end of this rank, from when it has joined them."""
    if _Ends.is_told or WORLD.size == 1:
        return
    _Ends.is_told = True
    upstream = sys.excepthook

    def failed(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        fail(error)
        upstream(kind, error, traceback)
        sys.stderr.flush()
        if isinstance(error, Exception):
            _record(error)
        _end_soon()

    sys.excepthook = failed
    atexit.register(_at_exit)


def fail(error: BaseException) -> None:
    """Tell the others that this rank has failed.

    If it is because another one has, wait until what has started the ranks ends this one.
    """
    if _Ends.has_failed:
        return
    _Ends.has_failed = True
    if not isinstance(error, CollectiveError):
        BOARD.fail(error)
    elif _Ends.is_watched:
        time.sleep(_PATIENCE)


def end_by(error: Exception) -> None:
    """End this process by an error that a thread beside the program has found."""
    sys.excepthook(type(error), error, error.__traceback__)
    _end_soon()


BEGINNING.append(tell)


def _at_exit() -> None:
    if not _Ends.has_failed:
        BOARD.end()


def _record(error: Exception) -> None:
    """Leave the error for ``torchrun``, which shows that of the rank that failed first."""
    try:
        raise error
    except type(error):  # from whose traceback it is written
        get_error_handler().record_exception(error)


def _end_soon() -> None:
    """End this process for certain: its own threads may last, and others wait meanwhile."""

    def end() -> None:
        time.sleep(_SECONDS)
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()
