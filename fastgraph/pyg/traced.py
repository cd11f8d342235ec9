"""Message passing whose ``message`` is any function: it is traced into an edge program.

A message is traced once for each state of its layer and each description of its arguments. At a
later call a guard compares both with what was traced (:mod:`fastgraph.edge_programs.reading`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.typing import WITH_TORCH_SCATTER

from fastgraph.edge_programs.frozen import UnknownError, frozen
from fastgraph.edge_programs.node_counts import NUM_GATHERED, NUM_ROWS
from fastgraph.edge_programs.program import Place
from fastgraph.edge_programs.reading import Reading
from fastgraph.edge_programs.trace import trace
from fastgraph.edge_programs.traced import Argument, Index, Reduction, Traced
from fastgraph.graphs.edges import KnownGraph, OutOfRange, graph_of, too_large, unless_out_of_range
from fastgraph.layers.prepared import Prepared
from fastgraph.layers.tracing import (
    Known,
    Outcomes,
    mode_refusal,
    read_message,
    stand_in,
    state_refusal_of,
)
from fastgraph.layers.typed_edges import types_among
from fastgraph.ops.library import is_defined_by
from fastgraph.plugins.backend import device_type
from fastgraph.plugins.refusal import Refusal
from fastgraph.pyg.own_aggregates import Aggregate, known_aggregate
from fastgraph.pyg.softmax import known_softmax
from fastgraph.pyg.state import state_refusal
from fastgraph.registry.registry import REGISTRY
from fastgraph.routing.conditions import execution_mode, operand, too_few_edges
from fastgraph.routing.programs import is_by_identity, last_outcome, remember
from fastgraph.routing.sizes import PROGRAM, TOO_SMALL, is_too_small, of_many
from fastgraph.routing.small_calls import Kind, SmallCalls
from fastgraph.routing.status import count_program, counted_as_whole
from fastgraph.upstream import label_of

Computation = Callable[[], Tensor]

_COMPILED = Refusal("compiled code traces no message")

_EXTREMA = frozenset((Reduction("max"), Reduction("min")))

_ENDS = ("edge_index_i", "edge_index_j", "index")
_SIZES = ("size_i", "size_j", "dim_size")
_NEVER = ("edge_index", "adj_t", "size")
_SPECIAL = frozenset((*_ENDS, *_SIZES, *_NEVER, "ptr"))

_OVERRIDABLE = ("_index_select", "_check_input", "_set_size", "_lift", "_collect")

_METHODS = attrgetter("message", "update", "propagate", "aggregate", *_OVERRIDABLE)


@dataclass(frozen=True)
class _Form:
    """The arguments that a class's methods take.

    Attributes:
        message: the function that is traced.
        update: the function that runs afterwards.
        aggregate: what is known of the function between them, if it is.
        methods: those that the form is made of, which a class may get anew.
        taken: the arguments of ``message``, with their defaults.
        updated: the arguments of ``update``, with their defaults.
        passed: the arguments of ``propagate``; ``None`` for any.
        refusal: why no call can be computed.
    """

    message: Any
    update: Any
    aggregate: Aggregate | None
    methods: tuple[Any, ...]
    taken: tuple[tuple[str, Any], ...]
    updated: tuple[tuple[str, Any], ...]
    passed: frozenset[str] | None
    refusal: Refusal | None


_FORMS: WeakKeyDictionary[type, _Form] = WeakKeyDictionary()


def form_of(module: MessagePassing) -> _Form:
    """The arguments that the methods of a layer's class take."""
    cls = type(module)
    form, methods = _FORMS.get(cls), _METHODS(cls)
    if form is None or form.methods != methods:
        if form is None or _of_upstream(form.methods) != _of_upstream(methods):
            form = _make_form(module, cls)
        form = _FORMS[cls] = replace(form, methods=methods)  # routes may have been put back anew
    return form


def _of_upstream(methods: tuple[Any, ...]) -> list[Any]:
    return [getattr(method, "_fastgraph_upstream", method) for method in methods]


def _make_form(module: MessagePassing, cls: type[MessagePassing]) -> _Form:
    upstream = getattr(cls.propagate, "_fastgraph_upstream", cls.propagate)
    parameters = inspect.signature(upstream).parameters
    passed = None
    if all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
        passed = frozenset(parameters) - {"self", "edge_index", "size"}
    taken, updated = (
        tuple((p.name, p.default) for p in module.inspector.get_param_dict(name).values())
        for name in ("message", "update")
    )
    return _Form(
        cls.message,
        cls.update,
        known_aggregate(cls),
        _METHODS(cls),
        taken,
        () if cls.update is MessagePassing.update else updated,
        passed,
        _class_refusal(cls, [name for name, _ in taken], [name for name, _ in updated]),
    )


