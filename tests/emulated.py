"""Which cases of a test the emulator runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def repeats_but(kept: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Values of a parameter, of which the emulator runs those that are kept.

    A kernel meets what the others differ in elsewhere: mostly in ``tests/simt``.
    """
    alone = list(kept)
    return [v if v in alone else pytest.param(v, marks=pytest.mark.repeats) for v in values]
