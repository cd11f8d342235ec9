"""DGL's import on a torch for which its GraphBolt library and that of its matrices were not built.

From 2.1 on ``import dgl`` loads GraphBolt, DGL's newer loader of mini-batches, from a library that
is compiled for one torch version each; for those after its release there is none, and the import
fails. There, and nowhere else, a finder has DGL's own ``dgl.graphbolt`` imported without the
library, over operators of ours (:mod:`fastgraph.dgl.graphbolt_operators`). Where that cannot be, as
it is another version of DGL or a package that GraphBolt imports is not installed, graphs, layers
and message passing do without it: a stand-in in its place names what is missing once it is used.

``import dgl.sparse``, which ``graph.adj()`` does, too, fails for want of another such library. In
its place the finder puts :mod:`fastgraph.sparse`, which does the same.
"""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import NoReturn

_NAME = "dgl.graphbolt"
_SPARSE = "dgl.sparse"
_SPARSE_MODULES = (
    *("broadcast", "elementwise_op", "elementwise_op_sp", "matmul", "reduction"),
    *("sddmm", "softmax", "sparse_matrix", "unary_op", "utils"),
)
"""Those of ``dgl.sparse``, from which programs import its names."""
_KNOWN = "2.1."
"""How versions of DGL begin whose GraphBolt calls the operators that we have."""
_LOADS = "load_graphbolt"
"""The function of ``dgl.graphbolt`` that loads its library, called at its end."""
_NEEDED = ("pandas", "pydantic", "yaml")
"""Packages that GraphBolt imports besides those that DGL says it needs."""


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


class _WithoutLibrary(SourceFileLoader):
    """Imports ``dgl.graphbolt`` over our operators: as it is, but that it loads no library."""

    def get_code(self, fullname: str) -> CodeType:
        """The module's code but for the call that loads the library; no cache has it."""
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path))
        tree.body = [statement for statement in tree.body if not _is_call(statement, _LOADS)]
        return compile(tree, path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        """Put our operators in place, and import the module."""
        with warnings.catch_warnings():
            # That what GraphBolt stands on is deprecated is no news for whoever imports DGL.
            warnings.filterwarnings("ignore", category=UserWarning, module=r"torchdata\.")
            import_module("fastgraph.dgl.graphbolt_operators").provide()
            super().exec_module(module)
            import_module("fastgraph.dgl.graphbolt_batches").install(module)


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
        if _obstacle(path) is None:
            found = PathFinder.find_spec(name, path)
            assert found is not None and found.origin is not None  # its folder was looked at
            found.loader = _WithoutLibrary(name, found.origin)
            return found
        return ModuleSpec(name, self, is_package=True)  # or else its modules are not looked for

    def create_module(self, spec: ModuleSpec) -> GraphBolt | None:
        """A new stand-in, or a module that is replaced when it is executed."""
        if spec.name == _SPARSE:
            return None
        return GraphBolt(spec.name, f"{why_incomplete()}, and {why_no_graphbolt()}")

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
    runner call it, too. ``dgl.graphbolt`` samples on the CPU by fastgraph; what it then cannot do
    raises an ``ImportError`` that names the missing library, and so does whatever is asked of it
    where :func:`why_no_graphbolt` says why it cannot be used at all. ``dgl.sparse``, its modules
    and ``graph.adj()`` work: :mod:`fastgraph.sparse` is in its place. Where a library exists, or
    DGL has no GraphBolt yet (before 2.0), nothing changes.
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


def why_no_graphbolt() -> str | None:
    """Why fastgraph's operators cannot stand for that library; ``None`` where they can.

    Also ``None`` where nothing is missing. Imports torch, but not DGL.
    """
    spec = find_spec("dgl")
    folders = None if spec is None else spec.submodule_search_locations
    return _obstacle(folders) if folders and why_incomplete() else None


def without_library(name: str) -> ImportError:
    """The error of what our operators of GraphBolt do not do."""
    return ImportError(
        f"{name} cannot be used: {why_incomplete()}. "
        "fastgraph has put operators in its place that sample on the CPU",
        name=_NAME,
    )


def _obstacle(folders: Sequence[str]) -> str | None:
    folder = _package_with(folders, "graphbolt")
    assert folder is not None  # as its library is missing
    version = _constant(folder / "_ffi" / "libinfo.py", "__version__")
    if version is None or not version.startswith(_KNOWN):
        return f"fastgraph has operators for GraphBolt {_KNOWN}x only, and this is {version}"
    tree = ast.parse((folder / "graphbolt" / "__init__.py").read_bytes())
    if not any(_is_call(statement, _LOADS) for statement in tree.body):
        return f"dgl/graphbolt/__init__.py does not call {_LOADS}()"
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        return f"GraphBolt needs {' and '.join(missing)}"
    data = find_spec("torchdata")
    parts = [
        Path(place) / "datapipes" for place in (data and data.submodule_search_locations) or ()
    ]
    if not any(part.is_dir() for part in parts):
        return "GraphBolt needs torchdata.datapipes, which torchdata has before 0.10"
    return None


def _constant(path: Path, name: str) -> str | None:
    """The text that a file assigns to a name, if it does."""
    if not path.is_file():
        return None
    for statement in ast.parse(path.read_bytes()).body:
        if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Constant):
            continue
        if any(isinstance(target, ast.Name) and target.id == name for target in statement.targets):
            return str(statement.value.value)
    return None


def _is_call(statement: ast.stmt, name: str) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and isinstance(statement.value.func, ast.Name)
        and statement.value.func.id == name
    )


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
