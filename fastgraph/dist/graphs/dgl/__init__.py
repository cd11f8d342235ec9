"""Graphs of DGL with sharded edges and features.

A ``DGLGraph`` stands on an index object, which holds its edges. That of a sharded graph is a
:class:`~fastgraph.dist.graphs.dgl.index.ShardedIndex`, whose edges are sharded tensors: it answers
for the whole graph, and the rest of ``DGLGraph`` (frames, message passing, layers) is DGL's own.

Nothing here imports ``dgl``, or a module of this package that does, before the program has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

from wrapt import register_post_import_hook

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from fastgraph.dist.graphs.protocols import DglGraph

_AWAITED: set[str] = set()


def install() -> None:
    """Have DGL take sharded tensors, from its import on."""
    if "dgl" not in _AWAITED:
        _AWAITED.add("dgl")
        register_post_import_hook(_after_import, "dgl")  # at once if it is imported already


def _after_import(_: ModuleType) -> None:
    if "dgl.backend.pytorch.sparse" in sys.modules:  # else DGL computes by another library
        from fastgraph.dist.graphs.dgl import patches

        patches.install()


def shard_graphs(shard: Callable[[DglGraph], object], min_nodes: int, seed: int) -> None:
    """Have graphs sharded where a script gets them, once it has imported DGL.

    Arguments as for :func:`fastgraph.dist.graphs.dgl.launching.shard_graphs`.
    """
    install()

    def after_import(_: ModuleType) -> None:
        if "dgl.backend.pytorch.sparse" in sys.modules:
            from fastgraph.dist.graphs.dgl import launching

            launching.shard_graphs(shard, min_nodes, seed)

    register_post_import_hook(after_import, "dgl")


def is_dgl_graph(value: object) -> TypeIs[DglGraph]:
    """True if a value is a ``DGLGraph``."""
    dgl = sys.modules.get("dgl")
    return dgl is not None and isinstance(value, dgl.DGLGraph)
