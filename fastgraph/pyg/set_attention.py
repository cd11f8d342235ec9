"""The routes of the Set Transformer's blocks, and of the aggregations that are made of them.

Lee et al., "Set Transformer: a framework for attention-based permutation-invariant neural
networks", ICML 2019; Baek et al., "Accurate learning of graph representations with graph multiset
pooling", ICLR 2021. PyG pads all sets to the largest, and computes projections, norms and attention
of what they are padded with, too. Here sets stand one after the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import LayerNorm, Linear
from torch.nn.modules.module import _has_any_global_hook
from torch_geometric.experimental import is_experimental_mode_enabled
from torch_geometric.nn.aggr import (
    Aggregation,
    GraphMultisetTransformer,
    SetTransformerAggregation,
)
from torch_geometric.nn.aggr.utils import (
    MultiheadAttentionBlock,
    PoolingByMultiheadAttention,
    SetAttentionBlock,
)

from fastgraph.layers.modules import KnownModules
from fastgraph.layers.multihead import attention, self_attention_refusal
from fastgraph.ops.library import is_defined_by
from fastgraph.plugins.backend import device_type
from fastgraph.plugins.patching import Patches
from fastgraph.plugins.refusal import Refusal
from fastgraph.pyg.gps_conv import graph_offsets
from fastgraph.registry.registry import REGISTRY
from fastgraph.routing.conditions import execution_mode, plain_tensor
from fastgraph.routing.dispatch import Computation, refuse, replace_method
from fastgraph.routing.parts import Parts, report
from fastgraph.routing.sizes import is_too_small_to_leave_out
from fastgraph.routing.status import THREAD, RouteRefusedError
from fastgraph.settings import current
from fastgraph.upstream import label_of

_KNOWN = KnownModules(PoolingByMultiheadAttention, SetAttentionBlock, Linear, LayerNorm)
_BLOCK = KnownModules(MultiheadAttentionBlock)
_UPSTREAM = MultiheadAttentionBlock.forward

_PYGS = {name: getattr(Aggregation, name) for name in ("assert_sorted_index", "to_dense_batch")}
"""Methods of aggregations that padding calls."""

_FULL = Refusal("sets fill what they are padded to: leaving the rest out would take longer")
_MOST_FILLED = 0.75

_SHAPES_STAY = "disable_dynamic_shapes"
_ARGUMENTS = ("x", "y", "x_mask", "y_mask")


def install(patches: Patches) -> None:
    """Replace ``forward`` of the aggregations and of the block that all others are made of."""
    replace_method(
        patches, SetTransformerAggregation, "forward", plan_set_transformer, decided=False
    )
    replace_method(patches, GraphMultisetTransformer, "forward", plan_multisets, decided=False)
    is_upstreams = MultiheadAttentionBlock.forward is _UPSTREAM
    replace_method(patches, MultiheadAttentionBlock, "forward", plan_block, is_small=_is_small)
    if is_upstreams:  # then so does what is in its place now
        _BLOCK.renew()


def plan_set_transformer(
    module: SetTransformerAggregation,
    x: Any,
    index: Any = None,
    ptr: Any = None,
    dim_size: Any = None,
    dim: int = -2,
    max_num_elements: Any = None,
) -> Computation | Refusal | None:
    """The forward pass of a call, or the reason to leave it to upstream.

    ``None`` while code is compiled, for sharded features and on devices without the operator.
    """
    blocks = [encoder.mab for encoder in module.encoders if type(encoder) is SetAttentionBlock]
    parts = [*module.encoders, module.pma]
    offsets = _planned(module, parts, x, index, dim_size, dim, max_num_elements)
    if not isinstance(offsets, Tensor):
        return offsets

    def compute() -> Tensor:
        rows = _kept(x)
        for block in blocks:
            rows = _block(block, rows, rows, offsets)
        pooled = _pool(module.pma, rows, offsets)
        for decoder in module.decoders:
            pooled = decoder(pooled)
        pooled = pooled.nan_to_num()
        return pooled.flatten(1, 2) if module.concat else pooled.mean(dim=1)

    return compute


def plan_multisets(
    module: GraphMultisetTransformer,
    x: Any,
    index: Any = None,
    ptr: Any = None,
    dim_size: Any = None,
    dim: int = -2,
    max_num_elements: Any = None,
) -> Computation | Refusal | None:
    """The same of the pooling by which a graph becomes a few nodes, and these one."""
    offsets = _planned(module, [module.pma1], x, index, dim_size, dim, max_num_elements)
    if not isinstance(offsets, Tensor):
        return offsets

    def compute() -> Tensor:
        pooled = _pool(module.pma1, _kept(x), offsets)
        for encoder in module.encoders:
            pooled = encoder(pooled)
        return module.pma2(pooled).squeeze(1)  # type: ignore[no-any-return]

    return compute


def plan_block(
    module: MultiheadAttentionBlock,
    x: Any,
    y: Any,
    x_mask: Tensor | None = None,
    y_mask: Tensor | None = None,
) -> Computation | Refusal | None:
    """The same of a block on padded sets: attention, of which only what is masked is left out.

    ``None`` where there is no mask of keys, besides: then nothing is padded. And where there is
    hardly any padding.
    """
    if y_mask is None or is_defined_by(x) or torch.compiler.is_compiling():
        return None
    refusal = execution_mode() or _padded("x", x) or _padded("y", y)
    if refusal is None and not x.is_cpu:
        no_backend = REGISTRY.refusal("dense_attention", device_type(x), x.dtype)
        if no_backend is not None:
            refuse(module, no_backend, has_route=False)
            return None
    refusal = refusal or _mask("y_mask", y_mask, y)
    if refusal is None and x_mask is not None:
        refusal = _mask("x_mask", x_mask, x)
    if refusal is None and (len(x) != len(y) or y.numel() == 0):
        refusal = Refusal("x and y have not as many sets, or nothing to attend to")
    if refusal is not None:
        return refusal
    for each in (x, y):
        refusal = refusal or self_attention_refusal(module.attn, each[:1].flatten(0, 1))
    if refusal is not None:
        return refusal
    is_own = x is y and x_mask is y_mask
    if not is_own and current().min_edges is None and y_mask.float().mean() > _MOST_FILLED:
        refuse(module, _FULL, has_route=False)
        return None
    return lambda: _padded_block(module, x, y, x_mask, y_mask)


def _is_small(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if the sets of a call of a block are too few to gain; asked first of all."""
    x, y, x_mask, y_mask = (
        args[i] if len(args) > i else kwargs.get(name) for i, name in enumerate(_ARGUMENTS)
    )
    if type(y_mask) is not Tensor or not y_mask.is_cpu:
        return False
    return is_too_small_to_leave_out(y_mask.numel(), is_own=x is y and x_mask is y_mask)


