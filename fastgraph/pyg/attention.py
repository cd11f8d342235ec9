"""The steps that the routes of PyG's attention layers share.

PyG's attention layers make one message for each edge in two steps (``edge_update`` or ``message``
finds the weights, ``propagate`` adds up), between which tensors of the size of the edges exist. So
their ``forward`` is replaced as a whole: it does what upstream's does around one operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn import Linear
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.utils.loop import compute_loop_attr

from fastgraph.graphs.edges import (
    Edges,
    KnownGraph,
    OutOfRange,
    RenumberedGraph,
    graph_of,
    has_parallel_edges,
    index_with_self_loops,
    other_edges,
    renumbered_graph,
    too_large,
    unless_out_of_range,
)
from fastgraph.graphs.memo import is_recording
from fastgraph.layers.attention import Inputs
from fastgraph.machine import capture
from fastgraph.plugins.backend import device_type
from fastgraph.plugins.refusal import Refusal
from fastgraph.pyg.edges import edges_of
from fastgraph.pyg.modules import LINEAR
from fastgraph.pyg.propagate import from_template, replaced_on
from fastgraph.pyg.state import module_refusal
from fastgraph.registry.registry import REGISTRY
from fastgraph.routing.conditions import (
    execution_mode,
    is_plain,
    operand,
    plain_parameters,
    too_few_edges,
)

_PARALLEL = Refusal("a sparse adjacency matrix with several entries in one place and self-loops")
"""PyG makes one entry of those in one place where it adds self-loops to a matrix."""

Result = TypeVar("Result")


class Accepted(NamedTuple):
    """A call that can be routed, as far as features and graph go."""

    inputs: Inputs
    edges: Edges


def accepted(
    module: MessagePassing,
    layer: type[MessagePassing],
    operator: str,
    x: object,
    edge_index: object,
) -> Accepted | Refusal:
    """Features and graph of a call of an attention layer, or why it must be left to upstream.

    Args:
        module: the layer, an instance of ``layer`` or of a subclass.
        layer: the upstream class whose formula the operator computes.
        operator: the name of the operator.
        x: the caller's features, one tensor or a pair.
        edge_index: the caller's graph.
    """
    inputs = _inputs_of(x)
    if isinstance(inputs, Refusal):
        return inputs
    refusal = _numbers_refusal(module)
    if refusal is not None:
        return refusal
    if dropout_rate(module) > 0 and capture.is_capturing(inputs.src):
        return Refusal("attention dropout in a CUDA graph")
    refusal = _module_refusal(module, layer)
    if refusal is not None:
        return refusal
    edges = edges_of(edge_index, module.flow)
    if isinstance(edges, Refusal):
        return edges
    refusal = _edges_refusal(edges, edge_index, inputs)
    if refusal is not None:
        return refusal
    if edges.values is not None and not is_plain(*inputs):
        return Refusal("features that are not plain tensors beside a sparse adjacency matrix")
    refusal = REGISTRY.refusal(operator, device_type(inputs.src), inputs.src.dtype)
    return Accepted(inputs, edges) if refusal is None else refusal


def _numbers_refusal(module: Any) -> Refusal | None:
    """Why numbers of a layer are none that an operator takes; upstream has an error of its own."""
    rate, slope = module.dropout, vars(module).get("negative_slope", 0.0)
    if type(rate) not in (int, float) or not 0 <= rate <= 1 or type(module.training) is not bool:
        return Refusal("dropout is no rate, or training no bool")
    return None if type(slope) in (int, float) else Refusal("negative_slope is no number")


def _module_refusal(module: MessagePassing, layer: type[MessagePassing]) -> Refusal | None:
    cls = type(module)
    for name in ("message", "edge_update"):  # compilers compare what names of a module mean
        if getattr(cls, name) is not getattr(layer, name):
            return Refusal(f"{name} is overridden")
    for name in ("propagate", "edge_updater"):
        method = getattr(cls, name)
        if method is not getattr(MessagePassing, name) and not from_template(cls, method):
            return Refusal(f"{name} is overridden")
    attributes = vars(module)
    if "edge_update" in attributes:
        return Refusal("edge_update is overridden on the instance")
    for name in ("edge_updater", "propagate"):
        if name in attributes and replaced_on(module, name):
            return Refusal(f"{name} is overridden on the instance")
    if attributes["_edge_update_forward_pre_hooks"] or attributes["_edge_update_forward_hooks"]:
        return Refusal("a message-passing hook is set")
    refusal = execution_mode() or module_refusal(module, cls)
    if refusal is not None:
        return refusal
    if type(module.aggr_module) is not SumAggregation:
        return Refusal(f"aggregation {type(module.aggr_module).__name__}")
    if module.flow != "source_to_target":
        return Refusal(f"flow {module.flow}")
    if module.node_dim != 0:
        return Refusal(f"node_dim={module.node_dim}")
    return plain_parameters(module)


def _edges_refusal(edges: Edges, edge_index: Any, inputs: Inputs) -> Refusal | None:
    sizes: tuple[int | None, ...] = (None, None)
    if isinstance(edge_index, EdgeIndex):
        sizes = edge_index.sparse_size()
    elif edge_index.layout == torch.sparse_csc:
        return Refusal("a sparse CSC adjacency matrix in an attention layer")
    elif edges.values is not None:
        sizes = tuple(reversed(edge_index.shape))
    if edges.index.device != inputs.src.device:
        return Refusal("edge_index is not on the device of the features")
    for size, features in zip(sizes, inputs, strict=True):
        if size is not None and size != len(features):
            return Refusal(f"a graph of size {tuple(sizes)}, unlike the features")
    return too_few_edges(edges.num_edges)


def _inputs_of(x: object) -> Inputs | Refusal:
    """Features of sources and destinations, the same tensor for a single one, or the reason."""
    pair = x if isinstance(x, (tuple, list)) else (x, x)
    if len(pair) != 2:
        return Refusal(f"x has {len(pair)} entries")
    for features in pair:
        if features is None:
            return Refusal("a bipartite graph without features of the destinations")
        refusal = operand("x", features)
        if refusal is not None:
            return refusal
        if features.layout != torch.strided or features.dim() != 2:
            return Refusal("features that are not a dense matrix")
    if pair[0].device != pair[1].device:
        return Refusal("features of sources and of destinations on different devices")
    return Inputs(*pair)


def edge_refusal(
    lin_edge: Any, edge_attr: object, edge_index: Tensor, num_dims: tuple[int, ...] = (1, 2)
) -> Refusal | None:
    """Why features of edges that ``lin_edge`` projects must be left to upstream.

    The routes fold the projection into something else, so nobody may be watching it.
    """
    if type(lin_edge) is not Linear or lin_edge.bias is not None:
        return Refusal("lin_edge is not a Linear without bias")
    if not LINEAR.knows(lin_edge):
        return Refusal("lin_edge has hooks or a computed weight")
    refusal = operand("edge_attr", edge_attr)
    if refusal is not None:
        return refusal
    if edge_index.layout != torch.strided:
        return Refusal("edge_attr beside a sparse adjacency matrix")
    assert isinstance(edge_attr, Tensor)
    expected = (edge_index.shape[1], lin_edge.in_channels)
    channels = 1 if edge_attr.dim() == 1 else edge_attr.shape[-1:].numel()
    if edge_attr.dim() not in num_dims or (edge_attr.shape[0], channels) != expected:
        return Refusal(f"edge_attr has shape {list(edge_attr.shape)}, expected {list(expected)}")
    if edge_attr.dtype != lin_edge.weight.dtype and not torch.is_autocast_enabled(
        edge_attr.device.type
    ):
        return Refusal(f"edge_attr has dtype {edge_attr.dtype}, lin_edge {lin_edge.weight.dtype}")
    if edge_attr.layout != torch.strided or edge_attr.device != edge_index.device:
        return Refusal("edge_attr is not a dense tensor on the graph's device")
    return None


def edge_projection(module: Any) -> Tensor:
    """The projection of edges, ``[heads, channels, edge_dim]``."""
    weight: Tensor = module.lin_edge.weight
    return weight.view(module.heads, module.out_channels, -1)


class Located(NamedTuple):
    """Edges as an operator takes them, and their graph, where it has been looked up.

    Attributes:
        edges: with the self-loops that the layer adds.
        graph: by which operators find it.
    """

    edges: Edges
    graph: KnownGraph | RenumberedGraph | None = None

    def while_computing(self, compute: Callable[..., Result], *arguments: object) -> Result:
        """``compute(*arguments)``, in which operators find the graph."""
        if self.graph is None:
            return compute(*arguments)
        return self.graph.while_computing(compute, *arguments)


def located(call: Accepted, loops: int | None, *, numbered: bool) -> Located | Refusal:
    """The edges of a call as an operator takes them, looked up before anything is computed.

    Args:
        call: features and edges.
        loops: of how many nodes the layer replaces the self-loops, if it does. As in upstream the
            edges are our own then: a caller may edit theirs before the backward pass, or have made
            them in inference mode.
        numbered: whether something is given or returned for each edge. If not, backward passes
            write what they leave for each edge in the order of rows.

    Returns:
        Or the reason to leave the call to upstream.
    """
    inputs, index = call.inputs, call.edges.as_index()
    num_src, num_dst = map(len, inputs)
    # Subclasses of tensors define operators for edges as they were given.
    is_looked_up = is_plain(*inputs, index) and not is_recording()
    if refusal := too_large(num_src, num_dst, index.shape[1] + (loops or 0)):
        return refusal
    if call.edges.values is not None and loops is not None and has_parallel_edges(index, num_src):
        return _PARALLEL
    if not numbered:
        if not is_looked_up:
            return Located(Edges(index, self_loops=loops or 0))
        graph = unless_out_of_range(renumbered_graph, index, num_src, num_dst, loops or 0)
        if isinstance(graph, OutOfRange):
            return graph
        rows = graph.by_destination
        return Located(
            Edges(rows.col, rows.ptr),
            RenumberedGraph(graph, index if loops is None else None),
        )
    if loops is not None:
        index = index_with_self_loops(index, loops)
    if not is_looked_up:
        return Located(Edges(index))
    graph = unless_out_of_range(graph_of, index, None, num_src, num_dst)
    if isinstance(graph, OutOfRange):
        return graph
    return Located(Edges(index), KnownGraph(graph, index))


def loops_of(module: Any, inputs: Inputs) -> int | None:
    """Of how many nodes ``GATConv`` and ``GATv2Conv`` replace the self-loops, if they do."""
    return min(map(len, inputs)) if module.add_self_loops else None


def with_loop_features(module: Any, call: Accepted, edge_attr: Tensor) -> Tensor:
    """Features of the caller's edges with those of the self-loops that the layer adds.

    Args:
        module: a ``GATConv`` or ``GATv2Conv``.
        call: features and edges.
        edge_attr: ``[E, edge_dim]``, or ``[E]``.
    """
    if edge_attr.dim() == 1:
        edge_attr = edge_attr.view(-1, 1)
    loops = loops_of(module, call.inputs)
    if loops is None:
        return edge_attr
    index = call.edges.as_index()
    others = other_edges(index)
    if others.index.shape[1] != index.shape[1]:
        edge_attr = others.of(edge_attr)
    # All that upstream's `add_self_loops` does for features.
    own = compute_loop_attr(others.index, edge_attr, loops, False, module.fill_value)
    return torch.cat([edge_attr, own])


def joint_width(module: Any, *_: object) -> object:
    """The channels of all heads."""
    return module.heads * module.out_channels


def dropout_rate(module: Any) -> float:
    """The rate of attention dropout that applies now."""
    return module.dropout if module.training else 0.0


def weights_refusal(edge_index: Tensor) -> Refusal | None:
    """Why attention weights cannot be returned together with the edges that they belong to."""
    if isinstance(edge_index, EdgeIndex) or edge_index.layout != torch.strided:
        return Refusal("attention weights of a graph that is not a plain edge_index")
    return None


def draws_by_row(module: Any, call: Accepted) -> bool:
    """True if weights are dropped in the order of rows, whether they are returned or not.

    One seed drops the same edges then. What else asks for the order in which edges were given does
    so in both cases.
    """
    if dropout_rate(module) == 0:
        return False
    return is_plain(*call.inputs, call.edges.as_index()) and not is_recording()


def with_weights(
    module: Any, call: Accepted, edges: Edges, out: Tensor, alpha: Tensor | None
) -> Any:
    """The return value of GATConv and GATv2Conv: weights come together with their edges.

    Args:
        module: the layer.
        call: features and edges.
        edges: those of the operator.
        out: the layer's result.
        alpha: the weights of these edges, ``[E, heads]``; ``None`` if nobody asked for them.
    """
    if alpha is None:
        return out
    index = edges.index
    if edges.ptr is not None:  # in the order of rows, see `draws_by_row`
        index, loops = call.edges.as_index(), loops_of(module, call.inputs)
        if loops is not None:
            index = index_with_self_loops(index, loops)
        numbers = graph_of(index, None, *map(len, call.inputs)).by_destination.edge_id
        if numbers is not None:
            alpha = torch.empty_like(alpha).index_copy_(0, numbers.long(), alpha)
    # A copy, because edits must not reach the remembered self-loops.
    return out, (index.clone(), alpha)
