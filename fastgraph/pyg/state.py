"""Conditions on the state of a layer that the routes of message passing share.

Names stand where they are used: constants of a module would be compared at each call of compiled
code, one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_geometric.nn.conv import MessagePassing

from fastgraph.plugins.refusal import Refusal
from fastgraph.pyg.aggregations import reduction_of

_NO_VALUE = Refusal("node_dim or flow has no value that it may have")


def module_refusal(module: MessagePassing, cls: type[MessagePassing]) -> Refusal | None:
    """Why the state of a layer, apart from its message, must be left to upstream.

    Its aggregation must be one reduction.
    """
    if cls.aggregate is not MessagePassing.aggregate:
        return Refusal("aggregate is overridden")
    if cls.update is not MessagePassing.update:
        return Refusal("update is overridden")
    if cls._index_select is not MessagePassing._index_select:
        return Refusal("_index_select is overridden")
    refusal = state_refusal(module)
    if refusal is not None:
        return refusal
    reduction = reduction_of(module.aggr_module)
    return reduction if isinstance(reduction, Refusal) else None


def state_refusal(module: MessagePassing) -> Refusal | None:
    """Why the state of a layer, apart from its class and aggregation, must be left to upstream."""
    attributes = vars(module)
    for name in ("message", "aggregate", "update", "message_and_aggregate", "collect"):
        if name in attributes:
            return Refusal(f"{name} is overridden on the instance")
    if has_hook(attributes):
        return Refusal("a message-passing hook is set")
    if type(module.node_dim) is not int or type(module.flow) is not str:
        return _NO_VALUE
    if module.flow not in ("source_to_target", "target_to_source"):
        return _NO_VALUE
    if module.explain:
        return Refusal("explaining")
    if module.decomposed_layers > 1:
        return Refusal("decomposed_layers > 1")
    return None


def has_hook(attributes: Mapping[str, Any]) -> bool:
    """True if a layer with these attributes has a hook on a part of ``propagate``."""
    return bool(
        attributes["_propagate_forward_pre_hooks"]
        or attributes["_propagate_forward_hooks"]
        or attributes["_message_forward_pre_hooks"]
        or attributes["_message_forward_hooks"]
        or attributes["_aggregate_forward_pre_hooks"]
        or attributes["_aggregate_forward_hooks"]
        or attributes["_message_and_aggregate_forward_pre_hooks"]
        or attributes["_message_and_aggregate_forward_hooks"]
    )
