"""The route of ``GPSConv`` with multi-head attention: no padding and no mask of pairs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import MultiheadAttention
from torch_geometric.nn.conv import GPSConv

from fastgraph.layers.multihead import self_attention, self_attention_refusal
from fastgraph.ops.library import is_defined_by
from fastgraph.plugins.backend import device_type
from fastgraph.plugins.patching import Patches
from fastgraph.plugins.refusal import Refusal
from fastgraph.registry.registry import REGISTRY
from fastgraph.routing.conditions import execution_mode, plain_tensor
from fastgraph.routing.dispatch import Computation, refuse, replace_method
from fastgraph.routing.sizes import is_too_small_to_attend
from fastgraph.routing.status import count_too_small
from fastgraph.upstream import label_of


def install(patches: Patches) -> None:
    """Replace ``GPSConv.forward``."""
    replace_method(patches, GPSConv, "forward", plan)


def plan(
    module: GPSConv, x: Any, edge_index: Any, batch: Tensor | None = None, **kwargs: Any
) -> Computation | Refusal | None:
    """The forward pass of a call, or the reason to leave it to upstream.

    ``None`` for one small graph; on a device without the operator, where ``strict`` allows it; for
    other attention than ``MultiheadAttention``, which is linear already; for sharded features, of
    which that has a rule of its own; and while code is compiled, as whether a batch is sorted is in
    its values.
    """
    attention = module.attn
    if not isinstance(attention, MultiheadAttention) or is_defined_by(x):
        return None
    if torch.compiler.is_compiling():
        return None
    refusal = execution_mode() or plain_tensor("x", x)
    if refusal is None and not x.is_cpu:
        no_backend = REGISTRY.refusal("dense_attention", device_type(x), x.dtype)
        if no_backend is not None:  # then there is no route on this device
            refuse(module, no_backend, has_route=False)
            return None
    refusal = refusal or self_attention_refusal(attention, x)
    if refusal is not None:
        return refusal
    if batch is None and is_too_small_to_attend(len(x)):
        count_too_small(label_of(type(module)))
        return None
    ptr = graph_offsets(x, batch)
    if isinstance(ptr, Refusal):
        return ptr
    attend = partial(self_attention, attention, x, ptr)
    return lambda: layer_output(module, x, edge_index, batch, kwargs, attend)


def graph_offsets(
    x: Tensor, batch: Any, *, name: str = "batch", size: int | None = None
) -> Tensor | Refusal:
    """The offsets of graphs among the nodes, or why a batch has none.

    Args:
        x: ``[nodes, channels]``.
        batch: the graph of each node, int64 ``[nodes]``, ascending; ``None`` for one graph.
        name: of the batch, for the reason.
        size: how many graphs there are; default: as many as the last node says.

    Returns:
        int64 ``[graphs + 1]``.
    """
    if len(x) == 0:
        return Refusal("no nodes")
    if batch is None:
        return torch.tensor([0, len(x)], device=x.device)
    refusal = plain_tensor(name, batch)
    if refusal is not None:
        return refusal
    if batch.dtype != torch.int64 or batch.shape != x.shape[:1] or batch.device != x.device:
        return Refusal(f"{name} is no int64 for each node, on the device of the features")
    if batch[0] < 0 or (batch[1:] < batch[:-1]).any():
        return Refusal(f"{name} is not sorted")
    least = int(batch[-1]) + 1
    if size is None:
        size = least
    elif type(size) is not int or size < least:
        return Refusal(f"{name} has more graphs than there are")
    # torch's function reads memory without its strides.
    return torch._convert_indices_from_coo_to_csr(batch.contiguous(), size)


def layer_output(
    module: GPSConv,
    x: Tensor,
    edge_index: Any,
    batch: Tensor | None,
    kwargs: dict[str, Any],
    attend: Callable[[], Tensor],
) -> Tensor:
    """The output of a ``GPSConv`` whose attention is called after its ``conv``.

    Args:
        module: the layer.
        x: as it is called.
        edge_index: likewise.
        batch: likewise.
        kwargs: likewise.
        attend: computes the attention of all nodes, ``[nodes, channels]``.
    """

    def normalised(norm: Any, h: Tensor) -> Tensor:
        if norm is None:
            return h
        return norm(h, batch=batch) if module.norm_with_batch else norm(h)  # type: ignore[no-any-return]

    hs = []
    if module.conv is not None:
        h = module.conv(x, edge_index, **kwargs)
        h = F.dropout(h, p=module.dropout, training=module.training)
        hs.append(normalised(module.norm1, h + x))
    h = attend()
    h = F.dropout(h, p=module.dropout, training=module.training)
    hs.append(normalised(module.norm2, h + x))
    out = sum(hs)
    return normalised(module.norm3, out + module.mlp(out))
