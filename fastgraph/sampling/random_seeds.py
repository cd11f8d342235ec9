"""Seeds of samplers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

_MASK = (1 << 64) - 1


class _Thread(threading.local):
    generator: torch.Generator | None = None


_THREAD = _Thread()


def chosen_seed(random_seed: int | None) -> int:
    """The seed that was given, or one of torch's generator.

    Raises:
        TypeError: The seed is no integer.
        ValueError: It is not an int64.
    """
    if random_seed is None:
        return int(torch.empty((), dtype=torch.int64).random_(generator=_THREAD.generator))
    if not isinstance(random_seed, int) or isinstance(random_seed, bool):
        raise TypeError(f"random_seed must be an int or None, got {random_seed!r}")
    if not -(2**63) <= random_seed < 2**63:
        raise ValueError(f"random_seed must be in [-2^63, 2^63), got {random_seed}")
    return random_seed


def mixed_seed(*numbers: int) -> int:
    """A seed that depends on all numbers (the finalizer of SplitMix64 after each)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


@contextlib.contextmanager
def drawn_from(generator: torch.Generator) -> Iterator[None]:
    """Within, :func:`chosen_seed` draws from this generator in this thread, not from torch's."""
    before, _THREAD.generator = _THREAD.generator, generator
    try:
        yield
    finally:
        _THREAD.generator = before
