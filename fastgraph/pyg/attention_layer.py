"""What the routes of attention layers share.

PyG's attention layers make one message for each edge in two steps (``edge_update`` or ``message``
finds the weights, ``propagate`` adds up), between which tensors of the size of the edges exist. So
their ``forward`` is replaced as a whole: it does what upstream's does around one operator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import UninitializedParameter
from torch_geometric import EdgeIndex
from torch_geometric.nn import Linear
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.utils import add_self_loops, remove_self_loops

from fastgraph import capture, settings
from fastgraph.backends.registry import REGISTRY
from fastgraph.graph import index_with_self_loops, renumbered_graph
from fastgraph.memo import is_recording, remembered
from fastgraph.pyg.in_place import add_to
from fastgraph.pyg.linear import unwatched
from fastgraph.pyg.propagate import from_template, module_refusal
from fastgraph.pyg.topology import Topology, topology_of
from fastgraph.routing.conditions import execution_mode, plain_tensor, too_few_edges
from fastgraph.routing.patching import Patches
from fastgraph.routing.state import SWITCH
from fastgraph.routing.status import (
    RouteRefusedError,
    count_refused,
    count_routed,
    counted_already,
)

_METHODS = ("message", "edge_update")
_OVERRIDABLE = ("edge_update", "edge_updater", "propagate")
_HOOKS = ("_edge_update_forward_pre_hooks", "_edge_update_forward_hooks")

Forward = Callable[[], Any]
"""A forward pass that has been decided on."""


class Inputs(NamedTuple):
    """Features of sources and of destinations, ``[nodes, channels]`` each."""

    src: Tensor
    dst: Tensor


def route_forward(
    patches: Patches, cls: type[MessagePassing], plan: Callable[..., Forward | str]
) -> None:
    """Replace ``cls.forward``: run what ``plan(module, *args)`` returns, or upstream's own code.

    ``plan`` answers with the reason where it refuses, before anything is computed.
    """
    upstream: Callable[..., Any] = cls.forward
    plan.__qualname__ = upstream.__qualname__  # which wrong calls are reported with

    @functools.wraps(upstream)
    def forward(self: MessagePassing, *args: Any, **kwargs: Any) -> Any:
        if not SWITCH.active:  # an instance kept this function beyond `disable()`
            return upstream(self, *args, **kwargs)
        planned = plan(self, *args, **kwargs)
        name = type(self).__name__
        if not isinstance(planned, str):
            if not torch.compiler.is_compiling():  # a counter would make Dynamo recompile
                count_routed(name)
            return planned()
        if settings.current().strict:
            raise RouteRefusedError(f"{name} cannot be routed: {planned}")
        if torch.compiler.is_compiling():
            return upstream(self, *args, **kwargs)
        count_refused(name, planned)
        with counted_already(self):
            return upstream(self, *args, **kwargs)

    patches.replace(cls, "forward", forward)


def accepted_inputs(
    module: MessagePassing,
    layer: type[MessagePassing],
    operator: str,
    x: object,
    edge_index: object,
) -> Inputs | str:
    """The features of a call of an attention layer, or why it must be left to upstream.

    Args:
        module: the layer, an instance of ``layer`` or of a subclass.
        layer: the upstream class whose formula the operator computes.
        operator: the name of the operator.
        x: the caller's features, one tensor or a pair.
        edge_index: the caller's graph.
    """
    inputs = _inputs_of(x)
    if isinstance(inputs, str):
        return inputs
    if dropout_rate(module) > 0 and capture.is_capturing(inputs.src):
        return "attention dropout in a CUDA graph"
    reason = (
        _module_refusal(module, layer)
        or _graph_refusal(module, edge_index, inputs)
        or REGISTRY.refusal(operator, inputs.src.device.type, inputs.src.dtype)
    )
    return inputs if reason is None else reason


def _module_refusal(module: MessagePassing, layer: type[MessagePassing]) -> str | None:
    cls = type(module)
    for name in _METHODS:
        if getattr(cls, name) is not getattr(layer, name):
            return f"{name} is overridden"
    for name in ("propagate", "edge_updater"):
        method = getattr(cls, name)
        if method is not getattr(MessagePassing, name) and not from_template(cls, method):
            return f"{name} is overridden"
    attributes = vars(module)
    for name in _OVERRIDABLE:
        if name in attributes:
            return f"{name} is overridden on the instance"
    if any(attributes[name] for name in _HOOKS):
        return "a message-passing hook is set"
    reason = execution_mode() or module_refusal(module, cls)
    if reason is not None:
        return reason
    if type(module.aggr_module) is not SumAggregation:
        return f"aggregation {type(module.aggr_module).__name__}"
    if module.flow != "source_to_target":
        return f"flow {module.flow}"
    for parameter in module.parameters():
        reason = plain_tensor("a parameter", parameter)
        # A lazy projection gets its weight when it is called.
        if reason is not None and type(parameter) is not UninitializedParameter:
            return reason
    return None


def _graph_refusal(module: MessagePassing, edge_index: Any, inputs: Inputs) -> str | None:
    topology = topology_of(edge_index, module.flow)
    if isinstance(topology, str):
        return topology
    sizes: tuple[int | None, ...] = (None, None)
    if isinstance(edge_index, EdgeIndex):
        sizes = edge_index.sparse_size()
    elif edge_index.layout == torch.sparse_csc:
        return "a sparse CSC adjacency matrix in an attention layer"
    elif topology.values is not None:
        sizes = tuple(reversed(edge_index.shape))
    for size, features in zip(sizes, inputs, strict=True):
        if size is not None and size != len(features):
            return f"a graph of size {tuple(sizes)}, unlike the features"
    return too_few_edges(topology.num_edges)


def _inputs_of(x: object) -> Inputs | str:
    """Features of sources and destinations, the same tensor for a single one, or the reason."""
    pair = x if isinstance(x, (tuple, list)) else (x, x)
    if len(pair) != 2:
        return f"x has {len(pair)} entries"
    for features in pair:
        if features is None:
            return "a bipartite graph without features of the destinations"
        reason = plain_tensor("x", features)
        if reason is not None:
            return reason
        if features.layout != torch.strided or features.dim() != 2:
            return "features that are not a dense matrix"
    return Inputs(*pair)


def edge_refusal(
    lin_edge: Any, edge_attr: object, edge_index: Tensor, num_dims: tuple[int, ...] = (1, 2)
) -> str | None:
    """Why features of edges that ``lin_edge`` projects must be left to upstream.

    The routes fold the projection into something else, so nobody may be watching it.
    """
    if type(lin_edge) is not Linear or lin_edge.bias is not None:
        return "lin_edge is not a Linear without bias"
    if not unwatched(lin_edge):
        return "lin_edge has hooks or a computed weight"
    reason = plain_tensor("edge_attr", edge_attr)
    if reason is not None:
        return reason
    if edge_index.layout != torch.strided:
        return "edge_attr beside a sparse adjacency matrix"
    assert isinstance(edge_attr, Tensor)
    channels = 1 if edge_attr.dim() == 1 else edge_attr.shape[-1]
    expected = (edge_index.shape[1], lin_edge.in_channels)
    if edge_attr.dim() not in num_dims or (edge_attr.shape[0], channels) != expected:
        return f"edge_attr has shape {list(edge_attr.shape)}, expected {list(expected)}"
    if edge_attr.dtype != lin_edge.weight.dtype and not torch.is_autocast_enabled(
        edge_attr.device.type
    ):
        return f"edge_attr has dtype {edge_attr.dtype}, lin_edge {lin_edge.weight.dtype}"
    if edge_attr.layout != torch.strided or edge_attr.device != edge_index.device:
        return "edge_attr is not a dense tensor on the graph's device"
    return None


def edge_projection(module: Any) -> Tensor:
    """The projection of edges, ``[heads, channels, edge_dim]``."""
    weight: Tensor = module.lin_edge.weight
    return weight.view(module.heads, module.out_channels, -1)


def plain_index(edge_index: Tensor) -> Tensor:
    """A graph in any of PyG's forms as a dense ``edge_index``.

    That of a sparse matrix is remembered for as long as the matrix lives unchanged.
    """
    if edge_index.layout == torch.strided:
        return edge_index.as_tensor() if isinstance(edge_index, EdgeIndex) else edge_index
    topology = topology_of(edge_index, "source_to_target")
    assert isinstance(topology, Topology)
    return remembered("entries", _index_of_entries, topology.index, topology.ptr)


def _index_of_entries(index: Tensor, ptr: Tensor | None) -> Tensor:
    """Sources and destinations of the entries of a COO or CSR matrix, in their order."""
    if ptr is None:
        return index.flip(0)
    rows = torch.repeat_interleave(ptr.diff(), output_size=index.shape[0])
    return torch.stack([index, rows.to(index.dtype)])


@dataclass(frozen=True)
class Edges:
    """The edges of an attention layer as operators take them, and ``attr``, their features.

    ``self_loops`` is the number of nodes whose self-loops the operator is yet to replace.
    """

    index: Tensor
    ptr: Tensor | None
    attr: Tensor | None
    self_loops: int


def with_self_loops(
    module: Any,
    edge_index: Tensor,
    edge_attr: Tensor | None,
    inputs: Inputs,
    need_weights: bool,
) -> Edges:
    """The edges of a call, with self-loops where the layer adds them.

    As in upstream these are edges of our own then: a caller may edit theirs before the backward
    pass, or have made them in inference mode.
    """
    edge_index = plain_index(edge_index)
    if edge_attr is not None and edge_attr.dim() == 1:
        edge_attr = edge_attr.view(-1, 1)
    num_nodes = min(map(len, inputs)) if module.add_self_loops else 0
    if edge_attr is None and not need_weights:
        return anonymous_edges(edge_index, inputs, num_nodes)
    if not module.add_self_loops:
        return Edges(edge_index, None, edge_attr, 0)
    with_loops = index_with_self_loops(edge_index, num_nodes)
    if edge_attr is not None:
        num_others = with_loops.shape[1] - num_nodes
        if num_others != edge_index.shape[1]:
            _, edge_attr = remove_self_loops(edge_index, edge_attr)
        _, edge_attr = add_self_loops(
            with_loops[:, :num_others], edge_attr, module.fill_value, num_nodes
        )
    return Edges(with_loops, None, edge_attr, 0)


def anonymous_edges(edge_index: Tensor, inputs: Inputs, self_loops: int) -> Edges:
    """The edges of a call where nothing goes with single ones: by destination, if that can be.

    Backward passes then write what they leave for each edge in the order of their rows. An edit of
    ``edge_index`` between the passes has no effect, where upstream may refuse the gradient.
    """
    if is_recording():
        return Edges(edge_index, None, None, self_loops)
    rows = renumbered_graph(edge_index, len(inputs.src), len(inputs.dst), self_loops).by_destination
    return Edges(rows.col, rows.ptr, None, 0)


def same_dtype(*tensors: Tensor | None) -> list[Any]:
    """All in the dtype that upstream's arithmetic on them would promote to, as under autocast."""
    dtypes = [tensor.dtype for tensor in tensors if tensor is not None]
    dtype = functools.reduce(torch.promote_types, dtypes)
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]


