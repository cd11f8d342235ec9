"""An edge program that was traced from a message, ready to run on the tensors of a call."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fastgraph import ops
from fastgraph.edge_programs.dtypes import HALVES
from fastgraph.edge_programs.gradients import derive
from fastgraph.edge_programs.mapped import mapped
from fastgraph.edge_programs.operations import EXTREMA, PRODUCT, PRODUCT_T, SOFTMAX
from fastgraph.edge_programs.program import Operand, Output, Program, parse
from fastgraph.edge_programs.recorded import Ref
from fastgraph.edge_programs.traced import Argument, Traced
from fastgraph.edge_programs.winners import RANK, with_winners
from fastgraph.graphs.edges import DerivedIndex
from fastgraph.graphs.graph import Graph
from fastgraph.layers.typed_edges import TypedEdges
from fastgraph.machine.memory import as_it_is
from fastgraph.ops.edge_program import matrix_of, run_program, with_records
from fastgraph.plugins.refusal import Refusal
from fastgraph.routing.sizes import NARROW_PRODUCT, Work

DRAWS_APART = Refusal(
    "its message is no edge program: it draws random numbers in another order than that of edges, "
    "whose features are not contiguous"
)

_unsafe_view = torch.ops.aten._unsafe_view.default


@dataclass(frozen=True)
class Prepared:
    """A message as an edge program, ready to run.

    Attributes:
        traced: the program.
        private: tensors whose values a gradient needs, and which their owners may edit meanwhile,
            as upstream does not save them: those of nodes, which it gathers, and others unless one
            of the tensors that are named has a gradient for which it saves them. They are copied.
        wide: those of them that belong to edges and are not much narrower than messages: a copy
            would be what a program spares, and a view keeps what they were where their owners give
            them other memory (``tensor.data = other``).
        arguments: those of them that are no parameters or buffers of the layer. Of what upstream
            saves a view is kept, too.
        state: parameters and buffers of the layer, by where they are in it.
        work: how much there is to compute for an edge.
        winning: the outputs, extrema, whose gradient one edge has.
        derived: what adapters have found out about it, by their names.
    """

    traced: Traced
    private: Mapping[str, frozenset[str]]
    state: tuple[tuple[str, tuple[str, ...], str], ...]
    work: Work
    wide: frozenset[str] = frozenset()
    arguments: frozenset[str] = frozenset()
    winning: frozenset[int] = frozenset()
    derived: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        traced: Traced,
        layer: nn.Module | None,
        arguments: Mapping[str, object],
        winning: frozenset[int] = frozenset(),
    ) -> Prepared:
        """The program with what its steps need.

        Args:
            traced: the program.
            layer: whose message it is, if there is one.
            arguments: of the message, described.
            winning: see above.
        """
        needed = {s.args[0] for s in traced.steps if s.function is None}
        found = []
        for name in state_of(layer):
            if name in needed:
                *path, own = name.split(".")
                found.append((name, tuple(path), own))
        width = max(*map(math.prod, traced.shapes), traced.matrix_size)
        of_edges = (o.width for o in traced.program.operands if o.place == "edge")
        has_wide_edges = any(2 * own >= width > 1 for own in of_edges)
        is_half = not HALVES.isdisjoint((traced.dtype, *traced.dtypes))
        is_half = is_half or (traced.is_autocast and traced.converts)
        widens_edges = is_half and has_wide_edges and traced.dtype not in HALVES
        sides = _products(traced.program)
        has_narrow_products = any(max(two) <= NARROW_PRODUCT for two in sides)
        largest = max(map(math.prod, sides), default=0)
        passes = _passes(traced.program, width)
        work = Work(
            width,
            has_wide_edges,
            is_half,
            widens_edges,
            has_narrow_products,
            largest,
            passes,
            _exponentials(traced.program, width),
        )
        private = _private(traced, arguments, state_of(layer))
        wide = {n for n, a in arguments.items() if 2 * _channels_of_edge(a) > max(width, 1)}
        # Caches find the one object of all that are equal by its identity.
        traced = replace(traced, program=parse(str(traced.program)))
        given = frozenset(private.keys() & arguments.keys())
        return cls(traced, private, tuple(found), work, frozenset(wide), given, winning)

    def draws_apart(self, num_edges: int, tensors: Iterable[Tensor]) -> bool:
        """True if its dropouts may take other random numbers than upstream's.

        Those are drawn in the order in which values are in memory: that of features of edges.

        Args:
            num_edges: of the graph.
            tensors: that the message takes.
        """
        return bool(self.traced.dropouts) and any(
            t.shape[:1] == (num_edges,) and not t.is_contiguous() for t in tensors
        )

    def compute(
        self,
        layer: Any,
        arguments: Mapping[str, Tensor],
        index: Tensor,
        num_in: int,
        num_out: int,
        transpose: bool,
        ptr: Tensor | None = None,
        typed: TypedEdges | None = None,
        ranks: Callable[[torch.dtype], Tensor] | None = None,
        *,
        graph: Graph | None = None,
    ) -> list[Tensor]:
        """The reduced messages, one for each reduction; the layer has what its message leaves.

        Args:
            layer: whose messages they are, if there is one.
            arguments: of its message, by name.
            index: the edges, as :func:`fastgraph.ops.edge_program` takes them.
            num_in: the number of gathered nodes.
            num_out: the number of aggregating nodes.
            transpose: reverse every edge.
            ptr: offsets of the groups in ``index``, if there are any.
            typed: the same edges for a message that takes their types.
            ranks: gives a number of each edge ``[E]`` of a dtype: of those with equal extrema that
                with the least wins. It must be there if some outputs are ``winning``.
            graph: of the index, where a route knows that nobody but the operator sees the call; see
                :func:`fastgraph.ops.edge_program.run_program`.
        """
        given: dict[str, Any] = dict(arguments)
        if typed is not None:
            given |= {str(place): pairs for place, pairs in typed.pairs.items()}
        for name, path, own in self.state:
            module: Any = layer
            for part in path:
                module = module._modules[part]
            given[name] = (
                module._parameters[own] if own in module._parameters else module._buffers[own]
            )
        if self.private and torch.is_grad_enabled():
            self._keep(given)
        if self.traced.dropouts:
            given |= self.traced.drawn(index.shape[1], index.device)
        if typed is None and self.is_direct:
            return self._direct(given, (index, ptr, num_in, num_out, transpose), graph)
        edges, num_gathered, is_reversed = index, num_in, transpose
        if typed is not None and typed.edges is not None and typed.num_gathered is not None:
            edges, num_gathered, is_reversed = typed.edges, typed.num_gathered, False
        operands = self.traced.operands(given)
        matrices = [operands.pop(name) for name in self.traced.maps]
        given_edges = edges, ptr, num_gathered, num_out, is_reversed
        run: Callable[..., Sequence[Tensor]] = functools.partial(_run, graph=graph)
        if typed is not None:
            derived = DerivedIndex(edges, self._saved_beside(edges, index, given))
            run = functools.partial(derived.while_computing, _run)
        if (
            self.winning
            and torch.is_grad_enabled()
            and any(t.requires_grad for t in operands.values())
        ):
            assert ranks is not None
            made = with_winners(self.traced.program, self.winning)
            taken = {**operands, RANK: ranks(next(iter(operands.values())).dtype)}
            with torch.no_grad():
                taken |= zip(made.names, run(made.extrema, taken, *given_edges), strict=True)
                taken |= zip(made.names, run(made.ranks, taken, *given_edges), strict=True)
            outputs = run(made.program, taken, *given_edges)
        else:
            outputs = run(self.traced.program, operands, *given_edges)
        if self.traced.kept:
            softmax = functools.partial(
                ops.edge_softmax,
                index=edges,
                num_in=num_gathered,
                num_out=num_out,
                transpose=is_reversed,
            )
            self._leave(layer, operands, outputs[self.traced.num_reduced :], softmax)
        reduced = outputs[: self.traced.num_reduced]
        if matrices:
            count = self.traced.per_reduction
            each = [reduced[k : k + count] for k in range(0, len(reduced), count)]
            return [
                mapped(sums, matrices).view(num_out, *shape).to(dtype)
                for sums, shape, dtype in zip(  # not of what is kept
                    each, self.traced.shapes, self.traced.dtypes, strict=False
                )
            ]
        return [
            _result(output, out, (out.shape[0], *shape), dtype)
            for output, out, shape, dtype in zip(
                self.traced.program.outputs,
                reduced,
                self.traced.shapes,
                self.traced.dtypes,
                strict=False,
            )
        ]

    @functools.cached_property
    def is_direct(self) -> bool:
        """True if the outputs of the program are the results, whatever is recorded."""
        return not (self.winning or self.traced.kept or self.traced.maps)

    @functools.cached_property
    def _given(self) -> tuple[tuple[Operand, str, int], ...] | None:
        """For each operand the tensor that it is, and its dimensions if none is to be reshaped."""
        if self.traced.as_given is None:
            return None
        tensor_of = dict(self.traced.as_given)
        operands = self.traced.program.operands
        return tuple((o, tensor_of[o.name], 1 + (o.place != "parameter")) for o in operands)

    @functools.cached_property
    def _results(self) -> tuple[tuple[Output, tuple[int, ...], torch.dtype, bool], ...]:
        """Each output, the shape of its rows, its dtype, and whether it is given as it is."""
        program = self.traced.program
        return tuple(
            (
                output,
                shape,
                dtype,
                output.reduction != SOFTMAX and shape == (program.width(output.value),),
            )
            for output, shape, dtype in zip(
                program.outputs, self.traced.shapes, self.traced.dtypes, strict=True
            )
        )

    def _direct(self, given: Mapping[str, Any], edges: Any, graph: Graph | None) -> list[Tensor]:
        """:meth:`compute` of programs whose outputs are the results."""
        traced = self.traced
        program, dtype = traced.program, traced.dtype
        if self._given is None:
            operands = traced.operands(given)
            matrices = [matrix_of(operand, operands[operand.name]) for operand in program.operands]
        else:
            matrices = [
                t
                if (t := given[name]).dim() == dims and t.dtype is dtype
                else matrix_of(operand, t.to(dtype))
                for operand, name, dims in self._given
            ]
        outputs = run_program(program, matrices, *edges, graph=graph)
        return [
            out
            if is_as_it_is and out.dtype is own
            else _result(output, out, (out.shape[0], *shape), own)
            for out, (output, shape, own, is_as_it_is) in zip(outputs, self._results, strict=True)
        ]

    def _saved_beside(
        self, edges: Tensor, index: Tensor, given: Mapping[str, Any]
    ) -> tuple[Tensor, ...]:
        """The tensors of a graph with types that upstream saves, not of a program's own edges."""
        types = self.traced.types
        assert types is not None
        savers = self.traced.saved.get(types.name, ())
        are_types_saved = any(given[name].requires_grad for name in savers if name in given)
        found = () if edges is index else (index,)
        return (*found, given[types.name]) if are_types_saved else found

    def _leave(
        self,
        layer: Any,
        operands: Mapping[str, Tensor],
        outputs: Sequence[Tensor],
        softmax: Callable[[Tensor], Tensor],
    ) -> None:
        """Set the attributes that the message sets."""
        dtypes = self.traced.dtypes[len(self.traced.reductions) :]
        for kept, given, dtype in zip(self.traced.kept, outputs, dtypes, strict=True):
            out = softmax(given) if kept.is_softmax else given
            shape = (out.shape[0], *kept.channels)
            tensor = out if out.shape == shape else _unsafe_view(out, shape)
            if out.requires_grad and not any(operands[n].requires_grad for n in kept.operands):
                tensor = tensor.detach()
            kept.owner(layer).__dict__[kept.name] = tensor.to(dtype)

    def _keep(self, given: dict[str, Any]) -> None:
        """Replace what its owner may edit before the backward pass by copies, or by views."""
        if not any(isinstance(t, Tensor) and t.requires_grad for t in given.values()):
            return
        copies: dict[int, Tensor] = {}
        for name, savers in self.private.items():
            tensor = given[name]
            is_saved = bool(savers) and any(s in given and given[s].requires_grad for s in savers)
            if name in self.wide or (is_saved and name in self.arguments):
                given[name] = as_it_is(tensor)
                continue
            if is_saved:
                continue
            if id(tensor) not in copies:
                # In rows, as operands are, lest those that are laid out otherwise be copied twice.
                copies[id(tensor)] = tensor.clone(memory_format=torch.contiguous_format)
            given[name] = copies[id(tensor)]

    def explain(self) -> str:
        """The program, what comes before it and what is stored, as text."""
        program = self.traced.program
        lines = [
            f"edge program, reduced by {', '.join(map(str, self.traced.reductions))}:",
            *(f"  {line}" for line in str(program).splitlines()),
        ]
        made = [
            f"  {name} = {_expression(self.traced, step)}"
            for name, step in self.traced.step_of.items()
            if (made := self.traced.steps[step]).function is not None or made.args[0] != name
            if name not in self.traced.maps
        ]
        count = self.traced.num_reduced
        for kept, output in zip(self.traced.kept, program.outputs[count:], strict=True):
            name = program.name(output.value)
            lines += [f"left in {kept}: {f'the softmax of {name}' if kept.is_softmax else name}"]
        for number, name in enumerate(self.traced.maps):
            matrix = _expression(self.traced, self.traced.step_of[name])
            lines += [f"mapped behind it, output {number}: by {matrix}"]
        if made:
            lines += ["computed before it, by torch, for each node, edge or parameter:", *made]
        kept = _derived(program).operands & set(program.names)
        stored = ", ".join(sorted(kept)) or "nothing"
        lines += [f"kept for the gradients of all operands: {stored}"]
        return "\n".join(lines)


