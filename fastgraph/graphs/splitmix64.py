"""The finaliser of SplitMix64, on words of int64.

Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, with the
constants of Stafford's variant 13.
"""

from __future__ import annotations

from torch import Tensor

GOLDEN = -7046029254386353131
"""The odd number next to 2^64 by the golden ratio, by which SplitMix64 counts."""

_ROUNDS = ((30, -4658895280553007687), (27, -7723592293110705685))
_LAST_SHIFT = 31


def mixed(words: Tensor) -> Tensor:
    """A permutation of int64, in place: each bit changes half of the 64."""
    for shift, factor in _ROUNDS:
        words.bitwise_xor_(shifted(words, shift)).mul_(factor)
    return words.bitwise_xor_(shifted(words, _LAST_SHIFT))


def shifted(words: Tensor, bits: int) -> Tensor:
    """A logical shift to the right, where the sign is a bit like others."""
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)
