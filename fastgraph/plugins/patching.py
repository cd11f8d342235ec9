"""Replacing attributes of classes and modules, and putting the originals back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_MISSING = object()


class Patches:
    """Attribute replacements that can be undone in reverse order."""

    def __init__(self) -> None:
        # An owner, a name, what was there before, and what replaced it.
        self._originals: list[tuple[Any, str, Any, Any]] = []
        # By identity, because what is looked up need not be hashable; the value is kept, so that
        # nothing else gets its identity.
        self._upstream: dict[int, tuple[Any, Any]] = {}

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name``, remembering what ``owner`` itself (not a base) held before."""
        self._originals.append((owner, name, _own(owner, name), value))
        self._upstream[id(value)] = value, getattr(owner, name)
        setattr(owner, name, value)

    def provide(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name``, which ``owner`` need not have, and which has no upstream then."""
        self._originals.append((owner, name, _own(owner, name), value))
        setattr(owner, name, value)

    def upstream_of(self, value: Any) -> Any:
        """The upstream function of a replacement that is in place, or of a method bound to it.

        Anything else is returned as it is.
        """
        while True:
            function = getattr(value, "__func__", value)
            if id(function) not in self._upstream:
                return value
            value = self._upstream[id(function)][1]  # maybe a replacement, too

    def restore(self) -> None:
        """Put every original back, the last replaced first, but where a user has set another."""
        self._put_back()
        self._originals.clear()
        self._upstream.clear()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Put every original back for a moment, and the same replacements in place afterwards."""
        replaced = self._put_back()
        try:
            yield
        finally:
            for owner, name, value in replaced:
                setattr(owner, name, value)

    def _put_back(self) -> list[tuple[Any, str, Any]]:
        """Put originals back; returns the owners, names and replacements that were there."""
        found = []
        theirs = set()
        for owner, name, original, value in reversed(self._originals):
            place = id(owner), name
            if _own(owner, name) is not value:
                theirs.add(place)  # and what was replaced before it is no more to be put back
            if place in theirs:
                continue
            found.append((owner, name, value))
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        return found[::-1]


_LIBRARIES = ("torch.", "sympy.", "numpy.", "scipy.")
"""Beginnings of the names of most modules of a program, which know of no graph library."""


def modules_with(*names: str) -> list[ModuleType]:
    """The imported modules that have one of these names, but for those of other libraries."""
    wanted = frozenset(names)
    return [
        module
        for name, module in list(sys.modules.items())
        if not name.startswith(_LIBRARIES)
        and isinstance(module, ModuleType)
        and not vars(module).keys().isdisjoint(wanted)
    ]


def _own(owner: Any, name: str) -> Any:
    """The attribute of ``owner`` itself, not of a base; of its class there is always one."""
    return type(owner) if name == "__class__" else vars(owner).get(name, _MISSING)
