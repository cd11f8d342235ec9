"""An edge program that was traced from a message, ready to run on the tensors of a call."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn.conv import MessagePassing

from fastgraph import ops
from fastgraph.edge_programs.gradients import derive
from fastgraph.edge_programs.mapped import mapped
from fastgraph.edge_programs.operations import EXTREMA, SOFTMAX
from fastgraph.edge_programs.program import Output, Program
from fastgraph.edge_programs.recorded import Ref
from fastgraph.edge_programs.trace import Traced
from fastgraph.ops.edge_program import with_records
from fastgraph.pyg.own_aggregates import Aggregate
from fastgraph.pyg.typed_edges import TypedEdges
from fastgraph.routing.sizes import Work

_unsafe_view = torch.ops.aten._unsafe_view.default


@dataclass(frozen=True)
class Prepared:
    """A message as an edge program, ready to run.

    Attributes:
        traced: the program.
        private: arguments of nodes whose values a gradient needs. Upstream gathers them, so that
            its callers may edit theirs.
        state: parameters and buffers of the layer, by where they are in it.
        work: how much there is to compute for an edge.
        aggregate: what comes behind it.
    """

    traced: Traced
    private: frozenset[str]
    state: tuple[tuple[str, tuple[str, ...], str], ...]
    work: Work
    aggregate: Aggregate

    @classmethod
    def of(cls, traced: Traced, layer: nn.Module, aggregate: Aggregate) -> Prepared:
        """The program with what its steps need."""
        needed = {s.args[0] for s in traced.steps if s.function is None}
        state = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
        found = []
        for name in state:
            if name in needed:
                *path, own = name.split(".")
                found.append((name, tuple(path), own))
        width = max(math.prod(traced.channels), traced.mapped_size)
        of_edges = (o.width for o in traced.program.operands if o.place == "edge")
        work = Work(width, any(2 * own >= width > 1 for own in of_edges))
        return cls(traced, _private(traced), tuple(found), work, aggregate)

    def compute(
        self,
        layer: MessagePassing,
        arguments: Mapping[str, Tensor],
        index: Tensor,
        num_in: int,
        num_out: int,
        transpose: bool,
        typed: TypedEdges | None = None,
    ) -> Tensor:
        """The aggregated messages.

        Args:
            layer: whose messages they are.
            arguments: of its message, by name.
            index: the caller's ``edge_index``.
            num_in: the number of gathered nodes.
            num_out: the number of aggregating nodes.
            transpose: reverse every edge.
            typed: the same edges for a message that takes their types.
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
        edges, num_gathered, is_reversed = index, num_in, transpose
        if typed is not None and typed.edges is not None and typed.num_gathered is not None:
            edges, num_gathered, is_reversed = typed.edges, typed.num_gathered, False
        operands = self.traced.operands(given)
        matrices = [operands.pop(name) for name in self.traced.maps]
        outputs = ops.edge_program(
            self.traced.program,
            operands,
            edges,
            num_in=num_gathered,
            num_out=num_out,
            transpose=is_reversed,
        )
        shape = (num_out, *self.traced.channels)
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
            results = {
                reduction: mapped(sums, matrices).view(shape)
                for reduction, sums in zip(self.traced.reductions, each, strict=True)
            }
        else:
            results = {
                reduction: _result(output, out, shape)
                for reduction, output, out in zip(  # not of what is kept
                    self.traced.reductions, self.traced.program.outputs, reduced, strict=False
                )
            }
        return self.aggregate.combined(layer, results, index[int(not transpose)])

    def _leave(
        self,
        layer: MessagePassing,
        operands: Mapping[str, Tensor],
        outputs: Sequence[Tensor],
        softmax: Callable[[Tensor], Tensor],
    ) -> None:
        """Set the attributes that the message sets."""
        for kept, given in zip(self.traced.kept, outputs, strict=True):
            out = softmax(given) if kept.is_softmax else given
            shape = (out.shape[0], *kept.channels)
            tensor = out if out.shape == shape else _unsafe_view(out, shape)
            if out.requires_grad and not any(operands[n].requires_grad for n in kept.operands):
                tensor = tensor.detach()
            kept.owner(layer).__dict__[kept.name] = tensor

    def _keep(self, given: dict[str, Any]) -> None:
        """Replace what its owner may edit before the backward pass by copies."""
        if not any(isinstance(t, Tensor) and t.requires_grad for t in given.values()):
            return
        copies: dict[int, Tensor] = {}
        for name in self.private:
            tensor = given[name]
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor.clone()
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
            if self.traced.steps[step].function is not None and name not in self.traced.maps
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


def _result(output: Output, out: Tensor, shape: tuple[int, ...]) -> Tensor:
    """An output as upstream's callers know it, who may edit that of a softmax."""
    if output.reduction == SOFTMAX and out.requires_grad:
        out = out.clone()  # the gradient needs the other one
    if out.shape == shape:
        return out
    # Edits of an extremum are an error, as upstream; a view tells of them.
    return out.view(shape) if output.reduction in EXTREMA else _unsafe_view(out, shape)


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


def _private(traced: Traced) -> frozenset[str]:
    """The arguments of nodes that a step or the program keeps for a gradient, as they are."""
    kept = _derived(traced.program).operands
    sources: dict[int, str] = {}  # of steps that are an argument, reshaped or not
    found = set()
    for number, step in enumerate(traced.steps):
        if step.function is None:
            sources[number] = step.args[0]
            continue
        taken = [a.step for a in torch.utils._pytree.tree_leaves(list(step.args)) if type(a) is Ref]
        taken += [a.step for _, a in step.kwargs if type(a) is Ref]
        if step.function in (torch.ops.aten.reshape.default, torch.ops.aten.expand.default):
            if taken[0] in sources:
                sources[number] = sources[taken[0]]
            continue
        found |= {sources[t] for t in taken if t in sources}
    found |= {
        sources[step] for name, step in traced.step_of.items() if name in kept and step in sources
    }
    return frozenset(name for name in found if name[-2:] in ("_i", "_j"))
