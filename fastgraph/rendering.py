"""Tables of rich as plain text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType


def rendered(*parts: RenderableType) -> str:
    """The text that rich makes of ``parts``, one below the other, 120 columns wide, uncoloured."""
    from rich.console import Console

    console = Console(width=120, color_system=None)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return capture.get()
