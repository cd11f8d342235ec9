"""Random numbers of GraphBolt's samples where its library is missing.

By default seeds come from torch's generator, so that ``torch.manual_seed`` repeats samples; after
``dgl.graphbolt.seed`` from a generator of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fastgraph.sampling.random_seeds import mixed_seed

_SEEDED: list[torch.Generator] = []
"""The generator that the program has seeded, if it has."""


class _OfThread(threading.local):
    is_sampling = False
    batch: torch.Generator | None = None
    """The generator of the batch that is sampled."""


_OF_THREAD = _OfThread()


def set_seed(seed: int) -> None:
    """Have samples from now on follow from this seed (``torch.ops.graphbolt.set_seed``)."""
    _SEEDED[:] = [torch.Generator().manual_seed(seed)]


def next_seed() -> int:
    """The seed of the next sample."""
    drawn_by = _OF_THREAD.batch or (_SEEDED[0] if _SEEDED else None)
    return int(torch.empty((), dtype=torch.int64).random_(generator=drawn_by))


@contextmanager
def of_batches() -> Iterator[None]:
    """Allow :func:`begin_batch` in this block, after which torch's generator is as it was before.

    A thread other than the main one leaves that generator alone.
    """
    owns = threading.current_thread() is threading.main_thread()
    state = torch.default_generator.get_state() if owns else None
    _OF_THREAD.is_sampling = True
    try:
        yield
    finally:
        _OF_THREAD.is_sampling, _OF_THREAD.batch = False, None
        if state is not None:
            torch.default_generator.set_state(state)


def begin_batch(seed: int, place: int) -> None:
    """Seed all that is drawn for a batch by the seed of its epoch and its place in it."""
    if not _OF_THREAD.is_sampling:
        return
    mixed = mixed_seed(seed, place)
    _OF_THREAD.batch = torch.Generator().manual_seed(mixed)
    if threading.current_thread() is threading.main_thread():
        torch.default_generator.manual_seed(mixed)
