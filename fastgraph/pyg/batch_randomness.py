"""Random numbers of mini-batches that are the same for any number of workers.

torch gives each worker of a loader a seed of its own, so that the same batch is drawn otherwise by
one worker than by three, or by the program itself. Here the seed of a batch follows from the number
that the iterator drew when it was made, which is the same with and without workers, and from which
batch it is. The program's own generator is as it was after each batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from fastgraph.sampling.random_seeds import drawn_from, mixed_seed


class Batches:
    """The collate function of a loader, with the random numbers of each batch.

    A process that was started to run it gets our sampler as it arrives there.
    """

    def __init__(self, collate: Callable[..., Any], epoch: Tensor | None) -> None:
        self.base_seed = 0
        self._collate = collate
        self._epoch = epoch
        self._current = 0
        self._count = 0
        self._last: Any = None

    def __call__(self, data: Any) -> Any:
        """The batch, drawn by the random numbers that belong to it."""
        worker = get_worker_info()
        epoch = 0 if self._epoch is None else int(self._epoch)
        if epoch != self._current:  # of workers that stay
            self._current, self._count = epoch, 0
        base_seed, batch = self.base_seed, self._count
        if worker is not None:  # batches go round among workers
            base_seed = worker.seed - worker.id
            batch = batch * worker.num_workers + worker.id
        self._count += 1
        self._last = data
        seed = mixed_seed(base_seed, epoch, batch)
        with drawn_from(_generator(seed)) if _THREAD.is_ahead else _seeded(seed):
            return self._collate(data)

    def again(self) -> Any:
        """The last batch, by the same random numbers, of what the graph is now."""
        self._count -= 1
        return self(self._last)

    def __getstate__(self) -> dict[str, Any]:
        # The loader whose method this is refers to this object while it is copied.
        owner = getattr(self._collate, "__self__", None)
        collate = self._collate if owner is None else None
        name = getattr(self._collate, "__name__", None)
        return {**vars(self), "_collate": collate, "owner": owner, "name": name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        from fastgraph.pyg.sampling import in_worker  # which has this module imported

        owner, name = state.pop("owner"), state.pop("name")
        if owner is not None:
            state["_collate"] = getattr(type(owner), name).__get__(owner)
        vars(self).update(state)
        in_worker()


class _Epochs:
    """The batches of a loader's sampler, which count epochs.

    The first batch of an epoch is asked for once all workers have left the one before.
    """

    def __init__(self, batches: Any, epoch: Tensor) -> None:
        self._batches = batches
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        self._epoch += 1
        batches: Iterable[Any] = self._batches
        yield from batches


def get_iterator(
    upstream: Callable[[Any], Any], prefetched: Callable[[Any, Any], Any]
) -> Callable[[Any], Any]:
    """In place of a loader's ``_get_iterator``: its batches have their own random numbers.

    Args:
        upstream: the method.
        prefetched: gives a loader's iterator, or one that is ahead of the program.
    """

    def _get_iterator(self: Any) -> Any:
        epoch = None
        if self.persistent_workers and self.num_workers > 0:
            epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        collate = self.collate_fn
        batches = Batches(collate, epoch)
        self.collate_fn = batches  # workers start with what the loader has now
        try:
            iterator = upstream(self)
        finally:
            self.collate_fn = collate
        inner = getattr(iterator, "iterator", iterator)
        batches.base_seed = inner._base_seed
        if epoch is not None:
            inner._index_sampler = _Epochs(inner._index_sampler, epoch)
        return prefetched(self, iterator)

    return _get_iterator


def made_again(iterator: Any) -> Any:
    """The last batch of a loader's iterator in the program itself, made once more."""
    inner = getattr(iterator, "iterator", iterator)
    batch = inner._dataset_fetcher.collate_fn.again()
    return batch if inner is iterator else iterator.transform_fn(batch)


class _Thread(threading.local):
    is_ahead = False


_THREAD = _Thread()


@contextmanager
def in_a_thread() -> Iterator[None]:
    """Within, batches are drawn without torch's generator, from which the program may draw.

    That is for batches for which only :mod:`fastgraph.sampling` draws.
    """
    before, _THREAD.is_ahead = _THREAD.is_ahead, True
    try:
        yield
    finally:
        _THREAD.is_ahead = before


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Within, torch's generator on the CPU draws what this seed says."""
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)
