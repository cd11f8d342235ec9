"""Table of known message functions of upstream, by identity.

A class is routed when its ``message`` *is* one of these functions, so that subclasses which inherit
it come along and a subclass which overrides it runs its own code.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Message:
    """A message ``x_j`` or ``w * x_j``.

    Attributes:
        weight: the ``propagate`` argument that holds one factor for each edge, if the message has
            one. A weight of ``None`` at run time means ``x_j``, if ``optional``.
        optional: whether the message accepts no weight.
    """

    weight: str | None = None
    optional: bool = True

    @property
    def collected(self) -> bool:
        """True if PyG takes a weight that is not given from a sparse matrix's values."""
        return self.weight == "edge_weight"


_COPY = Message()
_OPTIONAL = Message("edge_weight")
_REQUIRED = Message("edge_weight", optional=False)

# (module below torch_geometric.nn, class, its message)
_MESSAGES = (
    ("conv.message_passing", "MessagePassing", _COPY),
    ("conv.sage_conv", "SAGEConv", _COPY),
    ("conv.gin_conv", "GINConv", _COPY),
    ("conv.mf_conv", "MFConv", _COPY),
    ("conv.signed_conv", "SignedConv", _COPY),
    ("conv.gcn_conv", "GCNConv", _OPTIONAL),
    ("conv.appnp", "APPNP", _OPTIONAL),
    ("conv.gated_graph_conv", "GatedGraphConv", _OPTIONAL),
    ("conv.gcn2_conv", "GCN2Conv", _OPTIONAL),
    ("conv.graph_conv", "GraphConv", _OPTIONAL),
    ("conv.lg_conv", "LGConv", _OPTIONAL),
    ("conv.mixhop_conv", "MixHopConv", _OPTIONAL),
    ("conv.simple_conv", "SimpleConv", _OPTIONAL),
    ("conv.tag_conv", "TAGConv", _OPTIONAL),
    ("conv.wl_conv_continuous", "WLConvContinuous", _OPTIONAL),
    ("models.label_prop", "LabelPropagation", _OPTIONAL),
    ("conv.arma_conv", "ARMAConv", _REQUIRED),
    ("conv.cluster_gcn_conv", "ClusterGCNConv", _REQUIRED),
    ("conv.pan_conv", "PANConv", _REQUIRED),
    ("conv.pdn_conv", "PDNConv", _REQUIRED),
    ("conv.sg_conv", "SGConv", _REQUIRED),
    ("conv.ssg_conv", "SSGConv", _REQUIRED),
    ("conv.cheb_conv", "ChebConv", Message("norm", optional=False)),
)


def _defined(module: str, name: str, method: str) -> Callable[..., Any] | None:
    """A method that an upstream class itself defines; ``None`` where this PyG has none."""
    cls = getattr(importlib.import_module(f"torch_geometric.nn.{module}"), name, None)
    return None if cls is None else vars(cls).get(method)


# Tables, not cached functions: Dynamo looks into a table, but traces through a cache.
_BY_FUNCTION: dict[Callable[..., Any], Message] = {
    function: known
    for module, name, known in _MESSAGES
    if (function := _defined(module, name, "message")) is not None
}

_PRODUCTS = frozenset(
    function
    for module, name, _ in _MESSAGES
    if name != "MessagePassing"
    and (function := _defined(module, name, "message_and_aggregate")) is not None
)


def known_message(cls: type) -> Message | None:
    """The form of a class's message, if it has one, and it is known."""
    return _BY_FUNCTION.get(getattr(cls, "message", None))  # type: ignore[arg-type]


def multiplies_adjacency(cls: type) -> bool:
    """True if ``message_and_aggregate`` is a known product with the adjacency matrix."""
    return cls.message_and_aggregate in _PRODUCTS  # type: ignore[attr-defined]
