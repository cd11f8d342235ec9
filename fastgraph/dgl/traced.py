"""Message passing by functions that users wrote: it is computed by an edge program.

See :mod:`fastgraph.dgl.tracing` for how one is made of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from dgl.frame import Column, Frame
from dgl.function.base import BuiltinFunction
from dgl.heterograph_index import HeteroGraphIndex
from torch import Tensor, nn

from fastgraph.dgl.conditions import call_refusal
from fastgraph.dgl.expressions import (
    DATA,
    DEGREE,
    OUTPUT,
    STATE,
    Expression,
    Given,
    copied,
    leaves,
    takes,
)
from fastgraph.dgl.functions import Pair, pair_of
from fastgraph.dgl.index_objects import GRAPHS, is_below, is_graph_below
from fastgraph.dgl.ranks import ranks
from fastgraph.dgl.repeated import Plan, keep, planned_again
from fastgraph.dgl.sizes import ProgramWork
from fastgraph.dgl.structure import sizes_of, structure_of
from fastgraph.dgl.tracing import KINDS, Call, State, reduction_refusal, traced
from fastgraph.edge_programs.operations import EXTREMA
from fastgraph.graphs.edges import Grouped
from fastgraph.layers.prepared import DRAWS_APART, Prepared
from fastgraph.layers.tracing import Outcomes, hook_refusal
from fastgraph.plugins.backend import device_type
from fastgraph.plugins.refusal import Refusal
from fastgraph.registry.registry import REGISTRY
from fastgraph.routing.conditions import execution_mode
from fastgraph.routing.programs import is_by_identity, remember
from fastgraph.routing.sizes import PROGRAM, TOO_SMALL
from fastgraph.routing.small_calls import Kind, SmallCalls

Computation = Callable[[], dict[str, Tensor]]

KNOWN = Outcomes()
"""Of the functions of users."""


def plan(graph: Any, message: Any, reduce: Any) -> Computation | Refusal:
    """The computation of a call of ``message_passing``, or why it is left to upstream.

    At least one of its functions must be one of users.

    Args:
        graph: with one relation.
        message: a function of DGL's or of users.
        reduce: the same.
    """
    return _planned(graph, (message, reduce), is_of_edges=False)


def plan_edges(graph: Any, function: Any) -> Computation | Refusal:
    """The computation of a call of ``apply_edges``, or why it is left to upstream.

    Args:
        graph: with one relation.
        function: of users.
    """
    return _planned(graph, (function, None), is_of_edges=True)


def is_tiny(graph: Any) -> bool:
    """True if no message passing by functions of users on these edges gains, whatever they do.

    Args:
        graph: with one relation.
    """
    if torch.compiler.is_compiling():
        return False
    if type(graph) in GRAPHS:
        return is_graph_below(graph, PROGRAM.bound())
    return is_below(graph._graph, PROGRAM.bound())


def plan_of_layer(
    graph: Any, message: Any, reduce: Any, features: Mapping[str, Mapping[str, Tensor]]
) -> Computation | Refusal:
    """The computation of a whole layer's messages by a function that stands for DGL's code.

    It looks at no bounds: whether a call is too small, its route has asked.

    Args:
        graph: with one relation.
        message: a method of the layer, as users write them for edges.
        reduce: the same for nodes, or a function of DGL's.
        features: what the method takes, by the names of :data:`KINDS` and its own.
    """
    own = reduce if isinstance(reduce, BuiltinFunction) else None
    pair = pair_of(message, None if own is not None else reduce)
    if isinstance(pair, Refusal):
        return pair
    frames = {kind: Frame(dict(features[kind]) if kind in features else None) for kind in KINDS}
    call = Call(pair, None, own, frames, graph._graph.number_of_edges(0))
    planned = _plan(graph, call, None)
    if isinstance(planned, Refusal):
        _remember(pair, planned)
    return planned


def _planned(graph: Any, functions: tuple[Any, Any], *, is_of_edges: bool) -> Computation | Refusal:
    if torch.compiler.is_compiling():
        return Refusal("within torch.compile, which does not look into DGL's graphs")
    again = planned_again(graph, functions, is_of_edges)
    if again is not None:
        return functools.partial(_compute, again)
    gidx = graph._graph
    num_edges = gidx.number_of_edges(0)
    # Upstream's operations on sharded tensors cost as much more as the operator does. On a GPU
    # nothing is known of them.
    has_bounds = type(gidx) is HeteroGraphIndex and _is_on_cpu(graph)
    nodes, edges = graph._node_frames, graph._edge_frames
    owner, kind = _owner(functions), (functions, (*nodes, *edges), is_of_edges)
    if has_bounds and _TOO_LITTLE.cover(owner, num_edges, _kind_of, *kind):
        return TOO_SMALL
    src, dst = gidx.metagraph.find_edge(0)
    frames = nodes[src], nodes[dst], edges[0]
    own = [f if isinstance(f, BuiltinFunction) else None for f in functions]
    pair = pair_of(*(f if o is None else None for o, f in zip(own, functions, strict=True)))
    if isinstance(pair, Refusal):
        return pair
    named = dict(zip(KINDS, frames, strict=True))
    call = Call(pair, own[0], own[1], named, num_edges, is_of_edges)
    planned = _plan(graph, call, functions if has_bounds else None)
    if planned is TOO_SMALL:
        _TOO_LITTLE.add(owner, num_edges, _kind_of(*kind))
    elif isinstance(planned, Refusal):
        _remember(pair, planned)
    return planned


def _is_on_cpu(graph: Any) -> bool:
    """True for a graph on the CPU, as its features are; the graph itself takes longer to say."""
    for frames in (graph._node_frames, graph._edge_frames):
        for frame in frames:
            for column in frame._columns.values():
                return isinstance(column.storage, Tensor) and column.storage.is_cpu
    return bool(graph.device.type == "cpu")


def _kind_of(functions: tuple[Any, Any], frames: Sequence[Any], is_of_edges: bool) -> Kind:
    # Without generators: this is asked at every call that is left to upstream.
    found: list[object] = [is_of_edges, *map(_kind, functions)]
    for frame in frames:
        columns = frame._columns
        found.append(tuple(columns))
        for column in columns.values():
            found += (column.scheme,) if type(column) is Column else (None,)
    return tuple(found)


def _kind(function: Any) -> object:
    """A function of users by its code, and one of DGL's by its name.

    The code by its identity: what is kept beside it must not keep it alive.
    """
    code = getattr(function, "__code__", None)
    return id(code) if code is not None else getattr(function, "name", type(function))


def _owner(functions: tuple[Any, Any]) -> Any:
    """The object beside which something is kept: a layer, a function's code, or neither."""
    function = functions[1] if isinstance(functions[0], BuiltinFunction) else functions[0]
    layer = getattr(function, "__self__", function)
    if isinstance(layer, nn.Module) and is_by_identity(type(layer)):
        return layer
    return getattr(function, "__code__", _NOBODY)


