"""The PyG adapter: layers and message passing of known form become operators.

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


def _install_gcn_conv(patches: Patches) -> None:
    from fastgraph.pyg import gcn_conv

    gcn_conv.install(patches)


def _install_sage_conv(patches: Patches) -> None:
    from fastgraph.pyg import sage_conv

    sage_conv.install(patches)


def _install_gatv2_conv(patches: Patches) -> None:
    from fastgraph.pyg import gatv2_conv

    gatv2_conv.install(patches)


def _install_gat_conv(patches: Patches) -> None:
    from fastgraph.pyg import gat_conv

    gat_conv.install(patches)


def _install_transformer_conv(patches: Patches) -> None:
    from fastgraph.pyg import transformer_conv

    transformer_conv.install(patches)


ROUTES = (
    Route("PyG propagate", "torch_geometric.nn", _install_propagate),
    Route("PyG gcn_norm", "torch_geometric.nn", _install_gcn_norm),
    Route("PyG GCNConv", "torch_geometric.nn", _install_gcn_conv),
    Route("PyG SAGEConv", "torch_geometric.nn", _install_sage_conv),
    Route("PyG GATv2Conv", "torch_geometric.nn", _install_gatv2_conv),
    Route("PyG GATConv", "torch_geometric.nn", _install_gat_conv),
    Route("PyG TransformerConv", "torch_geometric.nn", _install_transformer_conv),
)


def routed_layers() -> list[str]:
    """Names of PyG's layers that have a route. Imports ``torch_geometric``."""
    import torch_geometric.nn.conv as conv

    from fastgraph.pyg.messages import known_message

    classes = (vars(conv)[name] for name in conv.__all__ if name != "MessagePassing")
    attention = (conv.GATConv, conv.GATv2Conv, conv.TransformerConv)
    return [
        c.__name__
        for c in classes
        if c in attention or (hasattr(c, "message") and known_message(c))
    ]
