"""DGL's import on a torch for which its GraphBolt library and that of its matrices were not built.

From 2.1 on ``import dgl`` loads GraphBolt, DGL's newer loader of mini-batches, from a library that
is compiled for one torch version each; for those after its release there is none, and the import
fails. Graphs, layers and message passing do without it. So a finder puts a stand-in in place of
``dgl.graphbolt``, there and nowhere else, which names the missing library once it is used.

``import dgl.sparse``, which ``graph.adj()`` does, too, fails for want of another such library. In
its place the finder puts :mod:`fastgraph.sparse`, which does the same.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import NoReturn

_NAME = "dgl.graphbolt"
_SPARSE = "dgl.sparse"
_SPARSE_MODULES = (
    *("broadcast", "elementwise_op", "elementwise_op_sp", "matmul", "reduction"),
    *("sddmm", "softmax", "sparse_matrix", "unary_op", "utils"),
)
"""Those of ``dgl.sparse``, from which programs import its names."""


class GraphBolt(ModuleType):
    """In place of ``dgl.graphbolt``; whatever is asked of it is an error that says why."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self._reason = reason

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # what python and its tools ask of every module
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        raise self.error(name)

    def error(self, name: str) -> ImportError:
        """Why one of its names, or of its modules, cannot be used."""
        return ImportError(
            f"{self.__name__}.{name} cannot be used: {self._reason}. "
            "fastgraph has put a stand-in in its place, with which the rest of DGL can be imported",
            name=self.__name__,
        )


class _Finder(Loader):
    """Finds the stand-ins, while somebody wants them and only where nothing else is to be found."""

    def __init__(self) -> None:
        self._asked: set[str] = set()

    def ask(self, who: str, wanted: bool) -> None:
        """Have the stand-ins put in place where they are needed, or not any more."""
        if wanted:
            self._asked.add(who)
        else:
            self._asked.discard(who)
        is_there = self in sys.meta_path
        if self._asked and not is_there:
            sys.meta_path.insert(0, self)
        elif is_there and not self._asked:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: object = None
    ) -> ModuleSpec | None:
        """A stand-in, or ``None`` for every other module, and where the library exists.

        Raises:
            ImportError: for a module within the stand-in of GraphBolt.
        """
        if name == _SPARSE and path is not None and _lacks_sparse_library(path):
            return ModuleSpec(name, self, is_package=True)
        parent, _, child = name.rpartition(".")
        stand_in = sys.modules.get(_NAME)
        if parent == _NAME and isinstance(stand_in, GraphBolt):
            raise stand_in.error(child)
        if name != _NAME or path is None or _missing_library(path) is None:
            return None
        return ModuleSpec(name, self, is_package=True)  # or else its modules are not looked for

    def create_module(self, spec: ModuleSpec) -> GraphBolt | None:
        """A new stand-in, or a module that is replaced when it is executed."""
        if spec.name == _SPARSE:
            return None
        reason = why_incomplete()
        assert reason is not None  # as found above
        return GraphBolt(spec.name, reason)

    def exec_module(self, module: ModuleType) -> None:
        """Replace ``dgl.sparse`` and its modules; for GraphBolt there is nothing to run."""
        if module.__name__ == _SPARSE:
            ours = import_module("fastgraph.sparse")
            sys.modules[_SPARSE] = ours
            for name in _SPARSE_MODULES:
                sys.modules[f"{_SPARSE}.{name}"] = _with_names_of(ours, f"{_SPARSE}.{name}")


_FINDER = _Finder()


def fix_import() -> None:
    """Have ``import dgl`` and ``dgl.sparse`` succeed where DGL lacks libraries for this torch.

    To be called before ``import dgl``, which it does not do. :func:`fastgraph.enable` and the
    runner call it, too. What the program then asks of ``dgl.graphbolt`` raises an ``ImportError``
    that names the missing library. ``dgl.sparse``, its modules and ``graph.adj()`` work:
    :mod:`fastgraph.sparse` is in its place. Where a library exists, or DGL has no GraphBolt yet
    (before 2.0), nothing changes.
    """
    _FINDER.ask("program", True)


def while_enabled(active: bool) -> None:
    """:func:`fix_import` for as long as fastgraph is enabled."""
    _FINDER.ask("switch", active)


def why_incomplete() -> str | None:
    """Why the DGL that is installed has no GraphBolt for this torch; ``None`` where it has it.

    Also ``None`` where DGL, or torch, is not installed. Imports torch, but not DGL.
    """
    spec = find_spec("dgl")
    folders = None if spec is None else spec.submodule_search_locations
    if not folders or find_spec("torch") is None:
        return None
    library = _missing_library(folders)
    if library is None:
        return None
    return f"this DGL has no GraphBolt library for torch {_torch_version()} ({library})"


def _missing_library(folders: Sequence[str]) -> str | None:
    """The name of the library that DGL's import would look for in vain, if so."""
    folder = _package_with(folders, "graphbolt")
    if folder is None:
        return None
    name = f"libgraphbolt_pytorch_{_torch_version()}.so"
    return None if (folder / "graphbolt" / name).exists() else name


def _lacks_sparse_library(folders: Sequence[str]) -> bool:
    """True if DGL's import of its own ``dgl.sparse`` would look for a library in vain."""
    folder = _package_with(folders, "sparse")
    if folder is None:
        return False
    name = f"libdgl_sparse_pytorch_{_torch_version()}.so"
    return not (folder / "dgl_sparse" / name).exists()


def _package_with(folders: Sequence[str], module: str) -> Path | None:
    """The folder of a DGL that has this module, and its libraries beside it."""
    for folder in map(Path, folders):
        # A build of DGL's sources keeps its libraries elsewhere, and has what it was built for.
        if (folder / module).is_dir() and (folder / "libdgl.so").exists():
            return folder
    return None


def _with_names_of(package: ModuleType, name: str) -> ModuleType:
    """A module of this name with all public names of a package."""
    module = ModuleType(name, package.__doc__)
    vars(module).update({public: getattr(package, public) for public in package.__all__})
    return module


def _torch_version() -> str:
    import torch  # late: children of the runner prepare for DGL without it

    return str(torch.__version__).partition("+")[0]
