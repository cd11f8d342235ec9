"""The flag by which a program asks for torch-sparse, answered by what it asks it for.

PyG's example of GraphSAINT ends where ``torch_geometric.typing.WITH_TORCH_SPARSE`` is false, though
of torch-sparse it needs the sampler alone, which is ours then. Other programs would go on to make a
``SparseTensor``, which is not there. So a program is told that torch-sparse is there if it names
loaders of PyG and nothing else for which it is needed; PyG itself is never told so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from types import CodeType, ModuleType

_FLAG = "WITH_TORCH_SPARSE"
_LOADERS = frozenset(
    {
        "ClusterData",
        "GraphSAINTEdgeSampler",
        "GraphSAINTNodeSampler",
        "GraphSAINTRandomWalkSampler",
        "HGTLoader",
        "LinkNeighborLoader",
        "NeighborLoader",
        "NeighborSampler",
        "ShaDowKHopSampler",
    }
)
_MATRICES = frozenset({"EdgeIndex", "SparseTensor", "ToSparseTensor", "adj_t", "torch_sparse"})
_PROGRAMS = ("__main__", "__mp_main__")  # the second is the first in a process that it has spawned


class Typing(ModuleType):
    """``torch_geometric.typing`` where ours samples and torch-sparse is not installed."""

    def _is_there(self) -> bool:
        """True for the outermost code of a program that needs loaders alone."""
        asking = sys._getframe(1)
        is_program = asking.f_globals.get("__name__") in _PROGRAMS
        if is_program and asking.f_code.co_name == "<module>":
            return needs_loaders_alone(asking.f_code)
        if _FLAG not in vars(self):
            raise AttributeError(_FLAG)
        return bool(vars(self)[_FLAG])

    def _set(self, value: bool) -> None:
        vars(self)[_FLAG] = value

    def _delete(self) -> None:
        if _FLAG not in vars(self):
            raise AttributeError(_FLAG)
        del vars(self)[_FLAG]

    def __reduce__(self) -> tuple[object, ...]:
        # Picklers that send modules by their names know them by their exact type.
        return import_module, (self.__name__,)

    WITH_TORCH_SPARSE = property(_is_there, _set, _delete)


def needs_loaders_alone(code: CodeType) -> bool:
    """True if code names loaders that sample, and nothing that holds matrices of torch-sparse."""
    names = set(_names(code))
    return not _LOADERS.isdisjoint(names) and _MATRICES.isdisjoint(names)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _names(value)
        elif isinstance(value, tuple):  # names that are imported
            yield from (name for name in value if isinstance(name, str))