class _Nobody:
    """No code at all."""


_NOBODY = _Nobody()

_TOO_LITTLE = SmallCalls()
"""Of layers, and of the code of functions."""


def _remember(pair: Pair, outcome: Any) -> None:
    for function in pair.functions:
        remember(function.function.__code__, outcome)
    if pair.layer is not None:
        remember(pair.layer, outcome)


def _plan(graph: Any, call: Call, functions: tuple[Any, Any] | None) -> Computation | Refusal:
    """The computation of a call.

    Args:
        graph: with one relation.
        call: its functions and features.
        functions: the same as they were given, of a call that is kept and that has bounds; ``None``
            for others.
    """
    if call.num_edges == 0:
        return Refusal("a graph without edges")
    refusal = execution_mode() or hook_refusal() or reduction_refusal(call)
    if refusal is not None:
        return refusal
    device = graph.device
    key = (*call.key(), device)
    known = KNOWN.get(key, call)
    if known is None:
        layer = call.pair.layer
        owner = call.pair.functions[0].function.__code__ if layer is None else layer
        outcome = KNOWN.made(key, owner, functools.partial(traced, call, device))
    else:
        outcome = known.outcome
    if isinstance(outcome, Refusal):
        return outcome
    tensors = _tensors(call, outcome)
    if outcome.draws_apart(call.num_edges, tensors.values()):
        return DRAWS_APART
    work = _work(call, outcome, tensors)
    if functions is not None and work.is_too_little(call.num_edges):
        return TOO_SMALL
    refusal = _outcome_refusal(graph._graph, call, outcome)
    refusal = refusal or _tensors_refusal(device, call.num_edges, tensors)
    if refusal is not None:
        return refusal
    structure = structure_of(graph._graph)  # at last, as a new graph is read
    if isinstance(structure, Refusal):
        return structure
    for name, tensor in tensors.items():
        refusal = structure.refusal(name, tensor)
        if refusal is not None:
            return refusal
    plan = Plan(call, outcome, structure, tensors)
    if functions is not None and known is not None and isinstance(known.state, State):
        keep(functions, known.state, plan, work)
    return functools.partial(_compute, plan)


