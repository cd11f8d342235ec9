"""Message passing whose ``message`` is any function: it is traced into an edge program.

A message is traced once for each state of its layer and each description of its arguments. At a
later call a guard compares both with what was traced (:mod:`fastgraph.edge_programs.reading`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.typing import WITH_TORCH_SCATTER

from fastgraph.edge_programs.no_edges import raises_without_edges
from fastgraph.edge_programs.reading import Reading
from fastgraph.edge_programs.trace import trace
from fastgraph.edge_programs.traced import Argument, Reduction, Traced
from fastgraph.graphs.edges import KnownGraph, OutOfRange, graph_of, too_large, unless_out_of_range
from fastgraph.graphs.graph import MAX_INDEX
from fastgraph.layers.prepared import DRAWS_APART, Prepared
from fastgraph.layers.tracing import (
    Known,
    Outcomes,
    hook_refusal,
    read_message,
    stand_in,
    state_refusal_of,
)
from fastgraph.layers.typed_edges import types_among
from fastgraph.ops.library import is_defined_by
from fastgraph.plugins.backend import device_type
from fastgraph.plugins.refusal import Refusal
from fastgraph.pyg.collecting import (
    NEVER,
    SPECIAL,
    Collected,
    Described,
    Kept,
    Value,
    collect,
    key_of,
    place_of,
)
from fastgraph.pyg.matrices import Unfolded, is_matrix, unfolded
from fastgraph.pyg.modules import make_lazy_weights
from fastgraph.pyg.own_aggregates import Aggregate, known_aggregate, nothing
from fastgraph.pyg.repeated import Repeatable, Sizes, keep, surroundings
from fastgraph.pyg.softmax import known_softmax
from fastgraph.pyg.state import state_refusal
from fastgraph.registry.registry import REGISTRY
from fastgraph.routing.conditions import execution_mode, operand, too_few_edges
from fastgraph.routing.programs import is_by_identity, last_outcome, remember
from fastgraph.routing.sizes import PROGRAM, TOO_SMALL, are_too_few, is_too_small, of_many
from fastgraph.routing.small_calls import Kind, SmallCalls
from fastgraph.routing.status import count_program, counted_as_whole
from fastgraph.upstream import label_of

Computation = Callable[[], Tensor]

_COMPILED = Refusal("compiled code traces no message")

_EXTREMA = frozenset((Reduction("max"), Reduction("min")))

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
        collected: the names of the arguments that any of them takes.
        passed: the arguments of ``propagate``; ``None`` for any.
        refusal: why no call can be computed.
        name: is equal to that of the same form with methods that were put back anew, alone.
    """

    message: Any
    update: Any
    aggregate: Aggregate | None
    methods: tuple[Any, ...]
    taken: tuple[tuple[str, Any], ...]
    updated: tuple[tuple[str, Any], ...]
    collected: frozenset[str]
    passed: frozenset[str] | None
    refusal: Refusal | None
    name: object = field(default_factory=object)


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
        frozenset(
            name
            for method in ("message", "aggregate", "update")
            for name in module.inspector.get_param_dict(method)
        ),
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
        if name in NEVER:
            return Refusal(f"its message takes {name}")
    if cls.update is MessagePassing.update:
        return None
    for name in updated:
        if name in SPECIAL or name[-2:] in ("_i", "_j"):
            return Refusal(f"its update takes {name}")
    return None


KNOWN = Outcomes()
"""Of the messages of layers."""


def kind_of(*arguments: Any) -> Kind:
    """The shapes and dtypes that calls share which have as much to compute for an edge."""
    found: list[object] = []
    for value in arguments:
        for part in value if type(value) is tuple else (value,):
            if isinstance(part, Tensor):
                shape = part.shape  # part of which takes longer to get than all of it
                channels = shape[1] if len(shape) == 2 else shape[1:]
                found.append((type(part), channels, part.dtype))
            else:
                found.append(type(part))
    return tuple(found)


_TOO_LITTLE = SmallCalls()