def _padded_block(
    module: MultiheadAttentionBlock, x: Tensor, y: Tensor, x_mask: Tensor | None, y_mask: Tensor
) -> Tensor:
    is_own = x is y and x_mask is y_mask
    # Copies, as the caller may edit masks before the backward pass.
    y_mask = y_mask.clone()
    x_mask = y_mask if is_own else None if x_mask is None else x_mask.clone()
    keys = y[y_mask]
    key_ptr = _offsets_of(y_mask)
    if is_own:
        queries, ptr = keys, key_ptr
    elif x_mask is not None:
        queries, ptr = x[x_mask], _offsets_of(x_mask)
    else:
        queries = _kept(x.flatten(0, 1))
        ptr = x.shape[1] * torch.arange(len(x) + 1, device=x.device)
    out = attention(module.attn, queries, keys, ptr, key_ptr)
    if x_mask is None:
        return _rest(module, out.view(x.shape), x)
    full = out.new_zeros(x.shape)
    full[x_mask] = out
    return _rest(module, full, x)


def _offsets_of(mask: Tensor) -> Tensor:
    """The offsets of sets among what a mask has of them."""
    ptr = torch.zeros(len(mask) + 1, dtype=torch.int64, device=mask.device)
    torch.cumsum(mask.sum(1), 0, out=ptr[1:])
    return ptr


def _padded(name: str, x: Any) -> Refusal | None:
    refusal = plain_tensor(name, x)
    if refusal is not None:
        return refusal
    return None if x.dim() == 3 else Refusal(f"{name} is not [sets, elements, channels]")


def _mask(name: str, mask: Any, x: Tensor) -> Refusal | None:
    refusal = plain_tensor(name, mask)
    if refusal is not None:
        return refusal
    if mask.dtype != torch.bool or mask.shape != x.shape[:2] or mask.device != x.device:
        return Refusal(f"{name} is no bool for each element, on the device of the features")
    return None


