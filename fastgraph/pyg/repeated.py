"""Calls of layers with traced messages that are like an earlier one, and need not be planned again.

A plan asks many questions whose answers are those of the last call where the layer, the graph's
size, and the shapes and dtypes of all arguments are. What remains to be asked is what may have
changed in between: the state of the layer, the settings and modes of the process, and the edges.
Where the numbers of nodes and edges alone are others, as in batches, so is what depends on them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.nn.conv import MessagePassing

from fastgraph import settings
from fastgraph.edge_programs.frozen import PLAIN
from fastgraph.edge_programs.traced import Reduction
from fastgraph.graphs.edges import KnownGraph, OutOfRange, graph_of, unless_out_of_range
from fastgraph.graphs.graph import MAX_INDEX
from fastgraph.layers.prepared import Prepared
from fastgraph.layers.tracing import Known, hook_refusal
from fastgraph.pyg.collecting import Kept, key_of
from fastgraph.pyg.own_aggregates import Aggregate
from fastgraph.pyg.state import state_refusal
from fastgraph.registry.registry import REGISTRY
from fastgraph.routing.conditions import execution_mode, too_few_edges
from fastgraph.routing.programs import remember
from fastgraph.routing.sizes import PROGRAM, are_too_few
from fastgraph.routing.status import count_program


class Sizes(NamedTuple):
    """The sizes of a call.

    Attributes:
        described: its arguments after ``edge_index``, each as :func:`described`.
        graph: its ``edge_index``, the same.
        num_in: the number of gathered nodes.
        num_out: that of aggregating nodes.
    """

    described: list[object]
    graph: object
    num_in: int
    num_out: int

    @classmethod
    def of(cls, edge_index: Any, values: Iterable[Any], num_in: int, num_out: int) -> Sizes:
        """The sizes of a call with these arguments after ``edge_index``."""
        of_values = [described(value) for value in values]
        return cls(of_values, described(edge_index), num_in, num_out)


@dataclass(slots=True)
class Repeatable:
    """The facts of a call that was planned, on the CPU, of a layer and an ``edge_index``.

    Attributes:
        cls: of the layer.
        methods_of: gives the methods of a class that a plan is made of.
        methods: which they were.
        names: of the arguments of ``propagate`` after ``edge_index``.
        key: what calls of all sizes share, as :func:`fastgraph.pyg.collecting.key_of`.
        kept: how their arguments are found.
        sizes: of the last call.
        surroundings: as :func:`surroundings`.
        reductions: of the message.
        aggregate: of the class.
        known: the program, and the state of the layer in which it holds.
        taken: the name of each tensor that the message takes, the number of the argument that it
            is, and the position in that, if it is a pair.
        transpose: whether every edge is reversed.
        label: under which calls are counted.
        updated: the arguments of ``update`` with their defaults; ``None`` where there is none.
    """

    cls: type[MessagePassing]
    methods_of: Callable[[type], tuple[Any, ...]]
    methods: tuple[Any, ...]
    names: list[str]
    key: object
    kept: Kept
    sizes: Sizes
    surroundings: tuple[object, ...]
    reductions: tuple[Reduction, ...]
    aggregate: Aggregate
    known: Known
    taken: list[tuple[str, int, int | None]]
    transpose: bool
    label: str
    updated: tuple[tuple[str, Any], ...] | None

    def computed(
        self, module: MessagePassing, edge_index: Any, names: Sequence[str], values: Sequence[Any]
    ) -> Tensor | None:
        """The result of another call, unless it has to be planned; it counts as routed."""
        outcome, aggregate = self.known.outcome, self.aggregate
        if (
            type(module) is not self.cls
            or names != self.names
            or (sizes := self._sizes(edge_index, values)) is None
            or surroundings(module) != self.surroundings
            or self.methods_of(self.cls) != self.methods
            or torch.compiler.is_compiling()
            or execution_mode() is not None
            or hook_refusal() is not None
            or state_refusal(module) is not None
            or aggregate.reductions(module) != self.reductions
            or not self.known.state.holds(module)
            or not isinstance(outcome, Prepared)
            or REGISTRY.refusal("edge_program", "cpu", outcome.traced.dtype) is not None
        ):
            return None
        tensors = {
            name: values[number] if position is None else values[number][position]
            for name, number, position in self.taken
        }
        if outcome.draws_apart(edge_index.shape[1], tensors.values()):
            return None
        num_in, num_out = sizes.num_in, sizes.num_out
        ends = (num_out, num_in) if self.transpose else (num_in, num_out)
        graph = unless_out_of_range(graph_of, edge_index, None, *ends)
        if isinstance(graph, OutOfRange):
            return None
        self.sizes = sizes
        run = outcome.compute
        if outcome.is_direct:
            run = functools.partial(run, graph=graph)
        else:
            run = functools.partial(KnownGraph(graph, edge_index).while_computing, run)
        remember(module, outcome)
        count_program(self.label)
        results = run(module, tensors, edge_index, num_in, num_out, self.transpose)
        named = dict(zip(self.reductions, results, strict=True))
        out = aggregate.combined(module, named, lambda: edge_index[int(not self.transpose)])
        if self.updated is not None:
            given = dict(zip(names, values, strict=True))
            own = {name: given.get(name, default) for name, default in self.updated}
            out = module.update(out, **own)
        return out

    def _sizes(self, edge_index: Any, values: Sequence[Any]) -> Sizes | None:
        """The sizes of a call that is planned as the last one was; ``None`` for another.

        Those of the last call itself have been looked at.
        """
        last = self.sizes
        if _is_as_described(edge_index, last.graph) and all(
            map(_is_as_described, values, last.described)
        ):
            return last
        arguments = dict(zip(self.names, values, strict=True))
        if key_of(edge_index, arguments) != self.key:
            return None
        found, outcome = self.kept.collected(arguments), self.known.outcome
        if found is None or not isinstance(outcome, Prepared):
            return None
        sizes = Sizes.of(edge_index, values, found.num_in, found.num_out)
        # All questions of a plan that are of numbers of nodes and edges.
        num_edges, traced = edge_index.shape[1], outcome.traced
        if (
            max(sizes.num_in, sizes.num_out, num_edges) > MAX_INDEX
            or are_too_few(PROGRAM, num_edges)
            or num_edges == 0  # for which a message may raise
            or too_few_edges(num_edges) is not None
            or outcome.work.is_too_little(num_edges)
            or sizes.num_out * traced.mapped_size > num_edges * traced.matrix_size > 0
        ):
            return None
        return sizes


def surroundings(module: Any) -> tuple[object, ...]:
    """The settings on which a plan depends, of the layer and of the process."""
    node_dim, flow = module.node_dim, module.flow
    if type(node_dim) is not int or type(flow) is not str:
        return (object(),)  # equal to none: -2.0 is no -2, and a tensor cannot be compared
    return (
        node_dim,
        flow,
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch._C._is_any_autocast_enabled(),
        settings.current(),
    )


_UNKNOWN = object()


def described(value: Any) -> object:
    """An argument, without the values of its tensors; an object that nothing is, if it is odd."""
    kind = type(value)
    if kind is Tensor or kind is Parameter:
        is_usual = value.is_cpu and value.layout is torch.strided
        return (value.shape, value.dtype) if is_usual else _UNKNOWN
    if kind is tuple:
        return [described(part) for part in value]
    return value if value is None or kind in PLAIN else _UNKNOWN


def _is_as_described(value: Any, described: object) -> bool:
    """True if an argument is as another one was."""
    kind = type(value)
    if kind is Tensor or kind is Parameter:
        return (
            (value.shape, value.dtype) == described
            and value.is_cpu
            and value.layout is torch.strided
        )
    if kind is tuple:
        return (
            type(described) is list
            and len(value) == len(described)
            and all(map(_is_as_described, value, described))
        )
    return value is described or (kind is int and type(described) is int and value == described)


_LAST: dict[int, tuple[ref[MessagePassing], Repeatable]] = {}
"""By the layer's ``id``, as in :mod:`fastgraph.routing.programs`."""


def keep(module: MessagePassing, call: Repeatable) -> None:
    """Keep a call of a layer for the next one."""
    number = id(module)
    known = _LAST.get(number)
    owner = ref(module, functools.partial(_forget, _LAST, number)) if known is None else known[0]
    _LAST[number] = owner, call


def _forget(last: dict[int, Any], number: int, _: object) -> None:
    last.pop(number, None)


def computed_again(
    module: MessagePassing, edge_index: Any, names: Sequence[str], values: Sequence[Any]
) -> Tensor | None:
    """The result of a call like the layer's last one; ``None`` for one that has to be planned.

    Not to be asked while Dynamo looks on.

    Args:
        module: the layer.
        edge_index: its graph.
        names: of the further arguments of ``propagate``.
        values: those.
    """
    known = _LAST.get(id(module))
    return None if known is None else known[1].computed(module, edge_index, names, values)
