"""The DGL adapter: layers and message passing of known form become operators.

Nothing here imports ``dgl``, or anything that takes long to import, until a user has: routes are
installed after its import. Where DGL's own import fails on a newer torch, :func:`fix_import` helps.
"""

from __future__ import annotations

from fastgraph.dgl.importing import fix_import, while_enabled, why_incomplete
from fastgraph.hookspecs import hookimpl

__all__ = ["fix_import", "why_incomplete"]


@hookimpl
def fastgraph_switched(active: bool) -> None:
    """Have ``import dgl`` succeed from now on, or not any more."""
    while_enabled(active)