def _planned(
    module: Any, blocks: list[Any], x: Any, index: Any, dim_size: Any, dim: Any, most: Any
) -> Tensor | Refusal | None:
    """The offsets of the sets of a call that is routed, which is counted here, or why it is not."""
    if is_defined_by(x) or torch.compiler.is_compiling():
        return None
    refusal = execution_mode() or plain_tensor("x", x)
    if refusal is None and not x.is_cpu:
        no_backend = REGISTRY.refusal("dense_attention", device_type(x), x.dtype)
        if no_backend is not None:
            _count(module, no_backend)
            return None
    refusal = refusal or _blocks_refusal(blocks, x)
    if refusal is None and any(_is_overridden(module, name) for name in _PYGS):
        refusal = Refusal("to_dense_batch or assert_sorted_index is overridden")
    if refusal is None and (dim not in (-2, 0) or index is None):
        refusal = Refusal("no index, or another dimension than the first")
    elif refusal is None and (most is not None or is_experimental_mode_enabled(_SHAPES_STAY)):
        refusal = Refusal("max_num_elements, which may leave out elements, or shapes that stay")
    found = refusal or graph_offsets(x, index, name="index", size=dim_size)
    if isinstance(found, Tensor):
        _count(module, None)
        return found
    _count(module, found)
    if current().strict:
        raise RouteRefusedError(f"{label_of(type(module))} cannot be routed: {found}")
    return found


def _is_overridden(module: Any, name: str) -> bool:
    return name in vars(module) or getattr(type(module), name) is not _PYGS[name]


def _count(module: Any, refusal: Refusal | None) -> None:
    """Count a call, or report it to the call of ``Aggregation``, unless it is a part of a layer."""
    if not THREAD.counted or isinstance(THREAD.counted[-1], Parts):
        report(label_of(type(module)), refusal)


def _blocks_refusal(blocks: list[Any], x: Tensor) -> Refusal | None:
    """The reason if blocks compute something else on rows than on padded sets."""
    if _has_any_global_hook():
        return Refusal("hooks on all modules")
    for outer in blocks:
        if type(outer) not in (SetAttentionBlock, PoolingByMultiheadAttention):
            return Refusal("a block is of another class")
        block = outer.mab
        if type(block) is not MultiheadAttentionBlock:
            return Refusal("a block is of another class")
        maps = [block.lin, *([outer.lin] if type(outer) is PoolingByMultiheadAttention else [])]
        norms = [norm for norm in (block.layer_norm1, block.layer_norm2) if norm is not None]
        if any(type(each) is not Linear for each in maps):
            return Refusal("lin of a block is no Linear")
        if any(type(e) is not LayerNorm or len(e.normalized_shape) != 1 for e in norms):
            return Refusal("a norm of a block is no LayerNorm of channels")
        is_watched = any(_KNOWN.is_watched(each) for each in (outer, *maps, *norms))
        if is_watched or _BLOCK.is_watched(block):
            return Refusal("a block has hooks or another forward")
        refusal = self_attention_refusal(block.attn, x)
        if refusal is not None:
            return refusal
    return None


def _kept(x: Tensor) -> Tensor:
    """A copy, as padding makes one: the caller may edit x before the backward pass."""
    return x.clone() if torch.is_grad_enabled() else x


def _block(
    module: MultiheadAttentionBlock,
    x: Tensor,
    y: Tensor,
    ptr: Tensor,
    key_ptr: Tensor | None = None,
) -> Tensor:
    """The rows of ``module(h, g)`` for each row of x, where h and g are those of its set."""
    return _rest(module, attention(module.attn, x, y, ptr, key_ptr), x)


def _rest(module: MultiheadAttentionBlock, out: Tensor, x: Tensor) -> Tensor:
    """The output of a block, after its attention."""
    out = out + x
    if module.layer_norm1 is not None:
        out = module.layer_norm1(out)
    out = out + module.lin(out).relu()
    return out if module.layer_norm2 is None else module.layer_norm2(out)


def _pool(module: PoolingByMultiheadAttention, x: Tensor, ptr: Tensor) -> Tensor:
    """``module`` on sets in a row: ``[sets, seeds, channels]``."""
    sets, seeds, channels = len(ptr) - 1, module.seed.shape[1], module.seed.shape[2]
    queries = module.seed.expand(sets, -1, -1).reshape(-1, channels)
    starts = seeds * torch.arange(sets + 1, device=x.device)
    pooled = _block(module.mab, queries, module.lin(x).relu(), starts, ptr)
    return pooled.view(sets, seeds, channels)
