"""The owners of values before a program: its places, and pairs of a node and a type of edges."""

from __future__ import annotations

from typing import Literal

from fastgraph.edge_programs.program import Place

ByType = Literal["row by type", "gathered by type"]
Owner = Place | ByType
"""The places of operands, and pairs of a node in one of them and a type."""

BY_TYPE: dict[Owner, ByType] = {"row": "row by type", "gathered": "gathered by type"}
_PLACE_OF: dict[Owner, Place] = {"row by type": "edge", "gathered by type": "gathered"}


def operand_place(owner: Owner) -> Place:
    """The place of the operand of a program that values of an owner become."""
    return _PLACE_OF.get(owner, owner)  # type: ignore[arg-type]
