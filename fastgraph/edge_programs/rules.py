"""Operators of torch as values of a program, and as steps before it.

A value that belongs to one kind of rows, for example to gathered nodes, is a *step*: the operations
of the message themselves compute it, once for each node or edge, before the program runs. A value
of several kinds is one of the program. Linear maps of sums and of concatenations are split into one
for each kind.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import add
from typing import Any

import torch
from torch import Tensor

from fastgraph.edge_programs.broadcasting import broadcast, is_consecutive, kept_channels
from fastgraph.edge_programs.broadcasting import summed as sum_over
from fastgraph.edge_programs.builder import Builder, Value
from fastgraph.edge_programs.calls import (
    EXPANSIONS,
    MULTIPLES,
    PRODUCTS,
    RESHAPES,
    SLICES,
    SUMS,
    Call,
    factors,
    repeats_ones,
)
from fastgraph.edge_programs.channels import Part, heads_of
from fastgraph.edge_programs.compositions import COMPOSITIONS
from fastgraph.edge_programs.dtypes import HALVES
from fastgraph.edge_programs.elementwise import ELEMENTWISE
from fastgraph.edge_programs.mapped import MatrixOfEdge
from fastgraph.edge_programs.owners import BY_TYPE, Owner, operand_place
from fastgraph.edge_programs.precision import Precision
from fastgraph.edge_programs.products import leaves, products_of_edges, split
from fastgraph.edge_programs.projections import projected, unshaped
from fastgraph.edge_programs.recorded import Recorded, Ref, Refused, Step, operand_name
from fastgraph.edge_programs.relations import product_by_type
from fastgraph.edge_programs.terms import common_owner, number_of, terms_of

aten = torch.ops.aten


class Rules:
    """The values of a message that is recorded, and what operators make of them.

    Args:
        dtypes: of the tensors that the message takes.
        autocast: the dtype of the autocast on the CPU under which it runs, if any.
        rounds: true if values of half types are rounded after each operation, as upstream's are.
        maps_few: true if few features of edges are mapped to many in the program, not before it.
    """

    def __init__(
        self,
        dtypes: Iterable[torch.dtype],
        autocast: torch.dtype | None,
        rounds: bool,
        *,
        maps_few: bool,
    ) -> None:
        self.builder = Builder()
        self.steps: list[Step] = []
        self.is_after_message = False
        """True once the message is there: what is made of it is computed in the program."""
        self.precision = Precision(self._step, dtypes, autocast, rounds)
        self.owner_of: dict[str, Owner] = {}
        """Of operands, by their names."""
        self.matrix_size = 0  # of the largest matrix of an edge that something is multiplied by
        self._has_products = autocast is None
        self._maps_few = maps_few and autocast is None
        self._known: dict[int, tuple[Tensor, Recorded]] = {}
        self._step_of: dict[str, int] = {}

    def value(self, v: Recorded) -> Value:
        """A value in the program, for which a step becomes an operand."""
        if v.scores is not None:
            raise Refused(_WEIGHED)
        if v.value is not None:
            return v.value
        if v.maps:
            raise Refused(_MATRICES)
        if v.parts:
            return self._joined(v.parts, v.channels, len(v.channels) - 1)
        if v.step is None or v.place is None:
            raise Refused("it computes parameters from comparisons")
        is_mapped = v.place == "edge" and self._maps_few
        if is_mapped and (made := projected(v, self.steps, self._known_as, self._step, self.value)):
            return made
        number = unshaped(v.step, self.steps)  # an operand has its channels in one dimension
        name = operand_name(self.steps[number], number)
        self._step_of[name], self.owner_of[name] = number, v.place
        return self.builder.operand(name, operand_place(v.place), math.prod(v.channels))

    def steps_of(self, operands: Iterable[str]) -> dict[str, int]:
        """The steps that operands are, by their names."""
        return {name: self._step_of[name] for name in operands}

    def _result(self, call: Call, channels: tuple[int, ...], has_rows: bool) -> Recorded:
        operation, given = call.operation, call.given
        tensors = [a for a in torch.utils._pytree.tree_leaves(given) if isinstance(a, Tensor)]
        if any(self._of(tensor).scores is not None for tensor in tensors):
            return self._weighted(call, channels)
        if operation in ELEMENTWISE:
            return self._elementwise(call, self._values(call), channels)
        if operation in RESHAPES:
            return self._reshape(self._of(given["self"]), channels)
        if operation in EXPANSIONS or (operation is aten.repeat and repeats_ones(given)):
            return self._expand(self._of(given["self"]), channels, has_rows)
        if operation in (aten.sum, aten.mean) and "dim" in given and given["dtype"] is None:
            return self._sum(call, self._of(given["self"]), channels)
        if operation in (*PRODUCTS, aten.bmm) and len({t.dtype for t in tensors}) > 1:
            raise Refused("it has a product of different dtypes")  # an error of upstream
        if operation in PRODUCTS:
            return self._product(call, channels)
        if operation is aten.bmm:
            return self._product_of_edges(call, channels)
        if operation is aten.cat:
            return self._cat(call, channels)
        if operation is aten.stack:
            return self._stack(call, channels)
        if operation in COMPOSITIONS:  # of steps
            return self._called(call, common_owner([self._of(t) for t in tensors]), channels)
        if operation in SLICES and has_rows:
            v = self._of(given["self"])
            return self._sliced(v, Part.of(call, v.channels))
        if operation is aten.amax:
            return self._largest(call, channels)
        if not has_rows:  # whatever it is, it can be done before
            return self._called(call, "parameter", channels)
        raise Refused(f"{call.func} is not known to be row-wise")

    def _weighted(self, call: Call, channels: tuple[int, ...]) -> Recorded:
        """A result with a softmax over neighbours for a factor, that of what it is made of."""
        operation = call.operation
        if operation in (*MULTIPLES, *SUMS):
            values = self._values(call)
        elif operation in (*RESHAPES, *EXPANSIONS, aten.sum, aten.mean):
            values = [self._of(call.given["self"])]
        else:
            raise Refused(_WEIGHED)
        weighted = [v for v in values if isinstance(v, Recorded) and v.scores is not None]
        if len(weighted) != (len(values) if operation in SUMS else 1):
            raise Refused(_WEIGHED)
        is_divisor = operation is aten.div and weighted[0] is not values[0]
        scores, own = weighted[0].scores, weighted[0].channels
        if scores is None or is_divisor or any(v.scores != scores for v in weighted):
            raise Refused(_WEIGHED)
        is_sum = operation in (aten.sum, aten.mean)
        narrow, wide = (kept_channels(call, own), own) if is_sum else (own, channels)
        if scores.width > 1 and operation not in RESHAPES and not is_consecutive(narrow, wide):
            raise Refused(_WEIGHED_APART)
        bare = [replace(v, scores=None) if isinstance(v, Recorded) else v for v in values]
        if operation in RESHAPES:
            found = self._reshape(bare[0], channels)
        elif operation in EXPANSIONS:
            found = self._expand(bare[0], channels, has_rows=True)
        elif is_sum:
            found = self._sum(call, bare[0], channels)
        else:
            found = self._elementwise(call, bare, channels)
        if math.prod(channels) % scores.width:
            raise Refused(_WEIGHED_APART)
        return Recorded(None, channels, None, self.value(found), scores=scores)

    def _values(self, call: Call) -> list[Any]:
        """The values that an element-wise operation takes: numbers, or what is known of them."""
        rule, given = ELEMENTWISE[call.operation], call.given
        unknown = rule.unknown(given)
        if unknown is not None:
            raise Refused(f"{call.func} with such {unknown} is no instruction")
        return [
            self._of(given[name]) if isinstance(given[name], Tensor) else given[name]
            for name in rule.values
        ]

    def _elementwise(
        self, call: Call, values: Sequence[Any], channels: tuple[int, ...]
    ) -> Recorded:
        rule, given = ELEMENTWISE[call.operation], call.given
        taken = [v for v in values if isinstance(v, Recorded)]
        if any(v.has_rows and len(v.channels) != len(channels) for v in taken):
            raise Refused(f"it works across edges ({call.func})")
        place = common_owner(taken)
        is_step = place is not None and not rule.is_mask and all(v.step is not None for v in taken)
        if is_step and (place == "parameter" or not (place == "edge" or self.is_after_message)):
            return self._called(call, place, channels)
        # Values of edges are computed in the program rather than stored, where it can.
        step = self._called(call, place, channels).step if is_step else None
        wide = [self._wide(v, channels) if isinstance(v, Recorded) else v for v in values]
        if any(v is None for v in wide):
            if step is None:
                raise Refused("it broadcasts over heads")
            return Recorded(place, channels, step)
        value = rule.make(self.builder, *wide, *(given[name] for name in rule.numbers))
        terms = () if is_step else terms_of(call, values, channels, self.precision.promoted)
        return Recorded(place, channels, step, value, terms)

    def _wide(self, v: Recorded, channels: tuple[int, ...]) -> Value | None:
        """A value with a number for each of consecutive channels, if it is broadcast so or a step.

        A step that dimensions between others broadcast is expanded before the program.
        """
        own = v.channels
        if len(own) > len(channels):
            if v.has_rows or len(own) != len(channels) + 1 or own[0] != 1:
                raise Refused("it works across edges")
            own = own[1:]
        own = (1,) * (len(channels) - len(own)) + own
        # A parameter is there once, however wide it is.
        if v.has_rows or v.step is None or is_consecutive(own, channels):
            found = broadcast(self.value(v), own, channels)
            if found is not None or v.step is None:
                return found
        return self.value(self._expand(self._reshape(v, own), channels, v.has_rows))

    def _reshape(self, v: Recorded, channels: tuple[int, ...]) -> Recorded:
        if channels == v.channels:
            return v
        if v.parts:
            return Recorded(None, channels, None, self.value(v))
        if v.maps and channels[-1:] == v.channels[-1:]:
            return replace(v, channels=channels)
        step = None if v.step is None else self._shaped(aten.reshape.default, v, channels)
        return Recorded(v.place, channels, step, v.value)

    def _expand(self, v: Recorded, channels: tuple[int, ...], has_rows: bool) -> Recorded:
        if v.has_rows != has_rows or len(v.channels) != len(channels):
            raise Refused("it broadcasts over edges")
        if v.step is not None:
            return Recorded(v.place, channels, self._shaped(aten.expand.default, v, channels))
        value = self._wide(v, channels)
        if value is None:
            raise Refused("it broadcasts over heads")
        return Recorded(v.place, channels, None, self.builder.spread(value, math.prod(channels)))

    def _shaped(self, function: Any, v: Recorded, channels: tuple[int, ...]) -> int:
        """A step that gives another shape to any number of rows."""
        rows = (-1,) if v.has_rows else ()
        return self._step(function, (Ref(number_of(v)), [*rows, *channels]))

    def _sum(self, call: Call, v: Recorded, channels: tuple[int, ...]) -> Recorded:
        first = int(v.has_rows)
        rank = len(v.channels) + first
        dims = {dim % rank for dim in call.given["dim"] or range(rank)}
        if first and 0 in dims:
            raise Refused(f"it works across edges ({call.func})")
        step = None if v.step is None else self._called(call, v.place, channels).step
        if step is not None and v.value is None:
            return Recorded(v.place, channels, step)
        summed = {dim - first for dim in dims}
        value = sum_over(self.value(v), v.channels, summed)
        if value is None and step is None:
            raise Refused("it sums over heads between other dimensions")
        if value is not None and call.operation is aten.mean:
            value = value / math.prod(v.channels[k] for k in summed)
        return Recorded(v.place, channels, step, value)

    def _product(self, call: Call, channels: tuple[int, ...]) -> Recorded:
        """A product with a matrix of parameters, split by the rows of what it takes."""
        tensor, weight, bias = (
            self._of(t) if isinstance(t, Tensor) else None for t in factors(call)
        )
        assert tensor is not None and weight is not None
        if weight.has_rows and bias is None:
            return self._product_of_edges(call, channels)
        if weight.has_rows or (bias is not None and bias.has_rows):
            raise Refused(_MATRICES)
        if tensor.step is not None:
            return self._called(call, tensor.place, channels)
        if len(weight.channels) != 2:
            raise Refused(f"{call.func} of values of different rows is no instruction")
        # A slice of the matrix itself, whose gradient ranks sum with those of other parameters.
        is_linear = call.operation is aten.linear
        multiply = aten.linear.default if is_linear else aten.matmul.default
        # Upstream rounds their sum alone, so what is summed has more digits than a half type.
        dtype = factors(call)[0].dtype
        wide = self.precision.widening(dtype)

        def matrix(size: int, offset: int) -> int:
            """The part of the matrix for some channels."""
            bounds = int(is_linear), offset, offset + size
            whole, is_whole = wide(number_of(weight)), size == tensor.channels[-1]
            return whole if is_whole else self._step(aten.slice.Tensor, (Ref(whole), *bounds))

        pieces, whole = split(tensor, has_products=self._has_products and dtype not in HALVES)
        # Several parts of one value are mapped at once, by the sum of their matrices.
        matrices: dict[tuple[Owner, int, float], int] = {}
        for coefficient, piece, offset in pieces:
            assert piece.place is not None
            part, mapped = matrix(piece.channels[-1], offset), (piece.place, number_of(piece))
            whole_part = matrices.get((*mapped, 1.0))
            if whole_part is not None:
                both, alpha = (Ref(whole_part), Ref(part)), (("alpha", coefficient),)
                matrices[*mapped, 1.0] = self._step(aten.add.Tensor, both, alpha)
            elif (same := matrices.get((*mapped, coefficient))) is not None:
                both = Ref(same), Ref(part)
                matrices[*mapped, coefficient] = self._step(aten.add.Tensor, both)
            else:
                matrices[*mapped, float(coefficient)] = part
        products: dict[Owner, int] = {}
        added = () if bias is None or not pieces else (Ref(wide(number_of(bias))),)
        for (place, number, coefficient), part in matrices.items():
            made = self._step(multiply, (Ref(wide(number)), Ref(part)))
            if coefficient != 1:
                made = self._step(aten.mul.Tensor, (Ref(made), coefficient))
            if place in products:
                made = self._step(aten.add.Tensor, (Ref(products[place]), Ref(made)))
            elif added and not products:  # apart: ranks sum its gradient with those of all others
                made = self._step(aten.add.Tensor, (Ref(made), *added))
            products[place] = made
        self.precision.keep_wide(products.values(), dtype)
        found = [Recorded(place, channels, step) for place, step in products.items()]
        if len(found) == 1 and not whole:
            return self.precision.narrowed(found[0], dtype)
        values = [self.value(v) for v in found]
        if whole:
            pairs = [(self.value(v), matrix(v.channels[0], offset)) for v, offset in whole]
            made_by = channels, self.value, self._step, is_linear
            return products_of_edges(pairs, values, None if found else bias, *made_by)
        value = functools.reduce(add, values)
        return Recorded(None, channels, None, value, tuple((1.0, piece) for piece in found))

    def _product_of_edges(self, call: Call, channels: tuple[int, ...]) -> Recorded:
        """A product with a matrix of each edge: of its type, or a linear map of its values."""
        tensor, matrix, _ = factors(call)
        v, table = self._of(tensor), self._of(matrix).table
        owner = None if v.place is None else BY_TYPE.get(v.place)
        if v.channels[:-1] != (1,):
            raise Refused(_MATRICES)
        self.matrix_size = max(self.matrix_size, math.prod(self._of(matrix).channels))
        made = MatrixOfEdge.of(self._of(matrix), self.steps, self._known_as)
        if made is not None:
            hidden = self.value(Recorded("edge", (made.num_hidden,), made.hidden))
            return Recorded(None, channels, maps=made.product(self.value(v), hidden, self._step))
        if table is None or owner is None or v.step is None:
            raise Refused(_MATRICES)
        pairs = self._step(None, (owner,))
        step = self._step(product_by_type, (Ref(v.step), Ref(table), Ref(pairs)))
        return Recorded(owner, channels, step)

    def _cat(self, call: Call, channels: tuple[int, ...]) -> Recorded:
        parts = tuple(self._of(tensor) for tensor in call.given["tensors"])
        if any(part.has_rows != parts[0].has_rows for part in parts):
            raise Refused("it concatenates values of edges and parameters")
        dim = call.given["dim"] % (len(channels) + parts[0].has_rows)
        if parts[0].has_rows and dim == 0:
            raise Refused(f"it works across edges ({call.func})")
        place = common_owner(parts)
        if place is not None and all(part.step is not None for part in parts):
            return self._called(call, place, channels)
        if not parts[0].has_rows:
            raise Refused("it computes parameters from comparisons")
        if dim != len(channels):
            return Recorded(None, channels, None, self._joined(parts, channels, dim - 1))
        parts = tuple(self.precision.promoted(call.given["tensors"], parts))
        return Recorded(None, channels, parts=parts)

    def _joined(self, parts: Sequence[Recorded], channels: tuple[int, ...], dim: int) -> Value:
        """A concatenation along a dimension of channels as the sum of its parts among zeros."""
        heads, inner = math.prod(channels[:dim]), math.prod(channels[dim + 1 :])
        values, start = [], 0
        for part in parts:
            place = math.prod(channels), heads, start * inner
            values.append(self.builder.pad(self.value(part), *place))
            start += part.channels[dim]
        return functools.reduce(add, values)

    def _stack(self, call: Call, channels: tuple[int, ...]) -> Recorded:
        """Values in a new dimension, of sums those of their terms."""
        taken = [self._of(tensor) for tensor in call.given["tensors"]]
        dim = call.given["dim"] % (len(channels) + taken[0].has_rows)
        if taken[0].has_rows and dim == 0:
            raise Refused(f"it works across edges ({call.func})")
        if len(taken) == 1:
            return self._reshape(taken[0], channels)
        place = common_owner(taken)
        if place is not None and all(v.step is not None for v in taken):
            return self._called(call, place, channels)
        if not taken[0].has_rows:
            raise Refused("it computes parameters from comparisons")
        sums = [v.terms if v.step is None else ((1.0, v),) for v in taken]
        shapes = {tuple((coefficient, piece.place) for coefficient, piece in s) for s in sums}
        if len(shapes) > 1 or () in shapes:
            one = (*channels[: dim - 1], 1, *channels[dim:])
            parts = [self._reshape(v, one) for v in taken]
            return Recorded(None, channels, None, self._joined(parts, channels, dim - 1))
        terms: list[tuple[float, Recorded]] = []
        for coefficient, piece in sums[0]:
            pieces = [Ref(number_of(s[len(terms)][1])) for s in sums]
            step = self._step(call.func, (pieces, dim))
            terms.append((coefficient, Recorded(piece.place, channels, step)))
        value = functools.reduce(add, (self.value(piece) * c for c, piece in terms))
        return Recorded(None, channels, None, value, tuple(terms))

    def _sliced(self, v: Recorded, part: Part) -> Recorded:
        """Some channels along a dimension: of each term of a sum, or of the part that has them."""
        channels = part.channels(v.channels)
        if v.step is not None:
            return Recorded(v.place, channels, self._step(*part.step(Ref(v.step))))
        if v.parts and part.dim < len(v.channels) - 1:
            return Recorded(None, channels, parts=tuple(self._sliced(p, part) for p in v.parts))
        for piece, start in leaves(v, 0) if v.parts else ():
            if start <= part.start and part.start + part.count <= start + piece.channels[-1]:
                own = replace(part, start=part.start - start)
                return self._sliced(piece, own)
        if v.terms:
            terms = tuple((c, self._sliced(piece, part)) for c, piece in v.terms)
            value = functools.reduce(add, (self.value(piece) * c for c, piece in terms))
            return Recorded(None, channels, None, value, terms)
        value = self.builder.slice(self.value(v), *part.place(v.channels))
        return Recorded(None, channels, None, value)

    def _largest(self, call: Call, channels: tuple[int, ...]) -> Recorded:
        """The largest numbers along dimensions of channels, of which equal ones share gradients."""
        v = self._of(call.given["self"])
        if v.step is not None:
            return self._called(call, v.place, channels)
        heads = heads_of(v.channels, call.given["dim"])
        return Recorded(None, channels, None, self.builder.fold_max(self.value(v), heads))

    def largest_of(self, v: Recorded, dims: Sequence[int]) -> Value:
        """The largest numbers along dimensions, without their gradient."""
        heads = heads_of(v.channels, dims)
        return self.builder.fold_max(self.builder.detach(self.value(v)), heads)

    def first_largest_of(self, v: Recorded, dims: Sequence[int]) -> Value:
        """The largest numbers along dimensions, of which the first one has the gradient."""
        if not v.has_rows:
            raise Refused("it takes the places of largest parameters")
        heads, value, b = heads_of(v.channels, dims), self.value(v), self.builder
        attains = b.apply("eq", value, b.fold_max(value, heads))
        attains = b.apply("maximum", attains, b.apply("ne", value, value))
        return b.fold(b.apply("where", b.first(attains, heads), value, 0.0), heads)

    def _called(self, call: Call, place: Owner | None, channels: tuple[int, ...]) -> Recorded:
        """The same call as a step."""
        kwargs = tuple((name, self._referred(a)) for name, a in call.kwargs.items())
        step = self._step(call.func, tuple(map(self._referred, call.args)), kwargs)
        return Recorded(place, channels, step)

    def _referred(self, argument: Any) -> Any:
        """An argument with references in the place of tensors."""
        if isinstance(argument, Tensor):
            return Ref(number_of(self._of(argument)))
        if isinstance(argument, (list, tuple)):
            return [self._referred(a) for a in argument]
        return argument

    def _step(
        self, function: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...] = ()
    ) -> int:
        made = Step(function, args, kwargs)
        if made not in self.steps:
            self.steps.append(made)
        return self.steps.index(made)

    def _known_as(self, step: int) -> tuple[Tensor, Recorded] | None:
        """The knowledge of a step, and the tensor that it computes or is a part of."""
        of_parts = ((t, v) for t, whole in self._known.values() for v in (whole, *whole.parts))
        return next((found for found in of_parts if found[1].step == step), None)

    def _know(self, tensor: Tensor, recorded: Recorded) -> None:
        self._known[id(tensor)] = (tensor, recorded)

    def _of(self, tensor: Tensor) -> Recorded:
        return self._known[id(tensor)][1]


_MATRICES = "it has a product with a matrix of each edge"
_WEIGHED = "its softmax over neighbours is no factor of its message"
_WEIGHED_APART = "it sums over channels that softmaxes over neighbours weigh differently"
