"""Where ours is on purpose another ending than upstream's."""

from __future__ import annotations

from tests.wrong_calls.comparing import Difference


def reason_of(library: str, found: Difference) -> str | None:
    """Why a difference is none that is to be mended; ``None`` where it is."""
    return None
