"""Runs at the start of python processes that inherit the environment of ``python -m fastgraph``.

Their environment leads ``site`` here, see :mod:`fastgraph.cli.children`. Most of them are tools
that have nothing to do with PyG, so nothing is imported before PyG is.
"""

import os
import sys

TYPE_CHECKING = False  # typing itself takes longer to import than all of this
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

_folder = os.path.dirname(__file__)


class _BeforePyG:
    """A finder that finds nothing, but learns that PyG is about to be imported."""

    def find_spec(self, name: str, path: object, target: object = None) -> "ModuleSpec | None":
        if name != "torch_geometric":
            return None
        sys.meta_path.remove(self)
        from importlib.util import find_spec

        if find_spec(name) is None:
            return None
        try:
            from fastgraph.cli.children import enable_with_pyg
        except ImportError as error:  # another environment than that of the process above
            import warnings

            warnings.warn(
                f"{sys.executable} runs without fastgraph, with which it was started: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            enable_with_pyg()
        return find_spec(name)


# The program must see the path that it would see without us.
sys.path[:] = [entry for entry in sys.path if entry != _folder]
sys.path_importer_cache.pop(_folder, None)
if sys.version_info >= (3, 11):  # noqa: UP036 - a child may be another python
    sys.meta_path.insert(0, _BeforePyG())

# What would have been found in place of this module takes its name; where there is none, site
# expects the error that this import raises.
del sys.modules[__name__]
import sitecustomize  # type: ignore[import-not-found] # noqa: E402, F401