def _outcome_refusal(gidx: Any, call: Call, outcome: Prepared) -> Refusal | None:
    """Why a program is not run on a graph in this mode, of which no edge is read."""
    most = call.num_edges * outcome.traced.matrix_size
    if most > 0 and sizes_of(gidx)[1] * outcome.traced.mapped_size > most:
        return Refusal("its sums of nodes would take more memory than its matrices of edges")
    if outcome.winning and type(gidx) is not HeteroGraphIndex and torch.is_grad_enabled():
        return Refusal("an extremum of which one edge has the gradient, on a sharded graph")
    if outcome.traced.dropouts and type(gidx) is not HeteroGraphIndex:
        return Refusal("its message is no edge program on ranks: it draws random numbers")
    if outcome.work.is_half and torch.is_grad_enabled() and outcome.winning:
        return Refusal("an extremum of a half type, of which one edge has the gradient")
    if outcome.work.is_half and _derived(outcome).takes_degrees:
        return Refusal("its reduction computes with the in-degree, which half types would round")
    if _derived(outcome).splits and torch.is_grad_enabled():
        # Programs split gradients as PyG, where zeros that its output begins with take a share.
        return Refusal("amax or amin of messages while gradients are recorded")
    return None


class _Derived(NamedTuple):
    """Facts of a program and of the expressions after it that each call needs, derived once.

    Attributes:
        tensors: the names of the tensors that steps and expressions take.
        features: of these, those of nodes that expressions take.
        copied: the names of the expressions whose values are copied.
        takes_degrees: true if expressions compute with the in-degree.
        is_plain: true if all expressions are outputs of the program as they are.
        splits: true if there are extrema whose gradient all edges share that attain them.
    """

    tensors: frozenset[str]
    features: frozenset[str]
    copied: frozenset[str]
    takes_degrees: bool
    is_plain: bool
    splits: bool


def _derived(outcome: Prepared) -> _Derived:
    found: _Derived | None = outcome.derived.get("dgl")
    if found is not None:
        return found
    own: Any = outcome.traced
    after = own.after or ()
    features = leaves(after, DATA)
    steps = {step.args[0] for step in own.steps if step.function is None}
    reductions = enumerate(own.reductions)
    found = outcome.derived["dgl"] = _Derived(
        frozenset(steps | features | leaves(after, STATE)),
        frozenset(features),
        copied(after),
        takes(after, DEGREE),
        all(made.name == OUTPUT for _, made in after),
        any(r.name in EXTREMA and k not in outcome.winning for k, r in reductions),
    )
    return found


def _tensors(call: Call, outcome: Prepared) -> dict[str, Tensor]:
    """The tensors that steps and expressions take, by the names of arguments."""
    needed = _derived(outcome).tensors
    found = {name: tensor for name, tensor in call.around.items() if name in needed}
    for kind, frame in call.frames.items():
        for name in frame._columns:
            if f"{kind}_{name}" in needed:
                found[f"{kind}_{name}"] = frame[name]
    return found


