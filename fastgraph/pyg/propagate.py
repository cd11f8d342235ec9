"""The route of ``MessagePassing.propagate``.

PyG generates a ``propagate`` for every class from a template, at the class's first instance, and
stores it in the class. That function is wrapped, where the template installs it: the wrapper either
computes the aggregation with one operator or calls the function it wraps.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.typing import WITH_TORCH_SCATTER

from fastgraph.graphs.edges import Edges
from fastgraph.layers.aggregation import SUMS, Aggregation
from fastgraph.layers.constant import aggregated
from fastgraph.layers.linear import linear, linear_of_aggregated
from fastgraph.layers.modules import affine_map_of
from fastgraph.layers.narrowing import projects_first
from fastgraph.layers.sums import add_to
from fastgraph.plugins.backend import device_type
from fastgraph.plugins.patching import Patches
from fastgraph.plugins.refusal import Refusal
from fastgraph.pyg import traced
from fastgraph.pyg.aggregations import REDUCTIONS
from fastgraph.pyg.direct import direct
from fastgraph.pyg.edges import edges_of
from fastgraph.pyg.messages import Message, known_message, multiplies_adjacency
from fastgraph.pyg.modules import LINEAR, project
from fastgraph.pyg.repeated import computed_again
from fastgraph.pyg.state import module_refusal
from fastgraph.registry.registry import REGISTRY
from fastgraph.routing.conditions import execution_mode, operand, plain_tensor, too_few_edges
from fastgraph.routing.dispatch import refuse, run_upstream, take
from fastgraph.routing.sizes import (
    EXTREMUM,
    SUM,
    TOO_SMALL,
    WEIGHTED_SUM,
    Least,
    is_too_small,
)
from fastgraph.routing.status import THREAD, count_too_small, is_counted, leave
from fastgraph.routing.switch import SWITCH
from fastgraph.routing.wrappers import wrapped
from fastgraph.upstream import label_of

_OVERRIDDEN = Refusal("propagate is overridden")  # met at every call, made once
_OTHER_MESSAGE = Refusal("its message is not a known one")

_EXTREMA = frozenset(cls for cls, reduce in REDUCTIONS.items() if reduce not in SUMS)


def install(patches: Patches) -> None:
    """Wrap the generated ``propagate`` of every class, of today and of later."""
    upstream = MessagePassing._set_jittable_templates

    @functools.wraps(upstream)
    def set_jittable_templates(self: MessagePassing, raise_on_error: bool = False) -> None:
        cls, inherited = type(self), MessagePassing.propagate
        # The template makes anew what was put back to the base's, but takes any other for a user's.
        if cls is not MessagePassing and vars(cls).get("propagate") is _unwrapped(inherited):
            setattr(cls, "propagate", inherited)  # noqa: B010  # mypy: no method is assigned
        upstream(self, raise_on_error)
        _wrap_class(type(self), patches)

    patches.replace(MessagePassing, "_set_jittable_templates", set_jittable_templates)
    # What classes keep for which the template cannot tell what `forward` passes on.
    patches.replace(
        MessagePassing,
        "propagate",
        _routed(MessagePassing, MessagePassing.propagate, generated=True),
    )
    for cls in _subclasses(MessagePassing):
        _wrap_class(cls, patches)


def _subclasses(cls: Any) -> Iterator[Any]:
    yield cls
    for subclass in cls.__subclasses__():
        yield from _subclasses(subclass)


def _wrap_class(cls: Any, patches: Patches) -> None:
    """Wrap the function that the template put into this very class, if it did."""
    generated = vars(cls).get("_jinja_propagate")
    if generated is None or hasattr(generated, "_fastgraph_upstream"):
        return
    # The template saves whatever `propagate` a class inherits, and that may be a wrapper.
    inherited = vars(cls).get("_orig_propagate")
    if hasattr(inherited, "_fastgraph_upstream"):
        cls._orig_propagate = inherited._fastgraph_upstream
    if vars(cls).get("propagate") is generated:
        wrapper = _routed(cls, generated, generated=from_template(cls, generated))
        # An instance binds the saved function to itself when explaining ends.
        patches.replace(cls, "_jinja_propagate", wrapper)
        patches.replace(cls, "propagate", wrapper)


def from_template(cls: type[MessagePassing], method: Any) -> bool:
    """True if PyG generated a method for this class; it leaves alone what a user has written.

    Or for a base: torch puts subclasses in place of a module's class without making it anew, as
    ``fully_shard`` and parametrizations do.
    """
    # The Dynamo of torch 2.15 takes a wrapper's `__module__` for that of the code in it.
    method = _unwrapped(method)
    return any(
        method.__module__.startswith(f"{owner.__module__}_{owner.__name__}_{method.__name__}")
        for owner in cls.__mro__
    )


def replaced_on(module: MessagePassing, name: str) -> bool:
    """True if an instance has a method of its own that is not the one which PyG generated.

    PyG binds that one to the instance when explaining ends, and when ``decomposed_layers`` is set
    back to 1.
    """
    own = vars(module).get(name)
    if own is None:
        return False
    cls = type(module)
    generated = getattr(cls, f"_jinja_{name}", None)
    return (
        generated is None
        or getattr(own, "__self__", None) is not module
        or _unwrapped(own.__func__) is not _unwrapped(generated)
        or not from_template(cls, generated)
    )


def _unwrapped(method: Any) -> Any:
    return getattr(method, "_fastgraph_upstream", method)


def _routed(
    cls: type[MessagePassing], upstream: Callable[..., Tensor], *, generated: bool
) -> Callable[..., Tensor]:
    label = label_of(cls)
    names: list[str] = []
    is_small: Any = None
    if generated:  # without a route there is another reason
        names = list(inspect.signature(upstream).parameters)[2:]
        is_small = _smallness(cls, names)
    is_asked_here = generated
    is_seen_by_dynamo = torch.compiler.is_dynamo_compiling

    def propagate(self: MessagePassing, edge_index: Any, *args: Any, **kwargs: Any) -> Tensor:
        counted = None if is_seen_by_dynamo() else THREAD.counted
        if counted and counted[-1] is self:  # its whole call was left to upstream
            return upstream(self, edge_index, *args, **kwargs)
        return run(self, edge_index, args, kwargs)

    def run(
        module: MessagePassing, edge_index: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        if not SWITCH.active:  # an instance kept the wrapper beyond `disable()`
            return upstream(module, edge_index, *args, **kwargs)
        values = [kwargs.get(name) for name in names] if is_asked_here else ()
        if is_asked_here and not is_seen_by_dynamo() and is_small(module, edge_index, *values):
            counted = leave(label if type(module) is cls else label_of(type(module)), upstream)
            try:
                return upstream(module, edge_index, *args, **kwargs)
            finally:
                counted.pop()
        planned = _planned(module, edge_index, args, kwargs) if generated else _OVERRIDDEN
        if isinstance(planned, Refusal):
            _refuse(module, planned)
            return _left(planned, upstream, module, edge_index, *args, **kwargs)
        if not isinstance(planned, Aggregation):
            return planned()
        take(module)
        return aggregated(planned, is_private=False)

    def left_if_small(
        module: MessagePassing, edge_index: object, *values: object
    ) -> list[object] | None:
        if is_seen_by_dynamo():
            return None
        counted = THREAD.counted
        if counted and counted[-1] is module:
            counted.append(upstream)
            return counted
        if not is_small(module, edge_index, *values) or not SWITCH.active:
            return None
        # Not the module, calls of which in there are counted one by one.
        return leave(label if type(module) is cls else label_of(type(module)), upstream)

    def by_position(self: MessagePassing, edge_index: Any, *values: Any) -> Tensor:
        if not is_seen_by_dynamo() and SWITCH.active:
            again = computed_again(self, edge_index, names, values)
            if again is not None:
                return again
        return run(self, edge_index, (), dict(zip(names, values)))  # noqa: B905  # as many

    wrapper: Any = None
    if generated:
        asked = "self", "edge_index", *names
        shorter = direct(cls, upstream, names)
        wrapper = wrapped(upstream, left_if_small, asked, by_position, shorter=shorter)
        is_asked_here = wrapper is None
    # `wraps` keeps upstream's `__module__`, by which the template knows its own work.
    wrapper = wrapper or functools.wraps(upstream)(propagate)
    wrapper._fastgraph_upstream = upstream
    found: Callable[..., Tensor] = wrapper
    return found


def _smallness(cls: type[MessagePassing], names: list[str]) -> Callable[..., bool]:
    """The function of a layer, its graph and further arguments that is true if there is too little.

    It is asked of every call, and before all else.

    Args:
        cls: the layer's.
        names: of the further arguments of its ``propagate``.
    """
    message = known_message(cls)
    if message is None:
        return traced.is_small
    x = names.index("x") if "x" in names else None
    weight = names.index(message.weight) if message.weight in names else None

    def is_small(module: MessagePassing, edge_index: object, *values: object) -> bool:
        return is_too_small(least, edge_index, features, module, values)

    def least(module: MessagePassing, values: tuple[object, ...]) -> Least:
        return least_edges(module, None if weight is None else values[weight])

    def features(_: object, values: tuple[object, ...]) -> object:
        return None if x is None else values[x]

    return is_small


def _left(
    refusal: Refusal | None,
    upstream: Callable[..., Tensor],
    module: MessagePassing,
    *args: Any,
    **kw: Any,
) -> Tensor:
    """Upstream's ``propagate``, which has been counted together with the aggregation in it."""
    if torch.compiler.is_compiling():
        out: Tensor = run_upstream(refusal, upstream, module, *args, **kw)
        return out
    counted = THREAD.counted
    counted.append(upstream)  # not the module, calls of which in here are counted one by one
    try:
        out = run_upstream(refusal, upstream, module, *args, **kw)
    finally:
        counted.pop()
    return out


