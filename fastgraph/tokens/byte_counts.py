"""Amounts of memory as users write them."""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {"": 1, "B": 1, **{f"{letter}iB": 1 << 10 * (i + 1) for i, letter in enumerate("KMGT")}}
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]iB|B|)\s*", re.ASCII)


def byte_count(name: str, amount: object) -> int:
    """A number of bytes, given as an int or as a text such as ``"512MiB"`` or ``"1.5GiB"``.

    Raises:
        TypeError: it is neither.
        ValueError: it is negative, or has another unit.
    """
    if isinstance(amount, int) and not isinstance(amount, bool):
        if amount < 0:
            raise ValueError(f"{name} must be at least 0 bytes, got {amount}")
        return amount
    if not isinstance(amount, str):
        raise TypeError(f'{name} must be a number of bytes or a text as "2GiB", got {amount!r}')
    found = _TEXT.fullmatch(amount)
    if found is None:
        raise ValueError(f'{name} must be as "512MiB", "1.5GiB" or "2048", got {amount!r}')
    return int(Fraction(found[1]) * _UNITS[found[2]])