def _class_refusal(
    cls: type[MessagePassing], taken: list[str], updated: list[str]
) -> Refusal | None:
    if known_aggregate(cls) is None:
        return Refusal("aggregate is overridden")
    for name in _OVERRIDABLE:
        if getattr(cls, name) is not getattr(MessagePassing, name):
            return Refusal(f"{name} is overridden")
    if not is_by_identity(cls):
        return Refusal("its class says which layers are equal")
    if not inspect.isfunction(cls.message):
        return Refusal("its message is no function")
    for name in taken:
        if name in _NEVER:
            return Refusal(f"its message takes {name}")
    if cls.update is MessagePassing.update:
        return None
    for name in updated:
        if name in _SPECIAL or name[-2:] in ("_i", "_j"):
            return Refusal(f"its update takes {name}")
    return None


KNOWN = Outcomes()
"""Of the messages of layers."""


def _kind_of(arguments: Mapping[str, Any]) -> Kind:
    found: list[object] = []
    for value in arguments.values():
        for part in value if type(value) is tuple else (value,):
            found.append(type(part))
            if isinstance(part, Tensor):
                shape = part.shape  # part of which takes longer to get than all of it
                found += shape[1] if len(shape) == 2 else shape[1:], part.dtype
    return tuple(found)


_TOO_LITTLE = SmallCalls()


