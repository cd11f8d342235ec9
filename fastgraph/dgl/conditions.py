"""Conditions that all routes of DGL share, each answering with the reason or ``None``."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgraph.dgl.structure import Structure
from fastgraph.routing.conditions import execution_mode, too_few_edges


def call_refusal(structure: Structure, features: Tensor) -> str | None:
    """Why a call on these edges and features must be left to upstream."""
    if torch.compiler.is_compiling():
        return "within torch.compile, which does not look into DGL's graphs"
    reason = execution_mode()
    if reason is not None:
        return reason
    if features.device != structure.index.device:
        return "features and graph on different devices"
    if torch.is_autocast_enabled(features.device.type):
        return "under autocast, in which DGL's own functions take one dtype only"
    return too_few_edges(len(structure.index))
