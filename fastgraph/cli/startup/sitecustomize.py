"""Runs at the start of python processes that inherit the environment of ``python -m fastgraph``.

Their environment leads ``site`` here, see :mod:`fastgraph.cli.children`. Most of them are tools
that have nothing to do with graphs, so nothing is imported before PyG or DGL is.
"""

import os
import sys

TYPE_CHECKING = False  # typing itself takes longer to import than all of this
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

_folder = os.path.dirname(__file__)

# fastgraph.upstream.PACKAGES, which would have to be imported.
_PACKAGES = ("torch_geometric", "dgl")


class _BeforeUpstream:
    """A finder that finds nothing, but learns that PyG or DGL is about to be imported."""

    def find_spec(self, name: str, path: object, target: object = None) -> "ModuleSpec | None":
        if name not in _PACKAGES:
            return None
        sys.meta_path.remove(self)
        from importlib.util import find_spec

        if find_spec(name) is None:  # the other one may come yet
            sys.meta_path.insert(0, self)
            return None
        try:
            from fastgraph.cli.children import enable_with_upstream
        except ImportError as error:  # another environment than that of the process above
            import warnings

            warnings.warn(
                f"{sys.executable} runs without fastgraph, with which it was started: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            enable_with_upstream()
        return find_spec(name)


# The program must see the path that it would see without us.
sys.path[:] = [entry for entry in sys.path if entry != _folder]
sys.path_importer_cache.pop(_folder, None)
if sys.version_info >= (3, 11):  # noqa: UP036 - a child may be another python
    sys.meta_path.insert(0, _BeforeUpstream())

# What would have been found in place of this module takes its name; where there is none, site
# expects the error that this import raises.
del sys.modules[__name__]
import sitecustomize  # type: ignore[import-not-found] # noqa: E402, F401