def is_small(module: MessagePassing, edge_index: object, *arguments: object) -> bool:
    """True if a call has too little to compute, and so had the layer's last one.

    Then nothing else is looked at. Not to be asked while code is compiled.
    """
    if last_outcome(module) is not TOO_SMALL:
        return False  # there may be other reasons, which are to be told
    if type(edge_index) is not Tensor or not edge_index.is_cpu:
        return False
    shape = edge_index.shape
    if is_matrix(edge_index):
        num_edges = edge_index._nnz()
    elif len(shape) == 2 and shape[0] == 2:
        num_edges = shape[1]
    else:
        return False
    return are_too_few(PROGRAM, num_edges) or _TOO_LITTLE.cover(
        module, num_edges, kind_of, *arguments
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
    refusal = execution_mode() or hook_refusal()
    if refusal is not None:
        return refusal
    given = arguments
    matrix: Unfolded | None = None
    if is_matrix(edge_index):
        if edge_index.is_cpu and are_too_few(PROGRAM, edge_index._nnz()):
            return TOO_SMALL
        of_entries = unfolded(module, form.collected, edge_index, arguments)
        if isinstance(of_entries, Refusal):
            return of_entries
        matrix = of_entries
        if matrix.has_offsets and "ptr" in dict(form.taken):
            return Refusal("its message takes ptr")
        edge_index, arguments = matrix.edges.index, matrix.arguments
    found = _message(module, form, reductions, edge_index, arguments)
    if isinstance(found, Refusal):
        return found
    (num_in, num_out, tensors, _), message = found
    num_edges = edge_index.shape[1]
    transpose = module.flow == "target_to_source"
    make_lazy_weights(module, arguments)
    known = KNOWN.get(message.key, module)
    if known is None:
        trace_it = functools.partial(_traced, module, form, message)
        outcome = KNOWN.made(message.key, module, trace_it)
        known = KNOWN.get(message.key, module)
    else:
        outcome = known.outcome
    if isinstance(outcome, Refusal):
        return outcome
    if outcome.traced.dtype is not message.dtype:
        refusal = REGISTRY.refusal("edge_program", device_type(edge_index), outcome.traced.dtype)
        if refusal is not None:
            return refusal
    # Upstream's operations on sharded tensors cost as much more as the operator does.
    is_sharded = message.kept is None and is_defined_by(edge_index, *tensors.values())
    if is_sharded and outcome.traced.dropouts:
        return Refusal("its message is no edge program on ranks: it draws random numbers")
    if num_edges == 0 and _raises_without_edges(module, form, message, outcome):
        return Refusal("its message raises without edges")
    if outcome.draws_apart(num_edges, tensors.values()):
        return DRAWS_APART
    on_gpu = not edge_index.is_cpu
    if not is_sharded and outcome.work.is_too_little(num_edges, on_gpu=on_gpu):
        if not on_gpu:
            _TOO_LITTLE.add(module, num_edges, kind_of(*given.values()))
        return TOO_SMALL
    if num_out * outcome.traced.mapped_size > num_edges * outcome.traced.matrix_size > 0:
        return Refusal("its sums of nodes would take more memory than its matrices of edges")
    if module.node_dim not in (0, -1 - len(outcome.traced.shapes[0])):
        return Refusal(f"its messages do not have their edges in dimension {module.node_dim}")
    ends = (num_out, num_in) if transpose else (num_in, num_out)
    if max(num_in, num_out, num_edges) > MAX_INDEX and (large := too_large(*ends, num_edges)):
        return large
    index, types = edge_index, outcome.traced.types
    run: Callable[..., list[Tensor]] = outcome.compute
    if types is not None:
        if matrix is not None:
            return Refusal("types of the edges of a sparse adjacency matrix")
        edges = num_in, num_out, transpose, types.count, outcome.traced.pairs
        among = types_among(edge_index, *tensors.values())
        typed = among.typed_edges(edge_index, tensors[types.name], *edges)
        if isinstance(typed, OutOfRange):
            return typed
        run = functools.partial(run, typed=typed)
        if typed.edges is not None and typed.num_gathered is not None:
            index, ends = typed.edges, (typed.num_gathered, num_out)
    if not is_sharded:
        graph = unless_out_of_range(graph_of, index, None, *ends)
        if isinstance(graph, OutOfRange):
            return graph
        if outcome.is_direct and types is None and message.kept is not None:
            run = functools.partial(run, graph=graph)
        else:
            run = functools.partial(KnownGraph(graph, index).while_computing, run)
        if matrix is not None:
            run = functools.partial(matrix.edges.while_computing, run)
    is_usual = message.kept is not None and matrix is None and types is None and not on_gpu
    if known is not None and is_usual:
        sizes = Sizes.of(edge_index, arguments.values(), num_in, num_out)
        keep(module, _repeatable(module, form, message, known, edge_index, arguments, sizes))

    def compute() -> Tensor:
        remember(module, outcome)
        count_program(label_of(type(module)))
        results = run(module, tensors, edge_index, num_in, num_out, transpose)
        named = dict(zip(reductions, results, strict=True))
        out = aggregate.combined(module, named, lambda: edge_index[int(not transpose)])
        if form.updated or form.update is not MessagePassing.update:
            own = {name: arguments.get(name, default) for name, default in form.updated}
            out = module.update(out, **own)
        return out

    return compute


def _repeatable(
    module: MessagePassing,
    form: _Form,
    message: _Message,
    known: Known,
    edge_index: Tensor,
    arguments: Mapping[str, Any],
    sizes: Sizes,
) -> Repeatable:
    """A call that was planned, for the next one like it."""
    assert form.aggregate is not None and message.kept is not None
    names = list(arguments)
    is_updated = bool(form.updated) or form.update is not MessagePassing.update
    return Repeatable(
        type(module),
        _METHODS,
        form.methods,
        names,
        key_of(edge_index, arguments),
        message.kept,
        sizes,
        surroundings(module),
        message.reductions,
        form.aggregate,
        known,
        [(name, names.index(key), position) for name, key, position in message.kept.taken],
        module.flow == "target_to_source",
        label_of(type(module)),
        form.updated if is_updated else None,
    )


class _Key:
    """A key whose hash is computed once."""

    __slots__ = ("_hash", "value")

    def __init__(self, value: object) -> None:
        self.value, self._hash = value, hash(value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.value == other.value


class _Message(NamedTuple):
    """The message of calls of one kind, with all that they have in common.

    Attributes:
        kept: how their arguments are found; ``None`` where that is looked at anew.
        described: the arguments of the message, and what reductions take besides.
        reductions: of the message.
        device: of all tensors.
        autocast: the dtype of autocast on the CPU, if it is enabled.
        dtype: the first of a floating-point tensor.
        key: under which the outcome is known.
    """

    kept: Kept | None
    described: tuple[Described, tuple[tuple[str, Argument], ...]]
    reductions: tuple[Reduction, ...]
    device: torch.device
    autocast: torch.dtype | None
    dtype: torch.dtype
    key: object

    @property
    def named(self) -> dict[str, object]:
        """The arguments of the message, by their names."""
        own, _ = self.described
        return {name: a.value if isinstance(a, Value) else a for name, a in own}


_MOST_KINDS = 256
_KINDS: dict[object, _Message] = {}
"""By all that tells kinds of calls apart but numbers of nodes and edges."""


def _message(
    module: MessagePassing,
    form: _Form,
    reductions: tuple[Reduction, ...],
    edge_index: Any,
    arguments: Mapping[str, Any],
) -> tuple[Collected, _Message] | Refusal:
    """The arguments of a message, and what is known of calls like this one."""
    aggregate = form.aggregate
    assert aggregate is not None
    kind: object = None
    if aggregate.besides is nothing and not torch._C._is_any_autocast_enabled():
        kind = key_of(edge_index, arguments)
    if kind is not None:
        kind = form.name, reductions, module.flow, module.node_dim, torch.get_default_dtype(), kind
        known = _KINDS.get(kind)
        if known is not None and known.kept is not None:
            again = known.kept.collected(arguments)
            if again is not None:
                number = edge_index.shape[1]
                computes = device_type(edge_index), known.dtype
                refusal = too_few_edges(number) or REGISTRY.refusal("edge_program", *computes)
                return refusal or (again, known)
    refusal = _index_refusal(edge_index)
    if refusal is not None:
        return refusal
    passed = arguments.keys() - {"size"}
    if form.passed is not None and passed != form.passed:
        return Refusal("propagate was called with other arguments than it takes")
    num_edges = edge_index.shape[1]
    collected = collect(module, form.taken, arguments, num_edges, edge_index.dtype)
    if isinstance(collected, Refusal):
        return collected
    besides = aggregate.besides(module, arguments, edge_index, collected.num_out)
    if isinstance(besides, Refusal):
        return besides
    kept = None if kind is None else Kept.of(module, arguments, collected)
    tensors = collected.tensors
    tensors |= besides
    dtype = _dtype(edge_index, tensors, reductions)
    if isinstance(dtype, Refusal):
        return dtype
    described_besides = tuple((n, place_of(n, t, num_edges, False)) for n, t in besides.items())
    described = collected.described, described_besides
    device = edge_index.device
    # The cache of autocast changes no value. The default dtype is that of a mask times a number.
    is_autocast = device.type == "cpu" and torch.is_autocast_enabled("cpu")
    autocast = torch.get_autocast_dtype("cpu") if is_autocast else None
    dtypes = autocast, torch.get_default_dtype()
    key = type(module), form.message, reductions, described, device, dtypes
    found = _Message(kept, described, reductions, device, autocast, dtype, _Key(key))
    if kept is not None:
        if len(_KINDS) >= _MOST_KINDS:
            _KINDS.clear()
        _KINDS[kind] = found
    return collected, found


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
        return Refusal("its message is traced for an edge_index or a sparse matrix only")
    return too_few_edges(edge_index.shape[1])


def _dtype(
    edge_index: Tensor, tensors: Mapping[str, Tensor], reductions: tuple[Reduction, ...]
) -> torch.dtype | Refusal:
    """The dtype of the tensors that a message takes, or why they are left to upstream."""
    for name, tensor in tensors.items():
        refusal = operand(name, tensor)
        if refusal is None and tensor.device != edge_index.device:
            refusal = Refusal("edge_index is not on the device of the features")
        if refusal is None and 0 in tensor.shape[1:]:
            refusal = Refusal(f"{name} has no channels")  # upstream has an error, or no work
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
    return dtype


def _raises_without_edges(
    module: MessagePassing, form: _Form, message: _Message, outcome: Prepared
) -> bool:
    """True if upstream's message raises where there are no edges, of which a program knows none."""
    found: bool | None = outcome.derived.get("raises without edges")
    if found is None:
        reading = Reading(form.message, stand_in(module))
        with known_softmax(), counted_as_whole(module):
            found = raises_without_edges(reading, message.named, message.device)
        outcome.derived["raises without edges"] = found
    return found


def _traced(module: MessagePassing, form: _Form, message: _Message) -> Known:
    refusal = state_refusal_of(module, message.device)
    if refusal is not None:
        return Known(Reading(form.message, module).guard(module), refusal)
    _, besides = message.described
    arguments = message.named

    def read() -> tuple[list[Reading], Traced | Refusal]:
        reading = Reading(form.message, stand_in(module))
        # Functions that have routes of their own are part of the message, and not counted.
        with known_softmax(), counted_as_whole(module):
            traced = trace(
                reading,
                arguments,
                message.reductions,
                dict(besides),
                message.autocast,
                on_gpu=message.device.type == "cuda",
                compared_numbers=reading.compared_numbers,
            )
            return [reading], traced

    (guard,), traced = read_message(read, module)
    if isinstance(traced, Refusal):
        return Known(guard, traced)
    return Known(guard, Prepared.of(traced, module, arguments))
