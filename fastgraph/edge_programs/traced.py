"""A message as an edge program: its arguments, its reductions, and what comes before and after."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastgraph.edge_programs.owners import BY_TYPE, ByType, Owner
from fastgraph.edge_programs.program import Place, Program
from fastgraph.edge_programs.recorded import Ref, Step, with_results
from fastgraph.edge_programs.relations import EdgeTypes


@dataclass(frozen=True)
class Argument:
    """A tensor that a message takes.

    Attributes:
        place: what it has a row for.
        channels: its shape without rows.
        dtype: its own.
    """

    place: Place
    channels: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Reduction:
    """An output of a program.

    Attributes:
        name: one of :data:`fastgraph.edge_programs.operations.REDUCTIONS`.
        values: what it reduces, given the message; ``None`` for the message itself. It is traced
            with the message, and must be equal only to what computes the same.
        parameter: the name of what ``values`` takes besides, if anything: a parameter of the layer,
            or a tensor that the message does not take.
    """

    name: str
    values: Callable[..., tuple[Tensor, ...]] | None = None
    parameter: str | None = None

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Every call looks results up by what they are reductions of.
        return hash((self.name, self.values, self.parameter))

    def __reduce__(self) -> tuple[object, ...]:
        return Reduction, (self.name, self.values, self.parameter)  # others hash otherwise

    def __str__(self) -> str:
        return self.name if self.values is None else f"{self.name} of {self.values.__name__}"

    def of(self, message: Tensor, state: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """The values that it reduces, given what it may take besides by its name."""
        if self.values is None:
            return (message,)
        return self.values(message, *(() if self.parameter is None else (state[self.parameter],)))


@dataclass(frozen=True)
class Reduced:
    """The values that the outputs of a program reduce.

    Attributes:
        outputs: the tensors of edges that each of them takes.
        after: what is made of the outputs, equal only to what makes the same of them.
    """

    outputs: tuple[tuple[Reduction, tuple[Tensor, ...]], ...]
    after: object = None

    @property
    def values(self) -> list[tuple[Tensor, ...]]:
        """The tensors alone."""
        return [tensors for _, tensors in self.outputs]


Reduce = Callable[[Any, Mapping[str, Tensor]], Reduced]
"""Reduces a message, given parameters, buffers and what it may take besides, by their names."""


def reduce_by(reductions: Sequence[Reduction]) -> Reduce:
    """The function that reduces a message, one tensor, in some ways."""

    def reduce(message: Any, state: Mapping[str, Tensor]) -> Reduced:
        return Reduced(tuple((reduction, reduction.of(message, state)) for reduction in reductions))

    return reduce


@dataclass(frozen=True)
class Index:
    """The number of a node at one end of each edge, as a message takes it.

    Attributes:
        place: ``row`` for aggregating nodes, or ``gathered``.
        dtype: its own.
    """

    place: Place
    dtype: torch.dtype = torch.int64


@dataclass(frozen=True)
class Dropout:
    """Factors of edges, 0 or ``1 / (1 - rate)``, which are drawn at each call as upstream draws.

    Attributes:
        rate: the probability of 0.
        channels: how many there are for an edge, as a shape.
        dtype: of what they multiply.
    """

    rate: float
    channels: tuple[int, ...]
    dtype: torch.dtype

    def drawn(self, num_edges: int, device: torch.device) -> Tensor:
        """Factors ``[E, *channels]``: of the same random numbers that upstream's dropout takes."""
        ones = torch.ones((num_edges, *self.channels), dtype=self.dtype, device=device)
        return F.dropout(ones, self.rate, training=True)


@dataclass(frozen=True)
class LeftValues:
    """An attribute of a layer in which its message leaves values of edges.

    Attributes:
        module: the names of modules on the way from the layer to what has the attribute.
        name: of the attribute.
        channels: the shape of its values for an edge.
        operands: the names of those that the values are made of.
        is_softmax: true if they are the softmax over neighbours of what the program gives.
    """

    module: tuple[str, ...]
    name: str
    channels: tuple[int, ...]
    operands: frozenset[str]
    is_softmax: bool

    def owner(self, layer: Any) -> Any:
        """The module of a layer that has the attribute."""
        return functools.reduce(lambda module, name: module._modules[name], self.module, layer)

    def __str__(self) -> str:
        return ".".join((*self.module, self.name))


