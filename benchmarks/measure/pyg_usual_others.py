"""PyG's aggregations, pooling and models in usual configurations, and how they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.nn import aggr, models, pool

from measure.given import EDGE_FEATURES, Given, Usual
from measure.pyg_usual import mlp


class Called(nn.Module):
    """A function as a layer without parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any) -> Any:
        return self._function(*args)


def _grouped(layer: Any, given: Given) -> Any:
    return layer(given.x, given.batch)


def _aggregation(cls: Any, *args: Any, **options: Any) -> Usual:
    return Usual(lambda g: cls(*args, **options), _grouped, takes_flow=False)


def _sized(cls: Any, *args: Any, **options: Any) -> Usual:
    return Usual(
        lambda g: cls(g.channels, g.channels, *args, **options), _grouped, takes_flow=False
    )


_SETS = {"heads": 2}

AGGREGATIONS: dict[str, Usual] = {
    "MultiAggregation": _aggregation(aggr.MultiAggregation, ["mean", "max"]),
    "SumAggregation": _aggregation(aggr.SumAggregation),
    "MeanAggregation": _aggregation(aggr.MeanAggregation),
    "MaxAggregation": _aggregation(aggr.MaxAggregation),
    "MinAggregation": _aggregation(aggr.MinAggregation),
    "MulAggregation": _aggregation(aggr.MulAggregation),
    "VarAggregation": _aggregation(aggr.VarAggregation),
    "StdAggregation": _aggregation(aggr.StdAggregation),
    "SoftmaxAggregation": _aggregation(aggr.SoftmaxAggregation, learn=True),
    "PowerMeanAggregation": _aggregation(aggr.PowerMeanAggregation, learn=True),
    "MedianAggregation": _aggregation(aggr.MedianAggregation),
    "QuantileAggregation": _aggregation(aggr.QuantileAggregation, 0.5),
    "LSTMAggregation": _sized(aggr.LSTMAggregation),
    "GRUAggregation": _sized(aggr.GRUAggregation),
    "Set2Set": Usual(lambda g: aggr.Set2Set(g.channels, 2), _grouped),
    "DegreeScalerAggregation": Usual(
        lambda g: aggr.DegreeScalerAggregation(
            ["mean", "max"], ["identity", "amplification"], torch.bincount(torch.bincount(g.batch))
        ),
        _grouped,
    ),
    "SortAggregation": _aggregation(aggr.SortAggregation, 4),
    "GraphMultisetTransformer": Usual(
        lambda g: aggr.GraphMultisetTransformer(g.channels, 4, **_SETS), _grouped
    ),
    "AttentionalAggregation": Usual(
        lambda g: aggr.AttentionalAggregation(mlp(g.channels, 1)), _grouped
    ),
    "MLPAggregation": _sized(aggr.MLPAggregation, 10, num_layers=1),
    "DeepSetsAggregation": Usual(
        lambda g: aggr.DeepSetsAggregation(mlp(g.channels, g.channels)), _grouped
    ),
    "SetTransformerAggregation": Usual(
        lambda g: aggr.SetTransformerAggregation(g.channels, **_SETS), _grouped
    ),
    "LCMAggregation": _sized(aggr.LCMAggregation),
    "VariancePreservingAggregation": _aggregation(aggr.VariancePreservingAggregation),
    "PatchTransformerAggregation": _sized(aggr.PatchTransformerAggregation, 2, 8, 1),
}
"""Aggregations that are called by themselves, on about ten rows for each result."""

AGGREGATIONS_ELSEWHERE = {
    "Aggregation": "the base of the others",
    "EquilibriumAggregation": "differentiates within its forward pass",
}


def _pooled(layer: Any, given: Given) -> Any:
    return layer(given.x, given.edges, batch=given.batch)


def _by_batch(function: Callable[..., Tensor]) -> Usual:
    return Usual(lambda g: Called(function), _grouped, takes_flow=False)


POOLING: dict[str, Usual] = {
    "global_add_pool": _by_batch(pyg.global_add_pool),
    "global_mean_pool": _by_batch(pyg.global_mean_pool),
    "global_max_pool": _by_batch(pyg.global_max_pool),
    "TopKPooling": Usual(lambda g: pool.TopKPooling(g.channels), _pooled, takes_flow=False),
    "SAGPooling": Usual(lambda g: pool.SAGPooling(g.channels), _pooled, takes_flow=False),
    "ASAPooling": Usual(lambda g: pool.ASAPooling(g.channels), _pooled, takes_flow=False),
    "EdgePooling": Usual(lambda g: pool.EdgePooling(g.channels), _pooled, takes_flow=False),
    "ClusterPooling": Usual(lambda g: pool.ClusterPooling(g.channels), _pooled, takes_flow=False),
    "MemPooling": Usual(
        lambda g: pool.MemPooling(g.channels, g.channels, 2, 3),
        _grouped,
        takes_flow=False,
    ),
}


