"""Our sampler where PyG finds neither pyg-lib nor torch-sparse.

PyG samples mini-batches by compiled packages, and without them most of its loaders and its models
of random walks raise an ``ImportError``. So while somebody wants it, our functions stand under the
names by which PyG calls theirs (``torch.ops.pyg.neighbor_sample``), and its flags say that they are
there. That is done once PyG is imported, and only where it has neither package.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

from wrapt import register_post_import_hook

from fastgraph.plugins.patching import Patches

_PACKAGE = "torch_geometric"


class _Sampling:
    """Puts our sampler in place while somebody wants it."""

    def __init__(self) -> None:
        self._asked: dict[str, bool] = {}
        self._in_place: bool | None = None
        self._patches = Patches()
        self._awaits = False

    def ask(self, who: str, wanted: bool, even_beside_others: bool = False) -> None:
        """Have our sampler put in place from the import of PyG on, or not any more."""
        if wanted:
            self._asked[who] = even_beside_others
        else:
            self._asked.pop(who, None)
        if _PACKAGE in sys.modules:
            self._update()
        elif not self._awaits:
            self._awaits = True
            register_post_import_hook(self._after_import, _PACKAGE)

    def is_in_place(self) -> bool:
        """True if PyG samples by ours."""
        return self._in_place is not None

    def _after_import(self, module: ModuleType) -> None:
        self._update()

    def _update(self) -> None:
        # In place of others or not: the first is more, and what is in place decides nothing.
        wanted = max(self._asked.values(), default=None)
        if wanted == self._in_place:
            return
        self._patches.restore()
        self._in_place = None
        typing = sys.modules.get(f"{_PACKAGE}.typing")  # another module of that name has none
        if wanted is None or typing is None or (not wanted and found(typing)):
            return
        import_module("fastgraph.pyg.sampling_patches").install(self._patches)
        self._in_place = wanted


_SAMPLING = _Sampling()


def fix_sampling(*, even_beside_others: bool = False) -> None:
    """Have PyG's loaders sample by fastgraph where pyg-lib and torch-sparse are not installed.

    May be called before or after ``import torch_geometric``, which it does not do, and lasts as
    long as the process. :func:`fastgraph.enable` and the runner call it for as long as fastgraph is
    enabled. Where one of these packages is installed, nothing changes.

    Args:
        even_beside_others: use our sampler where one of these packages is installed, too. That is
            for PyG's neighbour sampling, ``HGTLoader``, random walks and METIS.
    """
    _SAMPLING.ask("program", True, even_beside_others)


def while_enabled(active: bool) -> None:
    """:func:`fix_sampling` for as long as fastgraph is enabled."""
    _SAMPLING.ask("switch", active)


def in_worker() -> None:
    """:func:`fix_sampling` in a process that was started to sample for one that has it."""
    _SAMPLING.ask("worker", True, _SAMPLING.is_in_place())


def found(typing: ModuleType) -> list[str]:
    """Those packages that PyG samples by and has found, by the names they have for pip."""
    flags = {"pyg-lib": typing.WITH_PYG_LIB, "torch-sparse": typing.WITH_TORCH_SPARSE}
    return [name for name, is_there in flags.items() if is_there]
