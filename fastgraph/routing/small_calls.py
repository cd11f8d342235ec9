"""Calls that had too little to compute: the next ones like them are left to upstream unseen."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec
from weakref import ref

from torch import is_grad_enabled

from fastgraph.settings import current

Asked = ParamSpec("Asked")

Kind = tuple[object, ...]
"""A key that calls share which have as much to compute for an edge."""

_MOST_KINDS = 16


class SmallCalls:
    """Of owners, layers or code, the kinds of calls that were too small, with the most edges each.

    A layer may make several at each call: of either kind of nodes, or of each relation.
    """

    def __init__(self) -> None:
        # By the owner's `id`, as in `fastgraph.routing.programs`.
        self._known: dict[int, tuple[ref[Any], dict[Kind, int]]] = {}

    def add(self, owner: object, num_edges: int, kind: Kind) -> None:
        """Remember a call.

        Args:
            owner: for as long as it lives.
            num_edges: of the call.
            kind: of the call, but for whether gradients are recorded.
        """
        number = id(owner)
        if number not in self._known:
            self._known[number] = ref(owner, functools.partial(_forget, self._known, number)), {}
        known = self._known[number][1]
        if len(known) >= _MOST_KINDS:
            known.clear()
        key = (is_grad_enabled(), kind)
        known[key] = max(num_edges, known.get(key, 0))

    def cover(
        self,
        owner: object,
        num_edges: int,
        kind: Callable[Asked, Kind],
        *args: Asked.args,
        **kwargs: Asked.kwargs,
    ) -> bool:
        """True if a call of this kind on as many edges was too small.

        Never where the setting ``min_edges`` says what is too small.

        Args:
            owner: as for :meth:`add`.
            num_edges: of the call.
            kind: gives that of the call, where it matters.
            args: its arguments.
            kwargs: the same.
        """
        known = self._known.get(id(owner))
        if known is None or current().min_edges is not None:
            return False
        return num_edges <= known[1].get((is_grad_enabled(), kind(*args, **kwargs)), 0)


def _forget(known: dict[int, Any], number: int, _: object) -> None:
    known.pop(number, None)
