"""Operations to be done on an ordinary and on a sharded graph: one file for each kind."""

from __future__ import annotations

from tests.dist.probes import (
    edges,
    groups,
    indexing,
    layers,
    pointwise,
    products,
    reductions,
    shapes,
    training,
    values,
)
from tests.dist.probes.probe import PROBES, Probe, m

__all__ = [
    "PROBES",
    "Probe",
    "edges",
    "groups",
    "indexing",
    "layers",
    "m",
    "pointwise",
    "products",
    "reductions",
    "shapes",
    "training",
    "values",
]