def _own_propagate(module: MessagePassing, edge_index: Any, **arguments: Any) -> Tensor:
    out: Tensor = module.propagate(edge_index, **arguments)
    return out


def least_edges(module: MessagePassing, edge_weight: object) -> Least:
    """How many edges there must be to gain from routing what a layer aggregates.

    Args:
        module: the layer.
        edge_weight: what it multiplies messages by; ``None`` for nothing.
    """
    if type(module._modules.get("aggr_module")) in _EXTREMA:
        return EXTREMUM
    return SUM if edge_weight is None else WEIGHTED_SUM


def aggregate(module: MessagePassing, edge_index: Any, **arguments: Any) -> tuple[Tensor, bool]:
    """``module.propagate(edge_index, **arguments)`` and whether the caller may change the result.

    It may if nothing else refers to the result and no gradient needs it.
    """
    planned = _plan_call(module, edge_index, arguments)
    if isinstance(planned, Aggregation):
        return aggregated(planned, is_private=False), planned.is_owned
    return planned(module, edge_index, **arguments), False


def aggregate_and_project(
    module: MessagePassing, linear_module: Any, edge_index: Any, **arguments: Any
) -> tuple[Tensor, bool]:
    """``linear_module(module.propagate(edge_index, **arguments))``, and the same.

    The product comes first where that is less work (:mod:`fastgraph.layers.narrowing`).
    """
    planned = _plan_call(module, edge_index, arguments)
    if not isinstance(planned, Aggregation):
        neighbours, owned = planned(module, edge_index, **arguments), False
    elif not LINEAR.knows(linear_module):
        neighbours, owned = aggregated(planned, is_private=False), planned.is_owned
    else:
        weight, bias = affine_map_of(linear_module)
        if projects_first(planned, weight):
            projected = linear(planned.x, weight, None)
            out = planned._replace(x=projected).compute()
            return (out if bias is None else add_to(out, bias)), True
        out = linear_of_aggregated(planned, weight, bias)
        # torch's product of more dimensions is a view, and so would be what is added to it.
        return out, out.dim() == 2
    out = project(linear_module, neighbours)
    if out is not neighbours:
        owned = out.dim() == 2 and LINEAR.knows(linear_module)
    return out, owned


