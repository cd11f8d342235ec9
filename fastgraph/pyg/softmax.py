"""PyG's softmax over neighbours, as a message calls it while it is traced.

It computes with the graph, of which tracing knows nothing. So its own code is replaced for as long
as a message is traced, by whatever name the message has it.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch_geometric import utils

from fastgraph.edge_programs.node_counts import NUM_ROWS
from fastgraph.edge_programs.reading import unread
from fastgraph.edge_programs.recording import active_recorder

_UPSTREAM: Any = utils.softmax


def _stand_in(
    src: Any, index: Any = None, ptr: Any = None, num_nodes: Any = None, dim: Any = 0
) -> Any:
    # As the code of PyG's function it has PyG's globals: its constant becomes what it names.
    function: Any = "softmax_of_message"
    return function(src, index, ptr, num_nodes, dim)


def _is_known(function: Any) -> bool:
    """True for a function that has the arguments of PyG's, in a module of PyG."""
    if not isinstance(function, types.FunctionType) or function.__closure__:
        return False
    code, own = function.__code__, _stand_in.__code__
    return (
        function.__module__.startswith("torch_geometric.utils.")
        and code.co_varnames[: code.co_argcount] == own.co_varnames[: own.co_argcount]
        and function.__defaults__ == _stand_in.__defaults__
    )


_SAME = (
    types.FunctionType(_UPSTREAM.__code__, _UPSTREAM.__globals__, "softmax", _UPSTREAM.__defaults__)
    if _is_known(_UPSTREAM)
    else None
)
"""The same function, whose code stays; ``None`` where PyG's is another one."""


@contextmanager
def known_softmax() -> Iterator[None]:
    """The softmax of messages that are traced meanwhile is known; others compute theirs.

    One thread may be in here at a time.
    """
    if _SAME is None or _UPSTREAM.__code__ is not _SAME.__code__:  # somebody else has replaced it
        yield
        return
    _UPSTREAM.__code__ = _CODE
    try:
        yield
    finally:
        _UPSTREAM.__code__ = _SAME.__code__


def softmax_of_message(src: Any, index: Any, ptr: Any, num_nodes: Any, dim: Any) -> Tensor:
    """PyG's softmax: of a message that is traced, or of numbers.

    Raises:
        Refused: from a message, where it is no softmax over neighbours.
    """
    recorder = active_recorder()
    if recorder is None:
        assert _SAME is not None
        computed: Tensor = unread(_SAME, src, index, ptr, num_nodes, dim)
        return computed
    is_of_rows = ptr is None and (num_nodes is None or num_nodes is NUM_ROWS)
    if not is_of_rows or not isinstance(src, Tensor) or dim not in (0, -src.dim()):
        recorder.refuse("it has a softmax over others than the edges of a node")
    return recorder.softmax(src, index)


_CODE = _stand_in.__code__.replace(
    co_consts=tuple(
        softmax_of_message if constant == softmax_of_message.__name__ else constant
        for constant in _stand_in.__code__.co_consts
    )
)
