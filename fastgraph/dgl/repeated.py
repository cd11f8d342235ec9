"""Message passing by functions of users that is like an earlier call, and is not planned again.

A plan asks many questions whose answers are those of an earlier call with the same functions and
the same layer, where the shapes and dtypes of all features that they take are the same. What may
have changed in between is asked: the variables around the functions, the state of the layer, the
settings and modes of the process, and the graph. On another graph, as in batches, so is what
depends on the number of its edges.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ref

import torch
from dgl.frame import Column
from dgl.function.base import BuiltinFunction
from dgl.heterograph_index import HeteroGraphIndex
from torch import Tensor, nn
from torch.nn import Parameter

from fastgraph import settings
from fastgraph.dgl.functions import pair_of
from fastgraph.dgl.index_objects import is_single, num_edges_on_cpu
from fastgraph.dgl.sizes import ProgramWork
from fastgraph.dgl.structure import Structure, sizes_of, structure_of
from fastgraph.dgl.tracing import KINDS, Call, State, reduction_refusal
from fastgraph.edge_programs.traced import Argument
from fastgraph.layers.prepared import Prepared
from fastgraph.layers.tracing import hook_refusal
from fastgraph.plugins.refusal import Refusal
from fastgraph.registry.registry import REGISTRY
from fastgraph.routing.conditions import execution_mode, too_few_edges


class Plan(NamedTuple):
    """A call that is routed.

    Attributes:
        call: its functions and features.
        outcome: their program.
        structure: the edges.
        tensors: those that steps and expressions take, by the names of arguments.
    """

    call: Call
    outcome: Prepared
    structure: Structure
    tensors: Mapping[str, Tensor]


class _Sizes(NamedTuple):
    """The graph of the last call, and the rows of features of each of :data:`KINDS`."""

    gidx: Callable[[], Any]
    rows: tuple[int, int, int]


class _Features(NamedTuple):
    """Features that functions ask for.

    Attributes:
        kind: its number in :data:`KINDS`.
        name: in the frame.
        described: as :meth:`Call.column` describes them.
        is_taken: true if a program takes them.
    """

    kind: int
    name: str
    described: Argument | str | None
    is_taken: bool


@dataclass(slots=True)
class _Repeatable:
    """The facts of a call on the CPU that was planned.

    Attributes:
        layer: of the functions, if there is one.
        codes: of the functions of users.
        states: what tells these from others with the same code.
        variables: around them, described.
        own: the functions of DGL's, as far as they are that.
        outcome: the program.
        state: in which it holds.
        features: that the functions ask for.
        around: the names of the variables that a program takes.
        surroundings: as :func:`_surroundings`.
        work: how much there is to compute for an edge.
        sizes: of the last graph.
    """

    layer: ref[nn.Module] | None
    codes: tuple[types.CodeType, ...]
    states: tuple[tuple[object, ...], ...]
    variables: dict[str, Argument]
    own: tuple[dict[str, Any] | None, dict[str, Any] | None]
    outcome: Prepared
    state: State
    features: tuple[_Features, ...]
    around: tuple[str, ...]
    surroundings: tuple[object, ...]
    work: ProgramWork
    sizes: _Sizes

    def plan(self, call: Call, gidx: Any, frames: tuple[Any, Any, Any]) -> Plan | None:
        """The plan of another call, unless it has to be made.

        Args:
            call: with code and functions of DGL's kind like the last one.
            gidx: its graph, of DGL's own, with one relation.
            frames: its features, by :data:`KINDS`.
        """
        pair = call.pair
        if (
            pair.layer is not (None if self.layer is None else self.layer())
            or self.own != (_described(call.message), _described(call.reduce))
            or _surroundings() != self.surroundings
        ):
            return None
        for function, code, state in zip(pair.functions, self.codes, self.states, strict=True):
            if function.function.__code__ is not code or function.state != state:
                return None
        sizes = self.sizes
        if sizes.gidx() is not gidx:
            found = self._sizes_of(call.num_edges, gidx)
            if found is None:
                return None
            sizes = found
        tensors = self._tensors(call, frames, sizes)
        if (
            tensors is None
            or self.outcome.draws_apart(call.num_edges, tensors.values())
            or execution_mode() is not None
            or hook_refusal() is not None
            or reduction_refusal(call) is not None
            or REGISTRY.refusal("edge_program", "cpu", self.outcome.traced.dtype) is not None
            or not self.state.holds_around(pair.layer)
        ):
            return None
        structure = structure_of(gidx)
        if isinstance(structure, Refusal):
            return None
        self.sizes = sizes
        return Plan(call, self.outcome, structure, tensors)

    def _sizes_of(self, num_edges: int, gidx: Any) -> _Sizes | None:
        """The sizes of another graph on which a call is planned as on the last one."""
        traced = self.outcome.traced
        num_src, num_dst = sizes_of(gidx)
        if (
            num_edges == 0
            or too_few_edges(num_edges) is not None
            or self.work.is_too_little(num_edges)
            or num_dst * traced.mapped_size > num_edges * traced.matrix_size > 0
        ):
            return None
        return _Sizes(ref(gidx), (num_src, num_dst, num_edges))

    def _tensors(
        self, call: Call, frames: tuple[Any, Any, Any], sizes: _Sizes
    ) -> dict[str, Tensor] | None:
        """The tensors that the program takes, if all features are as they were."""
        found: dict[str, Tensor] = {}
        for kind, name, described, is_taken in self.features:
            column = frames[kind]._columns.get(name)
            if type(described) is not Argument:
                if call.column(_KINDS[kind], name) != described:
                    return None
            elif type(column) is not Column or column.shape != described.channels:
                return None
            elif not is_taken:
                if column.dtype is not described.dtype:
                    return None
            else:
                tensor = found[f"{_KINDS[kind]}_{name}"] = column.data
                shape = (sizes.rows[kind], *described.channels)
                if tensor.dtype is not described.dtype or tensor.shape != shape:
                    return None
        around = call.around
        if around or self.variables:
            if call.described() != self.variables:
                return None
            for name in self.around:
                found[name] = around[name]
        for tensor in found.values():
            kind_of = type(tensor)
            if (
                not (kind_of is Tensor or kind_of is Parameter)
                or not tensor.is_cpu
                or tensor.layout is not torch.strided
            ):
                return None
        return found


_KINDS = tuple(KINDS)

_NO_SIZES = _Sizes(lambda: None, (0, 0, 0))


def _described(function: BuiltinFunction | None) -> dict[str, Any] | None:
    """A function of DGL's kind, by the names of what it takes and gives."""
    return None if function is None else {"": type(function), **vars(function)}