def is_small(module: MessagePassing, edge_index: object, arguments: Mapping[str, Any]) -> bool:
    """True if a call has too little to compute, and so had the layer's last one.

    Then nothing else is looked at. Not to be asked while code is compiled.
    """
    if last_outcome(module) is not TOO_SMALL:
        return False  # there may be other reasons, which are to be told
    if is_too_small(PROGRAM, edge_index, of_many):
        return True
    return (
        type(edge_index) is Tensor
        and edge_index.is_cpu
        and _TOO_LITTLE.cover(module, edge_index.numel() // 2, _kind_of, arguments)
    )


def plan(module: MessagePassing, edge_index: object, arguments: Any) -> Computation | Refusal:
    """The computation that ``module.propagate(edge_index, **arguments)`` asks for, and counts.

    Or the reason to leave it to upstream, for example that its message is no edge program.
    """
    if torch.compiler.is_compiling():
        return _COMPILED
    planned = _plan(module, edge_index, arguments)
    if isinstance(planned, Refusal):
        remember(module, planned)
    return planned


def _plan(
    module: MessagePassing, edge_index: Any, arguments: Mapping[str, Any]
) -> Computation | Refusal:
    form = form_of(module)
    refusal = form.refusal or state_refusal(module)
    if refusal is not None:
        return refusal
    aggregate = form.aggregate
    assert aggregate is not None
    reductions = aggregate.reductions(module)
    if isinstance(reductions, Refusal):
        return reductions
    if is_too_small(PROGRAM, edge_index, of_many):
        return TOO_SMALL
    refusal = execution_mode() or mode_refusal() or _index_refusal(edge_index)
    if refusal is not None:
        return refusal
    num_edges = edge_index.shape[1]
    passed = arguments.keys() - {"size"}
    if form.passed is not None and passed != form.passed:
        return Refusal("propagate was called with other arguments than it takes")
    collected = _collect(module, form, arguments, num_edges, edge_index.dtype)
    if isinstance(collected, Refusal):
        return collected
    num_in, num_out, tensors, described = collected
    transpose = module.flow == "target_to_source"
    besides = aggregate.besides(module, arguments, edge_index, num_out)
    if isinstance(besides, Refusal):
        return besides
    tensors |= besides
    refusal = _operands_refusal(edge_index, tensors, reductions)
    if refusal is not None:
        return refusal
    described_besides = tuple((n, _place(n, t, num_edges, False)) for n, t in besides.items())
    outcome = _outcome(module, form, (described, described_besides), reductions, edge_index.device)
    if isinstance(outcome, Refusal):
        return outcome
    refusal = REGISTRY.refusal("edge_program", device_type(edge_index), outcome.traced.dtype)
    if refusal is not None:
        return refusal
    # Upstream's operations on sharded tensors cost as much more as the operator does.
    is_sharded = is_defined_by(edge_index, *tensors.values())
    on_gpu = not edge_index.is_cpu
    if not is_sharded and outcome.work.is_too_little(num_edges, on_gpu=on_gpu):
        if not on_gpu:
            _TOO_LITTLE.add(module, num_edges, _kind_of(arguments))
        return TOO_SMALL
    if num_out * outcome.traced.mapped_size > num_edges * outcome.traced.matrix_size > 0:
        return Refusal("its sums of nodes would take more memory than its matrices of edges")
    if module.node_dim not in (0, -1 - len(outcome.traced.shapes[0])):
        return Refusal(f"its messages do not have their edges in dimension {module.node_dim}")
    ends = (num_out, num_in) if transpose else (num_in, num_out)
    refusal = too_large(*ends, num_edges)
    if refusal is not None:
        return refusal
    run, index, types = outcome.compute, edge_index, outcome.traced.types
    if types is not None:
        edges = num_in, num_out, transpose, types.count, outcome.traced.pairs
        found = types_among(edge_index, *tensors.values())
        typed = found.typed_edges(edge_index, tensors[types.name], *edges)
        if isinstance(typed, OutOfRange):
            return typed
        run = functools.partial(run, typed=typed)
        if typed.edges is not None and typed.num_gathered is not None:
            index, ends = typed.edges, (typed.num_gathered, num_out)
    if not is_sharded:
        graph = unless_out_of_range(graph_of, index, None, *ends)
        if isinstance(graph, OutOfRange):
            return graph
        run = functools.partial(KnownGraph(graph, index).while_computing, run)

    def compute() -> Tensor:
        remember(module, outcome)
        count_program(label_of(type(module)))
        results = run(module, tensors, edge_index, num_in, num_out, transpose)
        named = dict(zip(reductions, results, strict=True))
        out = aggregate.combined(module, named, edge_index[int(not transpose)])
        if form.updated or form.update is not MessagePassing.update:
            own = {name: arguments.get(name, default) for name, default in form.updated}
            out = module.update(out, **own)
        return out

    return compute


def _index_refusal(edge_index: Any) -> Refusal | None:
    """Why a graph, of whatever form, is left to upstream."""
    refusal = operand("edge_index", edge_index)
    if refusal is not None:
        return refusal
    if (
        edge_index.layout is not torch.strided
        or edge_index.dim() != 2
        or edge_index.shape[0] != 2
        or edge_index.dtype not in (torch.int64, torch.int32)
    ):
        return Refusal("its message is traced for a plain edge_index only")
    return too_few_edges(edge_index.shape[1])


def _operands_refusal(
    edge_index: Tensor, tensors: Mapping[str, Tensor], reductions: tuple[Reduction, ...]
) -> Refusal | None:
    """Why tensors that a message takes are left to upstream."""
    for name, tensor in tensors.items():
        refusal = operand(name, tensor)
        if refusal is None and tensor.device != edge_index.device:
            refusal = Refusal("edge_index is not on the device of the features")
        if refusal is not None:
            return refusal
    dtype = next((t.dtype for t in tensors.values() if t.is_floating_point()), None)
    if dtype is None:
        return Refusal("its message takes no tensors of a floating-point dtype")
    refusal = REGISTRY.refusal("edge_program", device_type(edge_index), dtype)
    if refusal is not None:
        return refusal
    if not edge_index.is_cpu and torch.is_autocast_enabled(edge_index.device.type):
        return Refusal("its message is traced without autocast on a GPU")
    if edge_index.is_cuda and WITH_TORCH_SCATTER and not _EXTREMA.isdisjoint(reductions):
        return Refusal("torch_scatter gives the gradient of an extremum on a GPU to one edge")
    return None


_Described = tuple[tuple[str, object], ...]
_Collected = tuple[int, int, dict[str, Tensor], _Described]


def _collect(
    module: MessagePassing,
    form: _Form,
    arguments: Mapping[str, Any],
    num_edges: int,
    index_dtype: torch.dtype,
) -> _Collected | Refusal:
    """The arguments of a message before they are gathered, found as upstream's ``collect`` does.

    Returns:
        The numbers of gathered and of aggregating nodes, the tensors, and all arguments described.
    """
    size = arguments.get("size")
    sizes = [None, None] if size is None else list(size)
    if len(sizes) != 2:
        return Refusal("a size that is no pair")
    is_forward = module.flow == "source_to_target"
    own = {"i": 1, "j": 0} if is_forward else {"i": 0, "j": 1}
    tensors: dict[str, Tensor] = {}
    described: list[tuple[str, object]] = []
    for name, default in form.taken:
        if name in _SPECIAL:
            described.append((name, _special(name, index_dtype)))
            continue
        is_lifted = name[-2:] in ("_i", "_j")
        key = name[:-2] if is_lifted else name
        value = arguments.get(key, inspect.Parameter.empty if is_lifted else default)
        if value is inspect.Parameter.empty:
            return Refusal(f"{key} is missing")
        if is_lifted:
            found = _lifted(module, name, value, sizes, own[name[-1]])
            if isinstance(found, Refusal):
                return found
            value = found
        if isinstance(value, Tensor):
            if value.layout is not torch.strided:
                return Refusal(f"{key} is not a dense tensor")
            tensors[name] = value
            described.append((name, _place(name, value, num_edges, is_lifted)))
        else:
            try:
                described.append((name, _Value(frozen(value), value)))
            except UnknownError as unknown:
                return Refusal(f"its message takes {name}, {unknown}")
    num_out, num_in = sizes[own["i"]], sizes[own["j"]]
    num_out, num_in = num_in if num_out is None else num_out, num_out if num_in is None else num_in
    if type(num_out) is not int or type(num_in) is not int or min(num_in, num_out) < 0:
        return Refusal("the number of nodes is not known")
    return num_in, num_out, tensors, tuple(described)


def _special(name: str, index_dtype: torch.dtype) -> object:
    """The stand-in for an argument that is of the graph."""
    if name == "ptr":
        return _Value(name, None)
    place: Place = "gathered" if name[-2:] == "_j" else "row"
    if name in _ENDS:
        return Index(place, index_dtype)
    return _Value(name, NUM_ROWS if place == "row" else NUM_GATHERED)


@dataclass(frozen=True)
class _Value:
    """A value that a message takes as it is, compared by its frozen form."""

    frozen: object
    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Value) and self.frozen == other.frozen

    def __hash__(self) -> int:
        return hash(self.frozen)


