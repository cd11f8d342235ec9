"""Expressions as edge programs, whose values are reduced along rows or columns and never stored."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import Tensor

from fastgraph import ops
from fastgraph.edge_programs.builder import Builder, Value
from fastgraph.edge_programs.elementwise import ELEMENTWISE
from fastgraph.edge_programs.program import Program
from fastgraph.sparse.expression import Contraction, Dot, Expression, Map
from fastgraph.sparse.matching import (
    Factor,
    Monomial,
    bare,
    ends_of,
    has_infinity,
    is_same,
    laid_out,
    monomial,
    scaled,
)
from fastgraph.sparse.pattern import Pattern

Tree = tuple[Any, ...]
"""A value of a program without its tensors: the name of an operand, or a function of others."""

_ARITHMETIC = {
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.truediv: "div",
    operator.neg: "neg",
}

_MOST_DOTS = 2
_MOST_INSTRUCTIONS = 24
"""With more, values are longer computed than stored."""

REDUCED_AS = {"sum": "sum", "smean": "mean", "smax": "max", "smin": "min"}
"""Reductions of a row, as programs call them."""


INFINITE = "infinite factors, or divisors of 0"
"""Why products are not taken in another order."""


class Refused(Exception):  # noqa: N818
    """An expression is no program; the argument says why."""


class Message:
    """An expression as a value of a program.

    Args:
        values: the expression.
        is_by_row: rows aggregate; otherwise columns do.

    Raises:
        Refused: there is no such program.

    Attributes:
        pattern: of the expression.
        tree: the value.
        operands: the place and the tensor of each operand, by name.
        num_dots: the number of dot products.
    """

    def __init__(self, values: Expression, *, is_by_row: bool = True) -> None:
        self.pattern: Pattern = values.pattern
        self.operands: dict[str, tuple[str, Tensor]] = {}
        self.num_dots = 0
        self._is_by_row = is_by_row
        self._left = _MOST_INSTRUCTIONS
        self.tree = self._read(values)

    @property
    def has_entries(self) -> bool:
        """True if values of entries were given."""
        return any(place == "edge" for place, _ in self.operands.values())

    def operand(self, kind: str, tensor: Tensor) -> Tree:
        """An operand of rows, columns, entries or parameters, which is taken once."""
        places = {"row": "row", "col": "gathered"}
        if not self._is_by_row:
            places = {"row": "gathered", "col": "row"}
        place = {"entry": "edge", "parameter": "parameter", **places}[kind]
        for name, (other, known) in self.operands.items():
            if other == place and is_same(known, tensor):
                return ("operand", name)
        name = f"{kind}_{len(self.operands)}"
        self.operands[name] = place, tensor
        return ("operand", name)

    def _read(self, values: Expression) -> Tree:
        values = bare(values)
        product = monomial(values)
        if product is not None:
            return self._product(product)
        if isinstance(values, Contraction):
            vector = _flat(values.vector.unsqueeze(0)).squeeze(0)
            if has_infinity(vector.detach()):
                raise Refused(INFINITE)
            channels = self._read(values.arguments[0])
            heads = values.shape[1:].numel()
            return self._step("dot", channels, self.operand("parameter", vector), heads)
        if not isinstance(values, Map):
            raise Refused(f"{values.name} within other functions")
        given = [self._read(a) if isinstance(a, Expression) else a for a in values.args]
        if values.function in _ARITHMETIC and not values.kwargs:
            return self._step("apply", _ARITHMETIC[values.function], *map(_as_tree, given))
        return self._step("rule", *_rule(values, given))

    def _product(self, made: Monomial) -> Tree:
        if not made.is_ordinary(self.pattern):
            raise Refused(INFINITE)
        # A gradient of a factor of rows costs less at its row than along entries.
        is_at_rows = bool(made.dots) and any(f.tensor.requires_grad for f in made.rows)
        heads = made.dots[0].shape[1:].numel() if is_at_rows else 1
        is_at_rows = is_at_rows and all(f.tensor.shape[1:].numel() in (1, heads) for f in made.rows)
        scaling = made.rows if is_at_rows else []
        factors = [self._dot(dot, scaling if k == 0 else []) for k, dot in enumerate(made.dots)]
        left = [] if is_at_rows else made.rows
        for kind, tensors in (("row", left), ("col", made.cols), ("entry", made.entries)):
            factors += [self.operand(kind, _flat(t.value(self.pattern, kind))) for t in tensors]
        if made.scale != 1 or not factors:
            factors.append(("number", made.scale))
        return functools.reduce(lambda a, b: self._step("apply", "mul", a, b), factors)

    def _dot(self, dot: Dot, scaling: list[Factor]) -> Tree:
        self.num_dots += 1
        if self.num_dots > _MOST_DOTS:
            raise Refused(f"more than {_MOST_DOTS} dot products")
        query, key = ends_of(dot)
        if query.numel() == 0:
            raise Refused("dot products of no channels")
        query = scaled(query, scaling, self.pattern, "row")
        both = self.operand("row", query), self.operand("col", key)
        return self._step("dot", *both, query.shape[1])

    def _step(self, *step: Any) -> Tree:
        self._left -= 1
        if self._left < 0:
            raise Refused(f"more than {_MOST_INSTRUCTIONS} functions of values")
        return step

    def reduced(self, reduction: str, width: int) -> Tensor:
        """The reduction of the values along rows, or columns, ``[n, width]``."""
        return self._run((reduction, width, self.tree))

    def product(self, x: Tensor, *, is_softmax: bool) -> Tensor:
        """The sum of features ``[m, heads, k]``, weighed by the values or by their softmax.

        Returns:
            ``[n, heads, k]``.
        """
        value, heads = self.operand("col", x), x.shape[1]
        if is_softmax:
            out = self._run(("softmax", heads, self.tree, value))
        else:
            out = self._run(("sum", x.shape[1:].numel(), ("apply", "mul", self.tree, value)))
        return out.view(-1, *x.shape[1:])

    def _run(self, output: Tree) -> Tensor:
        index, ptr, transpose, _, _ = self.pattern.edges
        num_out, num_in = self.pattern.shape if self._is_by_row else self.pattern.shape[::-1]
        facts = tuple(
            (name, place, tensor.shape[1:].numel() if place != "parameter" else tensor.numel())
            for name, (place, tensor) in self.operands.items()
        )
        (out,) = ops.edge_program(
            _program(facts, output),
            {name: laid_out(tensor) for name, (_, tensor) in self.operands.items()},
            index,
            ptr=ptr,
            num_in=num_in,
            num_out=num_out,
            transpose=transpose if self._is_by_row else not transpose,
        )[:1]
        return out


def _flat(of_nodes: Tensor) -> Tensor:
    """Channels ``[n, channels, heads]`` in the order of programs; all else as it is."""
    return of_nodes.transpose(1, 2) if of_nodes.dim() == 3 else of_nodes


def _as_tree(given: Any) -> Tree:
    return given if isinstance(given, tuple) else ("number", float(given))


def _rule(made: Map, given: list[Any]) -> tuple[Any, ...]:
    """The name of an operator of torch with its arguments in order.

    Raises:
        Refused: programs have no such instruction.
    """
    name = made.name
    packet: Any = getattr(torch.ops.aten, name, None)
    rule = None if packet is None else ELEMENTWISE.get(packet)
    if rule is None:
        raise Refused(f"no instruction for {name}")
    overload = packet.Tensor_Scalar if name == "pow" else packet.default
    known = {a.name: a.default_value for a in overload._schema.arguments}
    kwargs = {k: v for k, v in made.kwargs.items() if k != "inplace"}
    if len(given) > len(known) or not kwargs.keys() <= known.keys():
        raise Refused(f"no instruction for {name} with such arguments")
    bound = {**known, **dict(zip(known, given, strict=False)), **kwargs}
    values = [bound.pop(n) for n in rule.values]
    is_number = all(isinstance(v, tuple | float | int) for v in values)
    if not is_number or any(isinstance(v, bool) for v in bound.values()) or rule.unknown(bound):
        raise Refused(f"no instruction for {name} with such arguments")
    return (name, *values, *(bound[n] for n in rule.numbers))


@functools.lru_cache(maxsize=512)
def _program(facts: tuple[tuple[str, Any, int], ...], output: Tree) -> Program:
    """The program of an output: its reduction, its width, its value, and what a softmax weighs."""
    builder = Builder()
    operands = {name: builder.operand(name, place, width) for name, place, width in facts}
    reduction, width, tree, *weighed = output
    value = _value(builder, tree, operands)
    value = builder.spread(value, width)
    if weighed:
        return builder.program((reduction, _value(builder, weighed[0], operands), value))
    return builder.program((reduction, value))


def _value(builder: Builder, tree: Tree, operands: dict[str, Value]) -> Any:
    kind, *given = tree
    if kind == "operand":
        return operands[given[0]]
    if kind == "number":
        return builder.constant(given[0])
    if kind == "dot":
        first, second = (_value(builder, t, operands) for t in given[:2])
        return builder.dot(first, second, given[2])
    name, *arguments = given
    made = [_value(builder, a, operands) if isinstance(a, tuple) else a for a in arguments]
    if kind == "apply":
        return builder.apply(name, *made)
    return ELEMENTWISE[getattr(torch.ops.aten, name)].make(builder, *made)
