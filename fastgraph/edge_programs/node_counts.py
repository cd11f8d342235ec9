"""The numbers of nodes, as a message takes them while it is traced: every use of them is refused.

A program knows nothing of them, whatever the graph is.
"""

from __future__ import annotations

from typing import Any

from fastgraph.edge_programs.program import Place
from fastgraph.edge_programs.recorded import Refused


class NodeCount:
    """Stands for the number of nodes in one of the places ``row`` and ``gathered``.

    Args:
        place: where the nodes are.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, place: Place) -> None:
        self.place = place

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return int


def is_count(value: object) -> bool:
    """True for what stands for a number of nodes."""
    return type(value) is NodeCount


def _refuse_use(*_: object) -> Any:
    raise Refused("it takes the number of nodes")


for _name in dir(int):
    if _name not in dir(object) or _name in ("__eq__", "__ne__", "__lt__", "__repr__", "__str__"):
        setattr(NodeCount, _name, _refuse_use)
for _name in ("__le__", "__gt__", "__ge__", "__format__"):
    setattr(NodeCount, _name, _refuse_use)

NUM_ROWS, NUM_GATHERED = NodeCount("row"), NodeCount("gathered")