def _run(
    program: Program, operands: Mapping[str, Tensor], *edges: Any, graph: Graph | None = None
) -> Sequence[Tensor]:
    matrices = [matrix_of(operand, operands[operand.name]) for operand in program.operands]
    return run_program(program, matrices, *edges, graph=graph)


def _result(output: Output, out: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An output as upstream's callers know it, who may edit that of a softmax."""
    if out.dtype is not dtype:
        return out.to(dtype).view(shape)
    if output.reduction == SOFTMAX and out.requires_grad:
        out = out.clone()  # the gradient needs the other one
    if out.shape == shape:
        return out
    # Edits of an extremum are an error, as upstream; a view tells of them.
    return out.view(shape) if output.reduction in EXTREMA else _unsafe_view(out, shape)


_PASSES_OF_SOFTMAX = 4
"""Of upstream over messages for a sum that a softmax weighs, beside what a sum takes."""


def _passes(program: Program, width: int) -> int:
    """How often upstream passes over all channels of messages of this width, at least once."""
    gathered = sum(o.width == width and o.place in ("row", "gathered") for o in program.operands)
    computed = sum(made.width == width for made in program.instructions)
    weighed = sum(output.reduction == SOFTMAX for output in program.outputs)
    return max(1, gathered + computed + len(program.outputs) + (_PASSES_OF_SOFTMAX - 1) * weighed)


_EXPONENTIALS = {"exp": 1, "expm1": 1, "sigmoid": 1, "tanh": 1, "erf": 1, "elu": 1, "softplus": 2}
"""By function, those that it takes with its gradient."""


def _exponentials(program: Program, width: int) -> int:
    """How many a program computes for each channel of messages of this width."""
    wide = (made.operation for made in program.instructions if made.width == width)
    return sum(_EXPONENTIALS.get(operation, 0) for operation in wide)


def _products(program: Program) -> list[tuple[int, int]]:
    """The sides of the matrices by which values of each edge are multiplied."""
    return [
        (program.width(made.arguments[0]), made.width)
        for made in program.instructions
        if made.operation in (PRODUCT, PRODUCT_T)
    ]


def _expression(traced: Traced, number: int) -> str:
    """A step as text, with the steps that it takes."""
    step = traced.steps[number]
    if step.function is None:
        return str(step.args[0])

    def shown(argument: Any) -> str:
        if isinstance(argument, Ref):
            return _expression(traced, argument.step)
        if isinstance(argument, list):
            return f"[{', '.join(map(shown, argument))}]"
        return repr(argument)

    given = [*map(shown, step.args), *(f"{name}={shown(a)}" for name, a in step.kwargs)]
    is_of_torch = isinstance(step.function, torch._ops.OpOverload)
    name = step.function._schema.name.partition("::")[2] if is_of_torch else step.function.__name__
    return f"{name}({', '.join(given)})"


def _derived(program: Program) -> Any:
    run = with_records(program)
    outputs = frozenset(k for k, output in enumerate(run.outputs) if not output.is_record)
    return derive(run, frozenset(run.names), outputs)


def state_of(layer: nn.Module | None) -> dict[str, Tensor]:
    """The parameters and buffers of a layer, by their names in it."""
    if layer is None:
        return {}
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


def _private(
    traced: Traced, arguments: Mapping[str, object], state: Collection[str]
) -> dict[str, frozenset[str]]:
    """The tensors that a step or the program keeps for a gradient; see ``Prepared.private``."""
    kept = _derived(traced.program).operands | set(traced.maps)
    sources: dict[int, str] = {}  # of steps that are an argument or a view of one
    found = set()
    for number, step in enumerate(traced.steps):
        if step.function is None:
            sources[number] = step.args[0]
            continue
        taken = [a.step for a in torch.utils._pytree.tree_leaves(list(step.args)) if type(a) is Ref]
        taken += [a.step for _, a in step.kwargs if type(a) is Ref]
        if step.function in _KEEPING_NOTHING:
            continue
        if _is_view(step.function):
            if taken[0] in sources:
                sources[number] = sources[taken[0]]
            continue
        found |= {sources[t] for t in taken if t in sources}
    found |= {
        sources[step] for name, step in traced.step_of.items() if name in kept and step in sources
    }
    names = found.intersection((*arguments, *state))
    return {
        name: frozenset()
        if _has_nodes(arguments.get(name))
        else traced.saved.get(name, frozenset())
        for name in names
    }


_KEEPING_NOTHING = (
    *(torch.ops.aten._to_copy.default, torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor),
    *(torch.ops.aten.cat.default, torch.ops.aten.stack.default),
)
"""Steps that keep none of their tensors for gradients."""


def _is_view(function: Any) -> bool:
    if function is torch.ops.aten.reshape.default:
        return True
    is_of_torch = isinstance(function, torch._ops.OpOverload)
    return is_of_torch and function._schema.returns[0].alias_info is not None


def _channels_of_edge(argument: object) -> int:
    """The number of channels of an argument that has a row for each edge; 0 for others."""
    if isinstance(argument, Argument) and argument.place == "edge":
        return math.prod(argument.channels)
    return 0


def _has_nodes(argument: object) -> bool:
    return isinstance(argument, Argument) and argument.place in ("row", "gathered")