def _lifted(
    module: MessagePassing, name: str, value: Any, sizes: list[Any], end: int
) -> Tensor | Refusal | None:
    """The features of nodes that an argument is gathered from."""
    node_dim = module.node_dim
    if isinstance(value, (tuple, list)):
        if len(value) != 2 or module.flow != "source_to_target":
            return Refusal(f"{name} is of features that are no pair of sources and destinations")
        parts = list(enumerate(value))
        value = value[end]
    else:
        parts = [(end, value)]
    for number, part in parts:
        if part is None:
            continue
        if not isinstance(part, Tensor) or part.dim() == 0:
            return Refusal(f"{name} is of a {type(part).__name__}, not of a tensor of nodes")
        if node_dim != 0 and node_dim != -part.dim():
            return Refusal(f"features of {part.dim()} dimensions with node_dim={node_dim}")
        if sizes[number] is None:
            sizes[number] = part.shape[0]
        elif sizes[number] != part.shape[0]:
            return Refusal(f"{name} is of features that do not fit the number of nodes")
    found: Tensor | None = value
    return found


def _place(name: str, tensor: Tensor, num_edges: int, is_lifted: bool) -> Argument:
    if is_lifted:
        place: Any = "row" if name[-1] == "i" else "gathered"
    elif tensor.dim() > 0 and tensor.shape[0] == num_edges:
        place = "edge"
    else:
        return Argument("parameter", tuple(tensor.shape), tensor.dtype)
    return Argument(place, tuple(tensor.shape[1:]), tensor.dtype)


def _outcome(
    module: MessagePassing,
    form: _Form,
    described: tuple[_Described, tuple[tuple[str, Argument], ...]],
    reductions: tuple[Reduction, ...],
    device: torch.device,
) -> Prepared | Refusal:
    """The outcome of tracing the message, now or before."""
    # The cache of autocast changes no value. The default dtype is that of a mask times a number.
    is_autocast = device.type == "cpu" and torch.is_autocast_enabled("cpu")
    autocast = torch.get_autocast_dtype("cpu") if is_autocast else None
    dtypes = autocast, torch.get_default_dtype()
    key = (type(module), form.message, reductions, described, device, dtypes)
    known = KNOWN.get(key, module)
    if known is not None:
        return known.outcome
    given = module, form, described, reductions, device, autocast
    return KNOWN.made(key, module, functools.partial(_traced, *given))


def _traced(
    module: MessagePassing,
    form: _Form,
    described: tuple[_Described, tuple[tuple[str, Argument], ...]],
    reductions: tuple[Reduction, ...],
    device: torch.device,
    autocast: torch.dtype | None,
) -> Known:
    refusal = state_refusal_of(module, device)
    if refusal is not None:
        return Known(Reading(form.message, module).guard(module), refusal)
    own, besides = described
    arguments = {name: a.value if isinstance(a, _Value) else a for name, a in own}

    def read() -> tuple[list[Reading], Traced | Refusal]:
        reading = Reading(form.message, stand_in(module))
        # Functions that have routes of their own are part of the message, and not counted.
        with known_softmax(), counted_as_whole(module):
            traced = trace(
                reading,
                arguments,
                reductions,
                dict(besides),
                autocast,
                on_gpu=device.type == "cuda",
                compared_numbers=reading.compared_numbers,
            )
            return [reading], traced

    (guard,), traced = read_message(read, module)
    if isinstance(traced, Refusal):
        return Known(guard, traced)
    return Known(guard, Prepared.of(traced, module, arguments))
