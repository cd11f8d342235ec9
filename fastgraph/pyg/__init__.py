"""The PyG adapter: message passing of known form becomes ``spmm`` or ``segment_reduce``.

Nothing here imports ``torch_geometric`` until a user has: routes are installed after its import.
"""

from __future__ import annotations

from fastgraph.routing.patching import Patches
from fastgraph.routing.route import Route


def _install_propagate(patches: Patches) -> None:
    from fastgraph.pyg import propagate

    propagate.install(patches)


def _install_gcn_norm(patches: Patches) -> None:
    from fastgraph.pyg import gcn_norm

    gcn_norm.install(patches)


ROUTES = (
    Route("PyG propagate", "torch_geometric.nn", _install_propagate),
    Route("PyG gcn_norm", "torch_geometric.nn", _install_gcn_norm),
)


def routed_layers() -> list[str]:
    """Names of PyG's layers whose message has a route. Imports ``torch_geometric``."""
    import torch_geometric.nn.conv as conv

    from fastgraph.pyg.messages import known_message

    classes = (vars(conv)[name] for name in conv.__all__ if name != "MessagePassing")
    return [c.__name__ for c in classes if hasattr(c, "message") and known_message(c)]
