"""PyG's convolutions in their usual configurations, and how they are called."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch_geometric.nn as pyg
from torch import nn

from measure.given import EDGE_FEATURES, RELATIONS, Given, Usual, heads_of, plainly

ELSEWHERE = {
    "MessagePassing": "the base of the others",
    "CuGraphSAGEConv": "needs cuGraph",
    "CuGraphGATConv": "needs cuGraph",
    "CuGraphRGCNConv": "needs cuGraph",
}
"""Names of ``torch_geometric.nn.conv`` that are not listed, and why."""

_METADATA = (["a", "b"], [("a", "to", "b"), ("b", "of", "a")])
_AGGREGATORS, _SCALERS = ["mean", "min", "max", "std"], ["identity", "amplification", "attenuation"]


def _with_features(layer: Any, given: Given) -> Any:
    return layer(given.x, given.edges, given.features)


def _with_rows(layer: Any, given: Given) -> Any:
    return layer(given.x, given.edges, given.rows)


def _weighted(layer: Any, given: Given) -> Any:
    return layer(given.x, given.edges, given.weight)


def _with_kinds(layer: Any, given: Given) -> Any:
    return layer(given.x, given.edges, given.kinds)


def _twice(layer: Any, given: Given) -> Any:
    return layer(given.x, given.x, given.edges)


def _at_positions(layer: Any, given: Given) -> Any:
    return layer(given.x, given.pos, given.edges)


def _by_kind(layer: Any, given: Given) -> Any:
    return layer(given.x_by_kind, given.relations)


def mlp(*channels: int) -> nn.Sequential:
    """Linear maps with ReLU between them."""
    maps = [nn.Linear(a, b) for a, b in itertools.pairwise(channels)]
    return nn.Sequential(*(part for m in maps for part in (m, nn.ReLU())))[:-1]


def _wide(cls: Any, *args: Any, **options: Any) -> Callable[[Given], nn.Module]:
    """As many channels as it gets."""
    return lambda g: cls(g.channels, g.channels, *args, **options)


def _headed(cls: Any, **options: Any) -> Callable[[Given], nn.Module]:
    def build(given: Given) -> nn.Module:
        heads = heads_of(given.channels)
        layer: nn.Module = cls(given.channels, given.channels // heads, heads=heads, **options)
        return layer

    return build


def _relational_attention(given: Given) -> nn.Module:
    heads = heads_of(given.channels)
    c = given.channels
    return pyg.RGATConv(c, c // heads, RELATIONS, heads=heads)


def _heat(given: Given) -> nn.Module:
    heads = heads_of(given.channels)
    c = given.channels
    return pyg.HEATConv(c, c // heads, RELATIONS, RELATIONS, 5, EDGE_FEATURES, 6, heads=heads)


def _pna(**options: Any) -> Callable[[Given], nn.Module]:
    return lambda g: pyg.PNAConv(
        g.channels, g.channels, _AGGREGATORS, _SCALERS, g.degrees, **options
    )


def _nn_conv(given: Given) -> nn.Module:
    c = given.channels
    return pyg.NNConv(c, c, mlp(EDGE_FEATURES, 8, c * c))


def _point_gnn(given: Given) -> nn.Module:
    c = given.channels
    return pyg.PointGNNConv(mlp(c, c, 3), mlp(c + 3, c, c), mlp(c, c, c))


def _hetero(given: Given) -> nn.Module:
    c = given.channels
    return pyg.HeteroConv({relation: pyg.SAGEConv(c, c) for relation in given.relations})


CONVS: dict[str, Usual] = {
    "SimpleConv": Usual(lambda g: pyg.SimpleConv(), plainly, takes_pair=True),
    "SimpleConv, max": Usual(lambda g: pyg.SimpleConv(aggr="max"), plainly, takes_pair=True),
    "GCNConv": Usual(_wide(pyg.GCNConv), plainly),
    "GCNConv, weighted": Usual(_wide(pyg.GCNConv), _weighted),
    "ChebConv": Usual(_wide(pyg.ChebConv, K=3), plainly),
    "SAGEConv": Usual(_wide(pyg.SAGEConv), plainly, takes_pair=True),
    "SAGEConv, max": Usual(_wide(pyg.SAGEConv, aggr="max"), plainly, takes_pair=True),
    "SAGEConv, mean and max": Usual(
        _wide(pyg.SAGEConv, aggr=["mean", "max"]), plainly, takes_pair=True
    ),
    "SAGEConv, softmax": Usual(_wide(pyg.SAGEConv, aggr="softmax"), plainly, takes_pair=True),
    "GraphConv": Usual(_wide(pyg.GraphConv), plainly, takes_pair=True),
    "GraphConv, weighted": Usual(_wide(pyg.GraphConv), _weighted, takes_pair=True),
    "GravNetConv": Usual(
        lambda g: pyg.GravNetConv(g.channels, g.channels, 3, g.channels, 4),
        lambda m, g: m(g.x, g.batch),
    ),
    "GatedGraphConv": Usual(lambda g: pyg.GatedGraphConv(g.channels, 2), plainly),
    "ResGatedGraphConv": Usual(_wide(pyg.ResGatedGraphConv), plainly, takes_pair=True),
    "ResGatedGraphConv, edges": Usual(
        _wide(pyg.ResGatedGraphConv, edge_dim=EDGE_FEATURES), _with_features, takes_pair=True
    ),
    "GATConv": Usual(_headed(pyg.GATConv), plainly, takes_pair=True),
    "GATConv, edges": Usual(
        _headed(pyg.GATConv, edge_dim=EDGE_FEATURES), _with_features, takes_pair=True
    ),
    "FusedGATConv": Usual(
        _headed(pyg.FusedGATConv, add_self_loops=False),
        lambda m, g: m(g.x, *m.to_graph_format(g.edges, (g.num_nodes, g.num_nodes))),
    ),
    "GATv2Conv": Usual(_headed(pyg.GATv2Conv), plainly, takes_pair=True),
    "GATv2Conv, edges": Usual(
        _headed(pyg.GATv2Conv, edge_dim=EDGE_FEATURES), _with_features, takes_pair=True
    ),
    "TransformerConv": Usual(_headed(pyg.TransformerConv), plainly, takes_pair=True),
    "TransformerConv, edges": Usual(
        _headed(pyg.TransformerConv, edge_dim=EDGE_FEATURES), _with_features, takes_pair=True
    ),
    "AGNNConv": Usual(lambda g: pyg.AGNNConv(), plainly),
    "TAGConv": Usual(_wide(pyg.TAGConv), plainly),
    "GINConv": Usual(
        lambda g: pyg.GINConv(mlp(g.channels, g.channels, g.channels)), plainly, takes_pair=True
    ),
    "GINEConv": Usual(
        lambda g: pyg.GINEConv(mlp(g.channels, g.channels, g.channels)),
        _with_rows,
        takes_pair=True,
    ),
    "GINEConv, few features": Usual(
        lambda g: pyg.GINEConv(mlp(g.channels, g.channels), edge_dim=EDGE_FEATURES),
        _with_features,
        takes_pair=True,
    ),
    "ARMAConv": Usual(_wide(pyg.ARMAConv), plainly),
    "SGConv": Usual(_wide(pyg.SGConv, K=2), plainly),
    "SSGConv": Usual(_wide(pyg.SSGConv, alpha=0.1, K=2), plainly),
    "APPNP": Usual(lambda g: pyg.APPNP(K=3, alpha=0.1), plainly),
    "MFConv": Usual(_wide(pyg.MFConv), plainly, takes_pair=True),
    "RGCNConv": Usual(_wide(pyg.RGCNConv, RELATIONS), _with_kinds, takes_pair=True),
    "RGCNConv, bases": Usual(
        _wide(pyg.RGCNConv, RELATIONS, num_bases=2), _with_kinds, takes_pair=True
    ),
    "FastRGCNConv": Usual(_wide(pyg.FastRGCNConv, RELATIONS), _with_kinds, takes_pair=True),
    "RGATConv": Usual(_relational_attention, _with_kinds),
    "SignedConv": Usual(
        _wide(pyg.SignedConv, first_aggr=True), lambda m, g: m(g.x, g.edges, g.edges.flip(1))
    ),
    "DNAConv": Usual(
        lambda g: pyg.DNAConv(g.channels, heads=heads_of(g.channels)),
        lambda m, g: m(g.x.unsqueeze(1).expand(-1, 3, -1), g.edges),
    ),
    "PointNetConv": Usual(
        lambda g: pyg.PointNetConv(mlp(g.channels + 3, g.channels, g.channels)),
        _at_positions,
        takes_pair=True,
    ),
    "GMMConv": Usual(
        _wide(pyg.GMMConv, dim=EDGE_FEATURES, kernel_size=3), _with_features, takes_pair=True
    ),
    "SplineConv": Usual(
        _wide(pyg.SplineConv, dim=EDGE_FEATURES, kernel_size=3),
        lambda m, g: m(g.x, g.edges, g.features.sigmoid()),
    ),
    "NNConv": Usual(_nn_conv, _with_features, takes_pair=True),
    "CGConv": Usual(lambda g: pyg.CGConv(g.channels), plainly),
    "CGConv, edges": Usual(
        lambda g: pyg.CGConv(g.channels, EDGE_FEATURES), _with_features, takes_pair=True
    ),
    "EdgeConv": Usual(
        lambda g: pyg.EdgeConv(mlp(2 * g.channels, g.channels, g.channels)),
        plainly,
        takes_pair=True,
    ),
    "EdgeConv, one map": Usual(
        lambda g: pyg.EdgeConv(nn.Linear(2 * g.channels, g.channels)), plainly, takes_pair=True
    ),
    "DynamicEdgeConv": Usual(
        lambda g: pyg.DynamicEdgeConv(mlp(2 * g.channels, g.channels), 4),
        lambda m, g: m(g.x, g.batch),
    ),
    "XConv": Usual(_wide(pyg.XConv, 3, 4), lambda m, g: m(g.x, g.pos, g.batch)),
    "PPFConv": Usual(
        lambda g: pyg.PPFConv(mlp(g.channels + 4, g.channels, g.channels)),
        lambda m, g: m(g.x, g.pos, g.normal, g.edges),
    ),
    "FeaStConv": Usual(
        lambda g: pyg.FeaStConv(g.channels, g.channels, heads=4), plainly, takes_pair=True
    ),
    "PointTransformerConv": Usual(_wide(pyg.PointTransformerConv), _at_positions),
    "HypergraphConv": Usual(_wide(pyg.HypergraphConv), plainly, takes_flow=False),
    "LEConv": Usual(_wide(pyg.LEConv), plainly, takes_pair=True),
    "PNAConv": Usual(_pna(), plainly),
    "PNAConv, edges": Usual(_pna(edge_dim=EDGE_FEATURES), _with_features),
    "ClusterGCNConv": Usual(_wide(pyg.ClusterGCNConv), plainly),
    "GENConv": Usual(_wide(pyg.GENConv), plainly, takes_pair=True),
    "GENConv, edges": Usual(
        _wide(pyg.GENConv, edge_dim=EDGE_FEATURES), _with_features, takes_pair=True
    ),
    "GENConv, max": Usual(_wide(pyg.GENConv, aggr="max"), plainly, takes_pair=True),
    "GENConv, mean, edges": Usual(_wide(pyg.GENConv, aggr="mean"), _with_rows, takes_pair=True),
    "GCN2Conv": Usual(lambda g: pyg.GCN2Conv(g.channels, alpha=0.1), _twice),
    "PANConv": Usual(_wide(pyg.PANConv, 1), lambda m, g: m(g.x, g.edges)[0]),
    "WLConv": Usual(lambda g: pyg.WLConv(), lambda m, g: m(g.node_kinds, g.edges)),
    "WLConvContinuous": Usual(lambda g: pyg.WLConvContinuous(), plainly),
    "FiLMConv": Usual(_wide(pyg.FiLMConv), plainly, takes_pair=True),
    "FiLMConv, relations": Usual(_wide(pyg.FiLMConv, RELATIONS), _with_kinds, takes_pair=True),
    "SuperGATConv": Usual(_headed(pyg.SuperGATConv), plainly),
    "FAConv": Usual(lambda g: pyg.FAConv(g.channels), _twice),
    "EGConv": Usual(_wide(pyg.EGConv), plainly),
    "EGConv, several": Usual(_wide(pyg.EGConv, aggregators=["symnorm", "max", "std"]), plainly),
    "PDNConv": Usual(_wide(pyg.PDNConv, EDGE_FEATURES, 8), _with_features),
    "GeneralConv": Usual(_wide(pyg.GeneralConv), plainly, takes_pair=True),
    "GeneralConv, attention": Usual(
        _wide(pyg.GeneralConv, attention=True, heads=2), plainly, takes_pair=True
    ),
    "HGTConv": Usual(
        lambda g: pyg.HGTConv(g.channels, g.channels, _METADATA, heads_of(g.channels)),
        _by_kind,
        takes_flow=False,
    ),
    "HEATConv": Usual(_heat, lambda m, g: m(g.x, g.edges, g.node_kinds, g.kinds, g.features)),
    "HeteroConv": Usual(_hetero, _by_kind),
    "HANConv": Usual(
        lambda g: pyg.HANConv(g.channels, g.channels, _METADATA, heads_of(g.channels)),
        _by_kind,
        takes_flow=False,
    ),
    "LGConv": Usual(lambda g: pyg.LGConv(), plainly),
    "PointGNNConv": Usual(_point_gnn, _at_positions),
    "GPSConv": Usual(
        lambda g: pyg.GPSConv(g.channels, pyg.GINConv(mlp(g.channels, g.channels)), heads=2),
        lambda m, g: m(g.x, g.edges, g.batch),
    ),
    "AntiSymmetricConv": Usual(lambda g: pyg.AntiSymmetricConv(g.channels), plainly),
    "DirGNNConv": Usual(
        lambda g: pyg.DirGNNConv(pyg.SAGEConv(g.channels, g.channels)), plainly, takes_flow=False
    ),
    "MixHopConv": Usual(_wide(pyg.MixHopConv), plainly),
    "MeshCNNConv": Usual(
        _wide(pyg.MeshCNNConv), lambda m, g: m(g.x, g.four_neighbours), takes_flow=False
    ),
}
"""By name: that of a class alone is its usual configuration, a word behind a comma says what else
is usual."""