def _plain(layer: Any, given: Given) -> Any:
    return layer(given.x, given.edges)


def _stack(cls: Any, **options: Any) -> Usual:
    return Usual(lambda g: cls(g.channels, g.channels, 2, **options), _plain, takes_flow=False)


def _model(build: Callable[[Given], nn.Module], call: Callable[[Any, Given], Any]) -> Usual:
    return Usual(build, call, takes_flow=False)


def _infomax(given: Given) -> nn.Module:
    c = given.channels
    return models.DeepGraphInfomax(
        c, pyg.GCNConv(c, c), lambda z, *_: z.mean(0), lambda x, edges: (x.flip(0), edges)
    )


def _schnet(given: Given) -> nn.Module:
    """On the edges that are given, which are of any length, instead of near ones."""
    return models.SchNet(
        given.channels,
        given.channels,
        num_interactions=1,
        num_gaussians=EDGE_FEATURES,
        interaction_graph=lambda pos, batch: (
            given.edges,
            (pos[given.edges[0].long()] - pos[given.edges[1].long()]).norm(dim=-1),
        ),
    )


MODELS: dict[str, Usual] = {
    "GCN": _stack(models.GCN),
    "GraphSAGE": _stack(models.GraphSAGE),
    "GIN": _stack(models.GIN),
    "GAT": _stack(models.GAT, heads=2),
    "GAT, v2": _stack(models.GAT, heads=2, v2=True),
    "PNA": _model(
        lambda g: models.PNA(
            g.channels,
            g.channels,
            2,
            aggregators=["mean", "max", "std"],
            scalers=["identity", "amplification"],
            deg=g.degrees,
        ),
        _plain,
    ),
    "EdgeCNN": _stack(models.EdgeCNN),
    "DeepGraphInfomax": _model(_infomax, lambda m, g: m(g.x, g.edges)),
    "GAE": _model(
        lambda g: models.GAE(pyg.GCNConv(g.channels, g.channels)),
        lambda m, g: m.decode(m.encode(g.x, g.edges), g.edges),
    ),
    "SignedGCN": _model(
        lambda g: models.SignedGCN(g.channels, g.channels, 2),
        lambda m, g: m(g.x, g.edges, g.edges.flip(1)),
    ),
    "GraphUNet": _model(lambda g: models.GraphUNet(g.channels, g.channels, 4, 1), _plain),
    "SchNet": _model(_schnet, lambda m, g: m(g.node_kinds, g.pos, g.batch)),
    "DeepGCNLayer": _model(
        lambda g: models.DeepGCNLayer(pyg.GCNConv(g.channels, g.channels), act=nn.ReLU()), _plain
    ),
    "LabelPropagation": _model(
        lambda g: models.LabelPropagation(2, 0.5), lambda m, g: m(g.x, g.edges)
    ),
    "CorrectAndSmooth": _model(
        lambda g: models.CorrectAndSmooth(2, 0.5, 2, 0.5, autoscale=False),
        lambda m, g: m.smooth(g.x, g.x[:2], torch.tensor([0, 1]), g.edges),
    ),
    "AttentiveFP": _model(
        lambda g: models.AttentiveFP(g.channels, g.channels, g.channels, EDGE_FEATURES, 2, 1),
        lambda m, g: m(g.x, g.edges, g.features, g.batch),
    ),
    "RECT_L": _model(lambda g: models.RECT_L(g.channels, g.channels), _plain),
    "LINKX": _model(
        lambda g: models.LINKX(g.num_nodes, g.channels, g.channels, g.channels, 1), _plain
    ),
    "LightGCN": _model(
        lambda g: models.LightGCN(g.num_nodes, g.channels, 2), lambda m, g: m(g.edges)
    ),
    "GroupAddRev": _model(
        lambda g: models.GroupAddRev(pyg.SAGEConv(g.channels // 2, g.channels // 2), num_groups=2),
        lambda m, g: m(g.x.clone(), g.edges).clone(),  # it frees the memory of both
    ),
    "PMLP": _model(lambda g: models.PMLP(g.channels, g.channels, g.channels, 2).eval(), _plain),
    "NeuralFingerprint": _model(
        lambda g: models.NeuralFingerprint(g.channels, g.channels, g.channels, 2),
        lambda m, g: m(g.x, g.edges, g.batch),
    ),
    "SGFormer": _model(
        lambda g: models.SGFormer(
            g.channels, g.channels, g.channels, trans_dropout=0.0, gnn_dropout=0.0
        ),
        lambda m, g: m(g.x, g.edges, g.batch),
    ),
    "Polynormer": _model(
        lambda g: models.Polynormer(g.channels, g.channels, g.channels, 2, 1, 0.0, 0.0, 0.0),
        lambda m, g: m(g.x, g.edges, g.batch),
    ),
}
"""Models that pass messages, of two layers where that can be chosen, without dropout."""
