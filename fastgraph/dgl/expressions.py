"""Values of nodes that are made of the results of an edge program, written down as expressions."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Expression:
    """A value of each node after the program.

    Attributes:
        name: of a function of torch, or what kind of value it is.
        args: its arguments: expressions, numbers, lists of them; or the name of a value.
        kwargs: its other arguments.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()


OUTPUT, DATA, STATE, DEGREE = "output", "data", "state", "degree"
"""Expressions that are given: the number of an output, the name of features of nodes, the name of a
parameter, and the in-degree, of float64."""


_BINARY = {
    **{"add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv},
    "pow": operator.pow,
}


def apply(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The value of a function of torch by its name; the first argument may be a number."""
    function = _BINARY.get(name) if len(args) == 2 and not kwargs else None
    function = function or getattr(torch, name, None) or getattr(F, name)
    found: Tensor = function(*args, **kwargs)
    return found


@dataclass(frozen=True)
class Given:
    """The values that expressions are made of."""

    results: Sequence[Tensor]
    layer: Any
    tensors: Mapping[str, Tensor]
    degrees: Callable[[], Tensor]

    def of_rows(self, rows: Tensor, features: Iterable[str]) -> Given:
        """The values of some nodes, that expressions of these are made of.

        Args:
            rows: the nodes.
            features: the names of those tensors that are of nodes.
        """
        own = {name: self.tensors[name].index_select(0, rows) for name in features}
        return Given(
            [result.index_select(0, rows) for result in self.results],
            self.layer,
            {**self.tensors, **own},
            lambda: self.degrees().index_select(0, rows),
        )

    def value(self, made: Any) -> Any:
        """The value of an expression, or a number as it is."""
        if isinstance(made, tuple):
            return tuple(map(self.value, made))
        if not isinstance(made, Expression):
            return made
        if made.name == OUTPUT:
            return self.results[made.args[0]]
        if made.name == DATA:
            return self.tensors[made.args[0]]
        if made.name == STATE:
            return self._state(made.args[0])
        if made.name == DEGREE:
            return self.degrees()
        args = self.value(made.args)
        kwargs = {name: self.value(value) for name, value in made.kwargs}
        if made.name == "reshape":  # of degrees, as those of others
            return args[0].reshape(args[1]).to(self.results[0].dtype)
        return apply(made.name, args, kwargs)

    def _state(self, name: str) -> Tensor:
        if name in self.tensors:
            return self.tensors[name]
        *path, own = name.split(".")
        module = functools.reduce(lambda m, part: m._modules[part], path, self.layer)
        found: Tensor = module._parameters.get(own)
        return module._buffers[own] if found is None else found


def leaves(made: object, name: str) -> set[str]:
    """The names of given values of one kind in expressions."""
    if isinstance(made, Expression):
        if made.name == name:
            return {str(made.args[0])}
        return leaves((made.args, made.kwargs), name)
    if isinstance(made, tuple):
        return set().union(*(leaves(part, name) for part in made))
    return set()


def takes(made: object, name: str) -> bool:
    """True if expressions take a given value of one kind."""
    if isinstance(made, Expression):
        return made.name == name or takes((made.args, made.kwargs), name)
    return isinstance(made, tuple) and any(takes(part, name) for part in made)


def copied(made: Sequence[tuple[str, Expression]]) -> frozenset[str]:
    """The names of expressions whose values are to be copied, as their owners may edit them.

    They are, or are views of, features of nodes or results that other expressions take, too.

    Args:
        made: expressions with their names.
    """
    outputs = [output for _, expression in made for output in _outputs(expression)]
    bases = ((name, _base(expression)) for name, expression in made)
    return frozenset(
        name
        for name, base in bases
        if base.name == DATA or (base.name == OUTPUT and outputs.count(base.args[0]) > 1)
    )


def _base(made: Expression) -> Expression:
    while made.name in ("unsqueeze", "squeeze"):
        made = made.args[0]
    return made


def _outputs(made: object) -> list[int]:
    """The numbers of the outputs that an expression takes, each as often as it takes it."""
    if isinstance(made, Expression):
        return [made.args[0]] if made.name == OUTPUT else _outputs((made.args, made.kwargs))
    return [k for part in made for k in _outputs(part)] if isinstance(made, tuple) else []