def _plan_call(
    module: MessagePassing, edge_index: Any, arguments: dict[str, Any]
) -> Aggregation | Callable[..., Tensor]:
    """The replacement of ``module.propagate``: an aggregation, or upstream's function."""
    if replaced_on(module, "propagate"):
        # PyG does this itself for decomposed layers and while explaining.
        _refuse(module, Refusal("propagate is replaced on the instance"))
    upstream = generated_propagate(module)
    if upstream is None:
        return functools.partial(_left, None, _own_propagate)
    planned = _planned(module, edge_index, (), arguments)
    if isinstance(planned, Refusal):
        _refuse(module, planned)
        return functools.partial(_left, planned, upstream)
    if not isinstance(planned, Aggregation):
        return _computing(planned)
    take(module)
    return planned


def _computing(computation: traced.Computation) -> Callable[..., Tensor]:
    return lambda *_, **__: computation()


def plan_sum(module: MessagePassing, edge_index: Any, **arguments: Any) -> Aggregation | None:
    """The sum that ``module.propagate`` asks for, to be computed by an operator that does more.

    ``None`` if it asks for something else or would be left to upstream, which is not counted.
    """
    if generated_propagate(module) is None:
        return None
    planned = plan_propagate(module, edge_index, None, arguments)
    return None if isinstance(planned, Refusal) or planned.reduce != "sum" else planned


