"""Conditions on the state of a layer that the routes of message passing share."""

from __future__ import annotations

from torch_geometric.nn.conv import MessagePassing

from fastgraph.plugins.refusal import Refusal
from fastgraph.pyg.aggregations import reduction_of

HOOKS = (
    "_propagate_forward_pre_hooks",
    "_propagate_forward_hooks",
    "_message_forward_pre_hooks",
    "_message_forward_hooks",
    "_aggregate_forward_pre_hooks",
    "_aggregate_forward_hooks",
    "_message_and_aggregate_forward_pre_hooks",
    "_message_and_aggregate_forward_hooks",
)
"""The attributes of a layer that hold the hooks on parts of ``propagate``."""

_FLOWS = ("source_to_target", "target_to_source")
_NO_VALUE = Refusal("node_dim or flow has no value that it may have")

_METHODS = ("message", "aggregate", "update", "message_and_aggregate", "collect")


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
    for name in _METHODS:
        if name in attributes:
            return Refusal(f"{name} is overridden on the instance")
    if any(map(attributes.__getitem__, HOOKS)):
        return Refusal("a message-passing hook is set")
    if type(module.node_dim) is not int or type(module.flow) is not str:
        return _NO_VALUE
    if module.flow not in _FLOWS:
        return _NO_VALUE
    if module.explain:
        return Refusal("explaining")
    if module.decomposed_layers > 1:
        return Refusal("decomposed_layers > 1")
    return None
