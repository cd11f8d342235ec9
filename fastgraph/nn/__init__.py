"""Layers of fastgraph's own, and graph transformers that train without the graph."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fastgraph.nn.answer import Answer
from fastgraph.nn.auto_tuner import AutoTuner
from fastgraph.nn.block_profile import BlockProfile, fastest_block
from fastgraph.nn.clusters import clusters_of_cache
from fastgraph.nn.conditions import Conditions, conditions
from fastgraph.nn.dual_attention import DualInterleavedAttention, DualReport
from fastgraph.nn.dual_pattern import DualPattern, dual_pattern
from fastgraph.nn.global_attention import GlobalAGNN, GlobalGAT, GlobalVA
from fastgraph.nn.global_module import GlobalModule
from fastgraph.nn.graph_transformer import GraphTransformer
from fastgraph.nn.graphormer import Graphormer
from fastgraph.nn.large_gt import LargeGT
from fastgraph.nn.learning_rate import polynomial_decay
from fastgraph.nn.local_module import LocalModule
from fastgraph.nn.positions import with_random_signs
from fastgraph.nn.probe import Probe
from fastgraph.nn.reformation import Reformation
from fastgraph.nn.schedule import Schedule, period_of_share
from fastgraph.nn.transformer_layer import TransformerLayer

if TYPE_CHECKING:
    from fastgraph.pyg.biased_gps_conv import GPSConv

__all__ = [
    "Answer",
    "AutoTuner",
    "BlockProfile",
    "Conditions",
    "DualInterleavedAttention",
    "DualPattern",
    "DualReport",
    "GPSConv",
    "GlobalAGNN",
    "GlobalGAT",
    "GlobalModule",
    "GlobalVA",
    "GraphTransformer",
    "Graphormer",
    "LargeGT",
    "LocalModule",
    "Probe",
    "Reformation",
    "Schedule",
    "TransformerLayer",
    "clusters_of_cache",
    "conditions",
    "dual_pattern",
    "fastest_block",
    "period_of_share",
    "polynomial_decay",
    "with_random_signs",
]


def __getattr__(name: str) -> Any:
    """``GPSConv``, a layer of PyG's, on first use, as the others do without PyG."""
    if name == "GPSConv":
        return importlib.import_module("fastgraph.pyg.biased_gps_conv").GPSConv
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
