"""The random states of Python and of NumPy."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_random_states() -> Iterator[None]:
    """Both have after the block the states that they had before it; torch's is ``fork_rng``'s."""
    numpy = sys.modules.get("numpy")
    of_python = random.getstate()
    of_numpy = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
