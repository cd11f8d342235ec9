"""The libraries that have routes and their layers, for code that must import neither nor torch."""

from __future__ import annotations

import sys
from typing import NamedTuple

PACKAGES = ("torch_geometric", "dgl")
"""As programs import them."""


class RoutedLayer(NamedTuple):
    """A layer that has a route.

    Attributes:
        name: of its class.
        file: the module of the adapter that installs the route of the whole layer; ``None`` where
            all that the layer aggregates goes by the route of message passing.
        drops: True if attention dropout draws other random numbers on the route.
    """

    name: str
    file: str | None = None
    drops: bool = False


LAYERS = {
    # PyG's layers without a file are those whose message is in `fastgraph.pyg.messages`.
    "torch_geometric.nn.conv": (
        RoutedLayer("GCNConv", "gcn_conv"),
        RoutedLayer("SAGEConv", "sage_conv"),
        RoutedLayer("GraphConv", "graph_conv"),
        RoutedLayer("GATv2Conv", "gatv2_conv", drops=True),
        RoutedLayer("GATConv", "gat_conv", drops=True),
        RoutedLayer("TransformerConv", "transformer_conv", drops=True),
        RoutedLayer("GPSConv", "gps_conv", drops=True),
    ),
    # Of which the aggregations with a route in the same file are made.
    "torch_geometric.nn.aggr.utils": (
        RoutedLayer("MultiheadAttentionBlock", "set_attention", drops=True),
    ),
    "dgl.nn.pytorch.conv": (
        RoutedLayer("GATConv", "gat_conv", drops=True),
        RoutedLayer("GATv2Conv", "gatv2_conv", drops=True),
        RoutedLayer("DotGatConv", "dot_gat_conv"),
        RoutedLayer("EdgeGATConv", "edge_gat_conv", drops=True),
        RoutedLayer("AGNNConv", "agnn_conv"),
        RoutedLayer("HGTConv", "hgt_conv"),
        RoutedLayer("GraphConv", "graph_conv"),
        RoutedLayer("SAGEConv", "sage_conv"),
        RoutedLayer("RelGraphConv", "rel_graph_conv"),
        RoutedLayer("NNConv", "nn_conv"),
        RoutedLayer("CFConv", "cf_conv"),
        RoutedLayer("EdgeConv", "edge_conv"),
        RoutedLayer("EGATConv", "egat_conv"),
        RoutedLayer("EGNNConv", "egnn_conv"),
        RoutedLayer("GatedGCNConv", "gated_gcn_conv"),
        RoutedLayer("APPNPConv", "appnp_conv"),
        RoutedLayer("ChebConv"),
        RoutedLayer("GCN2Conv"),
        RoutedLayer("GINConv"),
        RoutedLayer("GMMConv"),
        RoutedLayer("GatedGraphConv"),
        RoutedLayer("SGConv"),
        RoutedLayer("TAGConv"),
    ),
}
"""By module, the layers that have a route: all that lists layers reads it here."""


_POOLING = "pooling has no route"
_COLOURS = "colours of nodes are counted, not aggregated"

UNROUTED = {
    "torch_geometric.nn.conv": {"WLConv": _COLOURS},
    "torch_geometric.nn.pool": dict.fromkeys(
        (
            "TopKPooling",
            "SAGPooling",
            "EdgePooling",
            "ClusterPooling",
            "ASAPooling",
            "PANPooling",
            "MemPooling",
        ),
        _POOLING,
    ),
    # DGL's other readouts are sums and maxima of segments, which have a route.
    "dgl.nn.pytorch.glob": dict.fromkeys(
        ("SortPooling", "SetTransformerEncoder", "SetTransformerDecoder"), _POOLING
    ),
}
"""By module, classes that aggregate and pass no messages, and why they run upstream's code where
no function that they call has a route."""

GLOBAL_POOLING = {
    "sum": ("global_add_pool", _POOLING),
    "mean": ("global_mean_pool", _POOLING),
    "max": ("global_max_pool", _POOLING),
}
"""PyG's functions of this kind, by the reduction that they ask for."""


def label_of(cls: type) -> str:
    """The name under which calls of a layer are counted: with its package, except for PyG's own.

    Two libraries have layers of the same name; your own classes go by theirs.
    """
    package = cls.__module__.partition(".")[0]
    return f"{package}.{cls.__name__}" if package in PACKAGES[1:] else cls.__name__


def dropping_classes() -> tuple[type, ...]:
    """The layers that draw other random numbers on their route, of modules imported by now."""
    return tuple(
        vars(sys.modules[module])[layer.name]
        for module, layers in LAYERS.items()
        if module in sys.modules  # it may be in the midst of its import
        for layer in layers
        if layer.drops and layer.name in vars(sys.modules[module])
    )
