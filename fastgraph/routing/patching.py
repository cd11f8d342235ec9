"""Replacing attributes of classes and modules, and putting the originals back."""

from __future__ import annotations

from typing import Any

_MISSING = object()


class Patches:
    """Attribute replacements that can be undone in reverse order."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name``, remembering what ``owner`` itself (not a base) held before."""
        self._originals.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def restore(self) -> None:
        """Put every original back, the last replaced first."""
        while self._originals:
            owner, name, original = self._originals.pop()
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