def _surroundings() -> tuple[object, ...]:
    """The settings of the process on which a plan depends."""
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch._C._is_any_autocast_enabled(),
        settings.current(),
    )


_MOST, _MOST_OF_ONE = 256, 4
"""Functions whose calls are kept, and calls of each: of several layers, or shapes in turn."""

_LAST: dict[object, tuple[_Repeatable, ...]] = {}


def _key(functions: tuple[Any, Any], is_of_edges: bool) -> object:
    """The functions of a call by their code, as long as that lives, and the layer of methods."""
    found: list[object] = [is_of_edges]
    for function in functions:
        if type(function) is types.FunctionType:
            found.append(id(function.__code__))
        elif type(function) is types.MethodType and type(function.__func__) is types.FunctionType:
            found += (id(function.__func__.__code__), id(function.__self__))
        else:
            found.append(type(function))
    return tuple(found)


def keep(functions: tuple[Any, Any], state: State, plan: Plan, work: ProgramWork) -> None:
    """Keep a plan for the next calls like it, on graphs of DGL's own on the CPU.

    Args:
        functions: of the call.
        state: in which their program holds.
        plan: of the call.
        work: how much there is to compute for an edge.
    """
    call, taken = plan.call, plan.tensors.keys()
    layer, users = call.pair.layer, call.pair.functions
    variables = call.described()
    features = (
        _Features(_KINDS.index(kind), name, described, f"{kind}_{name}" in taken)
        for kind, name, described in state.columns
    )
    found = _Repeatable(
        None if layer is None else ref(layer),
        tuple(function.function.__code__ for function in users),
        tuple(function.state for function in users),
        variables,
        (_described(call.message), _described(call.reduce)),
        plan.outcome,
        state,
        tuple(features),
        tuple(name for name in variables if name in taken),
        _surroundings(),
        work,
        _NO_SIZES,
    )
    key = _key(functions, call.is_of_edges)
    others = _LAST.get(key, ())
    if len(_LAST) >= _MOST and not others:
        _LAST.clear()
    _LAST[key] = (found, *others[: _MOST_OF_ONE - 1])


def planned_again(graph: Any, functions: tuple[Any, Any], is_of_edges: bool) -> Plan | None:
    """The plan of a call like an earlier one; ``None`` for one that has to be planned.

    Not to be asked while Dynamo looks on.

    Args:
        graph: with one relation.
        functions: the message and what reduces it, of DGL's or of users.
        is_of_edges: as in :class:`Call`.
    """
    known = _LAST.get(_key(functions, is_of_edges))
    gidx = graph._graph
    if known is None or type(gidx) is not HeteroGraphIndex or not is_single(gidx):
        return None
    num_edges = num_edges_on_cpu(gidx)
    own = [f if isinstance(f, BuiltinFunction) else None for f in functions]
    pair = pair_of(*(f if o is None else None for o, f in zip(own, functions, strict=True)))
    if num_edges is None or isinstance(pair, Refusal):
        return None
    nodes = graph._node_frames  # of both ends, or of all
    frames = nodes[0], nodes[-1], graph._edge_frames[0]
    named = dict(zip(KINDS, frames, strict=True))
    call = Call(pair, own[0], own[1], named, num_edges, is_of_edges)
    for one in known:
        found = one.plan(call, gidx, frames)
        if found is not None:
            return found
    return None