def dropout_rate(module: Any) -> float:
    """The rate of attention dropout that applies now."""
    return module.dropout if module.training else 0.0


def weights_refusal(edge_index: Tensor) -> str | None:
    """Why attention weights cannot be returned together with the edges that they belong to."""
    if isinstance(edge_index, EdgeIndex) or edge_index.layout != torch.strided:
        return "attention weights of a graph that is not a plain edge_index"
    return None


class Terms(NamedTuple):
    """What a layer adds to the joined heads: to the operator's own output if that can be."""

    addend: Tensor | None
    others: list[Tensor]


def terms_of(module: Any, x: Tensor, *terms: Tensor | None) -> Terms:
    """The first of ``terms`` as the operator's addend, if it can be one, and the others.

    Terms are ``[nodes, heads * channels]``, or ``[heads * channels]`` for a bias; the operator adds
    up rows of ``x`` ``[sources, heads, channels]``.
    """
    given = [term for term in terms if term is not None]
    if not given or not module.concat or given[0].dtype != x.dtype:
        return Terms(None, given)
    return Terms(given[0].view(-1, *x.shape[1:]), given[1:])


def combine_heads(module: Any, out: Tensor, terms: Terms) -> Tensor:
    """Concatenate or average heads, then add the terms that the operator did not.

    ``out`` ``[nodes, heads, channels]`` is an operator's output that nothing else refers to.
    """
    out = join_heads(module, out, terms.addend is not None or len(terms.others) > 0)
    return functools.reduce(add_to, terms.others, out)


def join_heads(module: Any, out: Tensor, changed: bool) -> Tensor:
    """Concatenate or average heads ``[nodes, heads, channels]``.

    ``changed`` says that something will be added in place. What upstream would have added out of
    place is no view of anything to autograd, and so must the sum be none.
    """
    if not module.concat:
        return out.mean(dim=1)
    size = (out.shape[0], out.shape[1] * out.shape[2])
    return torch.ops.aten._unsafe_view(out, size) if changed else out.view(size)


def with_weights(out: Tensor, edge_index: Tensor, alpha: Tensor | None) -> Any:
    """What GATConv and GATv2Conv return: weights come with the edges that they belong to."""
    # A copy, because edits must not reach the remembered self-loops.
    return out if alpha is None else (out, (edge_index.clone(), alpha))
