"""The edge programs by which layers were computed last, or why there were none."""

from __future__ import annotations

import functools
from types import CodeType
from typing import Any, Protocol
from weakref import ref

from torch import nn

from fastgraph.plugins.refusal import Refusal


class Explained(Protocol):
    """A way to compute a message."""

    def explain(self) -> str:
        """The program, what comes before it and what is stored, as text."""
        ...


_LAST: dict[int, tuple[ref[nn.Module | CodeType], Explained | Refusal]] = {}
"""By the owner's ``id``: an entry goes before its owner does, as the reference has it forgotten.

A dictionary with weak keys takes ten times as long, of every call that is left to upstream.
"""


def remember(owner: nn.Module | CodeType, outcome: Explained | Refusal) -> None:
    """Keep the outcome of a call for as long as its owner lives.

    Args:
        owner: the layer, or the code of a function that is the message.
        outcome: of it.
    """
    key = id(owner)
    known = _LAST.get(key)
    # Bound, because names of modules may be gone when the interpreter ends.
    owned = ref(owner, functools.partial(_forget, _LAST, key)) if known is None else known[0]
    _LAST[key] = owned, outcome


def forget(owner: nn.Module | CodeType) -> None:
    """Keep no outcome of the calls so far, so that one which is found is that of a later call."""
    _LAST.pop(id(owner), None)


def _forget(last: dict[int, Any], key: int, _: object) -> None:
    last.pop(key, None)


def last_outcome(owner: nn.Module | CodeType) -> Explained | Refusal | None:
    """The outcome of the last call; ``None`` where no message was looked at."""
    known = _LAST.get(id(owner))
    return None if known is None else known[1]


def is_by_identity(cls: type) -> bool:
    """True if a layer is equal to itself alone, so that something can be kept beside it."""
    found: object = cls.__hash__
    return found is object.__hash__
