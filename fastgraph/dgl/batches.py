"""Batches of edges and of nodes as DGL's user-defined functions take them while they are traced.

A function sees the features by their names. All else is of the graph, and refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from fastgraph.edge_programs.recorded import Refused
from fastgraph.edge_programs.recording import active_recorder


def refuse(reason: str) -> NoReturn:
    """Refuse the function that runs, whatever it does about that.

    Raises:
        Refused: always.
    """
    recorder = active_recorder()
    if recorder is not None:
        recorder.refuse(reason)
    raise Refused(reason)


class Features:
    """The features of one kind of rows, by name.

    Args:
        text: how the function names them, as ``edges.src``.
        values: those that it may take.
        others: why it may not take others, by their names.
        asked: is called with each name that it asks for.
    """

    def __init__(
        self,
        text: str,
        values: Mapping[str, Any],
        others: Mapping[str, str],
        asked: Callable[[str], None],
    ) -> None:
        self._text, self._values, self._others, self._asked = text, values, others, asked

    def __getitem__(self, name: str) -> Any:
        self._asked(name)
        if name in self._others:
            refuse(f"it takes {self._text}[{name!r}], {self._others[name]}")
        return self._values[name]

    def get(self, name: str, default: Any = None) -> Any:
        """The features of this name, or the default."""
        is_there = name in self
        return self[name] if is_there else default

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        self._asked(name)
        return name in self._values or name in self._others

    def __getattr__(self, name: str) -> NoReturn:
        refuse(f"it takes all of {self._text} ({name})")

    def __iter__(self) -> NoReturn:
        refuse(f"it takes all of {self._text}")

    def __len__(self) -> NoReturn:
        refuse(f"it takes all of {self._text}")

    def __setitem__(self, name: str, value: Any) -> NoReturn:
        refuse(f"it sets {self._text}[{name!r}]")

    def __delitem__(self, name: str) -> NoReturn:
        refuse(f"it changes {self._text}")


class EdgeFeatures:
    """A batch of edges.

    Args:
        src: the features of their sources.
        dst: of their destinations.
        data: their own.
    """

    def __init__(self, src: Features, dst: Features, data: Features) -> None:
        self.src, self.dst, self.data = src, dst, data

    def __getattr__(self, name: str) -> NoReturn:
        refuse(f"it takes edges.{name}, which is of the graph")

    def __len__(self) -> NoReturn:
        refuse("it takes the number of edges")


class NodeFeatures:
    """A batch of nodes with the messages that they receive.

    Args:
        data: their own features.
        mailbox: the messages.
    """

    def __init__(self, data: Features, mailbox: Features) -> None:
        self.data, self.mailbox = data, mailbox

    def __getattr__(self, name: str) -> NoReturn:
        refuse(f"it takes nodes.{name}, which is of the graph")

    def __len__(self) -> NoReturn:
        refuse("it takes the number of nodes")