def _work(call: Call, outcome: Prepared, tensors: Mapping[str, Tensor]) -> ProgramWork:
    width = outcome.work.width
    has_wide_edges = outcome.work.has_wide_edges or (call.is_of_edges and width > 1)
    for name, tensor in tensors.items():
        if name[:4] in ("src_", "dst_") and tensor.dim() > 1:
            channels = tensor.shape[1:].numel()
            if channels >= 2 * width:
                width, has_wide_edges = channels, False
    return ProgramWork(
        width,
        has_wide_edges,
        is_message=not call.is_of_edges,
        reduces=call.reduce is None and not call.is_of_edges,
        has_winners=bool(outcome.winning),
        is_half=outcome.work.is_half,
    )


def _tensors_refusal(
    device: torch.device, num_edges: int, tensors: Mapping[str, Tensor]
) -> Refusal | None:
    """Why no program is run on tensors, beside so many edges on a device."""
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided:
            return Refusal(f"{name} is not a dense tensor")
    like = next((t for t in tensors.values() if t.is_floating_point()), None)
    if like is None:
        return Refusal("its message takes no tensors of a floating-point dtype")
    if any(t.device != like.device for t in tensors.values()):
        return Refusal("features and variables on different devices")
    return call_refusal(device, num_edges, like) or REGISTRY.refusal(
        "edge_program", device_type(like), like.dtype
    )


def _compute(plan: Plan) -> dict[str, Tensor]:
    call, outcome, structure, tensors = plan
    _remember(call.pair, outcome)
    program, layer = outcome.traced.program, call.pair.layer
    is_numbered = any(operand.place == "edge" for operand in program.operands)
    is_numbered = is_numbered or call.is_of_edges or bool(outcome.winning)
    relation = structure.numbered() if is_numbered else structure.plain()
    reduce = call.reduce
    graph = None
    if isinstance(relation, Grouped) and structure.device.type == "cpu":
        graph = relation.graph
    results = outcome.compute(
        layer,
        tensors,
        relation.edges.index,
        structure.num_src,
        structure.num_dst,
        False,
        relation.edges.ptr,
        ranks=functools.partial(ranks, structure, reduce is None),
        graph=graph,
    )
    after: Any = outcome.traced.after
    if call.is_of_edges:
        return {name: results[made.args[0]] for name, made in after}
    lonely = relation.lonely
    if reduce is not None:
        (out,) = results
        if reduce.name in ("max", "min") and lonely is not None:
            least = float("-inf" if reduce.name == "max" else "inf")  # callers make zeros of it
            out = out.masked_fill(_column(lonely, out), least)
        return {reduce.out_field: out}
    given = Given(results, layer, tensors, lambda: structure.degrees().to(torch.float64))
    derived = _derived(outcome)
    return _of_nodes(after, derived, given, None if lonely is None else structure.receivers)


def _of_nodes(
    after: Sequence[tuple[str, Expression]],
    derived: _Derived,
    given: Given,
    receivers: Callable[[], Tensor] | None,
) -> dict[str, Tensor]:
    """The values of expressions, and zeros for nodes without messages: for them nothing is reduced.

    Not even computed, as gradients of what is not finite there would be none.

    Args:
        after: the expressions, with the names of their values, which their owner may edit.
        derived: of them.
        given: the values that they take.
        receivers: gives the nodes that have messages, int64; ``None`` where all have some.
    """
    values: dict[str, Tensor] = {}
    some = given
    if receivers is not None and not derived.is_plain:
        rows = receivers()
        some = given.of_rows(rows, derived.features)
    for name, made in after:
        if made.name == OUTPUT or some is given:
            value = given.value(made)
            # Gradients of functions may need their values, too, as those of exp.
            is_edited = name in derived.copied or (made.name != OUTPUT and value.requires_grad)
            values[name] = value.clone() if is_edited else value
        else:
            value = some.value(made)
            zeros = value.new_zeros((len(given.results[0]), *value.shape[1:]))
            values[name] = zeros.index_copy(0, rows, value)
    return values


def _column(lonely: Tensor, like: Tensor) -> Tensor:
    return lonely.view(-1, *(1,) * (like.dim() - 1))