@dataclass(frozen=True)
class Traced:
    """A message as an edge program.

    Attributes:
        program: has an output for each reduction, or for each of several maps of it, and then one
            of edges for each kept attribute. The sum of a message that has a softmax over
            neighbours for a factor is one that this weighs.
        reductions: of the message.
        shapes: of what each of them takes for an edge.
        steps: are computed before the program.
        step_of: the step that is an operand, by the operand's name.
        kept: attributes in which the layer's message leaves values of edges.
        owner_of: the places that operands belong to, by their names.
        types: of edges, if the message takes some.
        maps: the names of steps, of matrices that map the outputs of each reduction.
        matrix_size: the numbers of the matrix that upstream stores for an edge, if it does.
        dtypes: of what upstream has for each reduction and then for each kept attribute.
        is_autocast: true if its steps have the conversions of autocast.
        converts: true if it converts values to other dtypes.
        after: what is made of the results.
        dropouts: what is drawn for each call, in this order, and given to steps by name.
        dtype: of all operands of the program, the widest of theirs and of its results.
        saved: the tensors of edges, and parameters and buffers, that upstream saves for gradients
            as they are, by name, and for the gradients of which others.
    """

    program: Program
    reductions: tuple[Reduction, ...]
    shapes: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]
    step_of: Mapping[str, int]
    kept: tuple[LeftValues, ...]
    owner_of: Mapping[str, Owner]
    types: EdgeTypes | None
    maps: tuple[str, ...]
    matrix_size: int
    dtypes: tuple[torch.dtype, ...]
    is_autocast: bool
    converts: bool
    after: object = None
    dropouts: tuple[tuple[str, Dropout], ...] = ()
    dtype: torch.dtype = torch.float64
    saved: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @cached_property
    def mapped_size(self) -> int:
        """The numbers of a node that maps take."""
        outputs = self.program.outputs[: len(self.maps)]
        return sum(self.program.width(output.value) for output in outputs)

    @cached_property
    def per_reduction(self) -> int:
        """The number of outputs that each reduction has."""
        return max(len(self.maps), 1)

    @cached_property
    def num_reduced(self) -> int:
        """The number of outputs of all reductions; others are left in attributes."""
        return len(self.reductions) * self.per_reduction

    @cached_property
    def pairs(self) -> frozenset[ByType]:
        """The places whose nodes have values for each type."""
        return frozenset(by for by in BY_TYPE.values() if by in self.owner_of.values())

    @cached_property
    def as_given(self) -> tuple[tuple[str, str], ...] | None:
        """For each operand the tensor that it is, by name; ``None`` if steps compute some."""
        if self.pairs or any(step.function is not None for step in self.steps):
            return None
        return tuple((name, self.steps[step].args[0]) for name, step in self.step_of.items())

    @cached_property
    def _freed(self) -> tuple[tuple[int, ...], ...]:
        """For each step those whose results nothing takes after it."""
        needed, found = set(self.step_of.values()), []
        for number in range(len(self.steps) - 1, -1, -1):
            taken = self.steps[number].taken | {number}
            found.append(tuple(taken - needed))
            needed |= taken
        return tuple(reversed(found))

    def drawn(self, num_edges: int, device: torch.device) -> dict[str, Tensor]:
        """The factors of dropouts, by name."""
        return {name: dropout.drawn(num_edges, device) for name, dropout in self.dropouts}

    def operands(self, given: Mapping[str, Any]) -> dict[str, Tensor]:
        """The operands of the program.

        Args:
            given: a tensor for each tensor that the message takes and for each parameter and
                buffer of its layer, by name: ``[nodes, *channels]`` for those in the places ``row``
                and ``gathered``. Those that no step takes may be missing. Besides
                :class:`~fastgraph.edge_programs.relations.Pairs` by the names in ``pairs``.

        Returns:
            By name, of the nodes, of the edges or of the program; and the matrices of maps. All
            have the program's dtype.
        """
        if self.as_given is not None:
            found = {name: given[tensor] for name, tensor in self.as_given}
        elif not self.is_autocast:
            found = self.unconverted(given)
        else:
            torch.set_autocast_enabled("cpu", False)  # whose conversions are steps
            try:
                found = self.unconverted(given)
            finally:
                torch.set_autocast_enabled("cpu", True)
        # Narrower values keep theirs, and a mask is 0 or 1.
        dtype = self.dtype
        return {n: t if t.dtype is dtype else t.to(dtype) for n, t in found.items()}

    def unconverted(self, given: Mapping[str, Any]) -> dict[str, Tensor]:
        """The same in the dtypes that steps have."""
        found: list[Any] = []
        for step, freed in zip(self.steps, self._freed, strict=True):
            if step.function is None:
                found.append(given[step.args[0]])
            else:
                args = [
                    found[a.step] if isinstance(a, Ref) else with_results(a, found)
                    for a in step.args
                ]
                kwargs = {name: with_results(argument, found) for name, argument in step.kwargs}
                found.append(step.function(*args, **kwargs))
                del args, kwargs
            for number in freed:
                found[number] = None
        operands = {name: found[step] for name, step in self.step_of.items()}
        for name, owner in self.owner_of.items():
            if owner == "gathered" and "gathered by type" in self.pairs:
                pairs = given["gathered by type"]
                operands[name] = operands[name].index_select(0, pairs.nodes)
            elif owner == "row by type":
                operands[name] = operands[name].index_select(0, given[owner].of_edge)
        return operands