def aggregate_by(
    operator: Callable[..., Tensor], module: MessagePassing, planned: Aggregation
) -> tuple[Tensor, bool]:
    """:func:`aggregate` of what :func:`plan_sum` has found, by an operator.

    See :meth:`fastgraph.layers.aggregation.Aggregation.compute_by`.
    """
    take(module)
    return planned.compute_by(operator), planned.is_owned


def generated_propagate(module: MessagePassing) -> Callable[..., Tensor] | None:
    """The method that PyG generated, if a call of ``module.propagate`` would reach it."""
    cls = type(module)
    upstream: Callable[..., Tensor] | None = getattr(cls.propagate, "_fastgraph_upstream", None)
    if upstream is None or replaced_on(module, "propagate") or not from_template(cls, upstream):
        return None
    return upstream


def _planned(
    module: MessagePassing, edge_index: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Aggregation | traced.Computation | Refusal:
    if args:
        return Refusal("propagate was called with positional arguments")
    if known_message(type(module)) is None:
        return traced.plan(module, edge_index, kwargs)
    if type(module.aggr_module) not in REDUCTIONS:
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling and traced.is_small(module, edge_index, *kwargs.values()):
            return TOO_SMALL
        return traced.plan(module, edge_index, kwargs)
    planned = plan_propagate(module, edge_index, kwargs.get("size"), kwargs)
    return planned if isinstance(planned, Refusal) else planned.look_up()


def _refuse(module: MessagePassing, refusal: Refusal) -> None:
    if refusal is TOO_SMALL:
        if not is_counted(module):
            count_too_small(label_of(type(module)))
        return
    refuse(module, refusal, has_route=known_message(type(module)) is not None)


def plan_propagate(
    module: MessagePassing, edge_index: object, size: Any, arguments: Mapping[str, Any]
) -> Aggregation | Refusal:
    """The aggregation that ``module.propagate`` asks for, or the reason to leave it to upstream.

    Raises what upstream raises for a graph and features that do not fit together.
    """
    cls = type(module)
    message = known_message(cls)
    if message is None:
        return _OTHER_MESSAGE
    refusal = execution_mode() or module_refusal(module, cls)
    if refusal is not None:
        return refusal
    edges = edges_of(edge_index, module.flow)
    if isinstance(edges, Refusal):
        return edges
    refusal = too_few_edges(edges.num_edges)
    if refusal is not None:
        return refusal
    reduce = REDUCTIONS[type(module.aggr_module)]
    # Where PyG multiplies by the adjacency matrix instead of making messages.
    fused = edges.values is not None and module.fuse
    fused_index = isinstance(edge_index, EdgeIndex) and _fuses_edge_index(module, edge_index)
    if (fused or fused_index) and not multiplies_adjacency(cls):
        return Refusal("message_and_aggregate is overridden")
    if (fused or fused_index) and not _reduces_by(module.aggr, reduce):
        return Refusal("aggr names another reduction than aggr_module is")
    if fused_index and module.flow != "source_to_target":
        return Refusal("EdgeIndex.matmul does not look at the flow")
    if fused_index and reduce not in SUMS:
        return Refusal("EdgeIndex.matmul breaks ties of max and min in its own way")
    if fused_index and not _is_product(edge_index, arguments.get("x"), arguments):
        return Refusal("EdgeIndex.matmul has sizes, dtypes or errors of its own")

    located = _features(module, edge_index, edges, size, arguments.get("x"), fused)
    if isinstance(located, Refusal):
        return located
    x, num_out = located
    if edges.index.device != x.device:
        return Refusal("edge_index is not on the device of the features")
    if fused:
        found = _product_weight(edges, x)
    else:
        found = _message_weight(message, arguments, edges, x, module.node_dim)
    if isinstance(found, Refusal):
        return found
    weight = found
    if weight is not None:
        if weight.dtype != x.dtype:
            dtype = torch.promote_types(weight.dtype, x.dtype)
            x, weight = x.to(dtype), weight.to(dtype)
        if weight.requires_grad and reduce not in SUMS:
            return Refusal("max and min have no gradient for edge weights")
    operator = "spmm" if reduce in SUMS else "segment_reduce"
    refusal = REGISTRY.refusal(operator, device_type(x), x.dtype)
    if refusal is not None:
        return refusal
    node_dim = module.node_dim + x.dim() if module.node_dim < 0 else module.node_dim
    ties = "winner" if fused or _scatters_to_one_winner(x) else "split"
    return Aggregation(x, edges, weight, reduce, num_out, node_dim, ties, fused or fused_index)


def _reduces_by(name: object, reduce: str) -> bool:
    """True if ``aggr`` is a name of a reduction: products go by it, messages by ``aggr_module``."""
    return name == reduce or (name == "add" and reduce == "sum")


def _scatters_to_one_winner(x: Tensor) -> bool:
    """True if upstream gives the gradient of an extremum to one edge, as torch_scatter does.

    ``scatter_reduce`` splits it; ``torch.sparse.mm``, on matrices, does not either.
    """
    return x.is_cuda and WITH_TORCH_SCATTER and not torch.compiler.is_compiling()


def _fuses_edge_index(module: MessagePassing, edge_index: EdgeIndex) -> bool:
    return bool(module.fuse and module.SUPPORTS_FUSED_EDGE_INDEX and edge_index.is_sorted_by_col)


def _is_product(edge_index: Any, x: Any, arguments: Mapping[str, Any]) -> bool:
    """True if the product of an ``EdgeIndex`` is the aggregation of the same edges."""
    features = x[0] if isinstance(x, (tuple, list)) and len(x) == 2 else None
    if not isinstance(features, Tensor) or features.dim() != 2:
        return False
    num_src, num_dst = edge_index.sparse_size()
    if num_src != len(features) or num_dst != _rows_of(x[1], edge_index):
        return False
    if num_src != num_dst and features.requires_grad and torch.is_grad_enabled():
        return False  # upstream's backward pass raises
    weight = arguments.get("edge_weight")
    if weight is None:
        return features.dtype is torch.get_default_dtype()  # that of the values it makes
    return (
        isinstance(weight, Tensor)
        and weight.dtype is features.dtype
        and weight.shape == edge_index.shape[1:]
    )


def _rows_of(destinations: Any, edge_index: Any) -> object:
    """The number of aggregating nodes, if features or the graph tell it."""
    if isinstance(destinations, Tensor):
        return len(destinations) if destinations.dim() > 0 else None
    found: object = edge_index.sparse_size(1)
    return found if type(found) is int else -1


def _features(
    module: MessagePassing,
    edge_index: Any,
    edges: Edges,
    size: Any,
    features: Any,
    fused: bool,
) -> tuple[Tensor, int] | Refusal:
    """The features to gather and the number of aggregating nodes, found as ``collect`` does."""
    if edges.values is not None or isinstance(edge_index, EdgeIndex):
        sizes = module._check_input(edge_index, size)
    else:
        sizes = [None, None] if size is None else list(size)
    if len(sizes) < 2:
        return Refusal(f"size has {len(sizes)} entries")
    aggregating, gathered = (1, 0) if module.flow == "source_to_target" else (0, 1)
    if isinstance(features, (tuple, list)):
        if len(features) != 2:
            return Refusal(f"x has {len(features)} entries")
        for position, part in enumerate(features):
            if isinstance(part, Tensor) and not fused:
                module._set_size(sizes, position, part)
        features = features[0]  # as upstream, whatever the flow
    elif isinstance(features, Tensor) and not fused:
        module._set_size(sizes, gathered, features)
    # A subclass may have a dense matrix for its edges, but not a sparse one.
    refusal = (operand if edges.ptr is None and edges.values is None else plain_tensor)(
        "x", features
    )
    if refusal is not None:
        return refusal
    if features.layout != torch.strided:
        return Refusal(f"features of layout {features.layout}")
    if features.dim() < 2 or not -features.dim() <= module.node_dim < features.dim():
        return Refusal(f"features of {features.dim()} dimensions with node_dim={module.node_dim}")
    if fused and sizes[gathered] != features.shape[module.node_dim]:
        return Refusal("a sparse adjacency matrix of another size than the features")
    num_out = sizes[gathered] if sizes[aggregating] is None else sizes[aggregating]
    if type(num_out) is int:
        return (features, num_out) if num_out >= 0 else Refusal("a negative size")
    if not isinstance(num_out, torch.SymInt):
        return Refusal(f"a size that is a {type(num_out).__name__}")
    found: Any = num_out
    return features, found


def _product_weight(edges: Edges, x: Tensor) -> Tensor | Refusal | None:
    """The values of the adjacency matrix, or the reason why PyG could not multiply by it."""
    if x.dim() != 2:
        return Refusal("a sparse adjacency matrix with features that are not two-dimensional")
    if edges.values is not None and edges.values.dtype != x.dtype:
        return Refusal("the sparse adjacency matrix and the features have different dtypes")
    return edges.values


def _message_weight(
    message: Message,
    arguments: Mapping[str, Any],
    edges: Edges,
    x: Tensor,
    node_dim: int,
) -> Tensor | Refusal | None:
    """The factor of each edge as ``[E]``, ``None`` for plain copies, or a reason to refuse."""
    if edges.values is not None and edges.ptr is not None and edges.transpose:
        return Refusal("a sparse CSC adjacency matrix without message_and_aggregate")
    if message.weight is None:
        return None
    weight: Tensor | None = arguments.get(message.weight)
    if weight is None and message.collected:
        weight = edges.values
    if weight is None:
        return None if message.optional else Refusal(f"{message.weight} is missing")
    refusal = operand(message.weight, weight)
    if refusal is not None:
        return refusal
    if weight.numel() != edges.num_edges:
        return Refusal(f"{message.weight} does not have one value for each edge")
    if not weight.is_floating_point():
        return Refusal(f"{message.weight} has dtype {weight.dtype}")
    if weight.device != x.device or weight.layout != torch.strided:
        return Refusal(f"{message.weight} is not a dense tensor on the device of the features")
    if x.dim() > 2 and node_dim not in (-2, x.dim() - 2):
        return Refusal("edge weights with channels before the last two dimensions")
    return weight if weight.dim() == 1 else weight.view(-1)
