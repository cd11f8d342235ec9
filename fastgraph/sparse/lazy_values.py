"""Values that are not computed yet as tensors, and indices that know of which matrix they are.

``F.leaky_relu(u[A.row] + v[A.col])`` and ``F.dropout(S.val)`` stay expressions, so that programs
that were written for ``dgl.sparse`` have one operator. Every other function takes the values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from fastgraph.plugins.backend import FLOATING
from fastgraph.routing.conditions import is_plain
from fastgraph.sparse import fusing
from fastgraph.sparse.expression import (
    Contraction,
    Dropout,
    Ends,
    Entries,
    Expression,
    Leaf,
    mapped,
    may_defer,
    may_wait,
)
from fastgraph.sparse.pattern import Pattern
from fastgraph.sparse.virtual import OPERATORS

_REVERSED: dict[Any, Callable[..., Any]] = {
    Tensor.__radd__: OPERATORS[torch.add],
    Tensor.__rmul__: OPERATORS[torch.mul],
    Tensor.__rsub__: OPERATORS[torch.sub],
    Tensor.__rtruediv__: OPERATORS[torch.div],
}

_PRODUCTS = frozenset((torch.matmul, torch.mv, Tensor.matmul, Tensor.mv, Tensor.__matmul__))

_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]

_KNOWN = frozenset(
    (
        *(Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__),  # type: ignore[attr-defined]
        *(Tensor.ndim.__get__, Tensor.layout.__get__, _REQUIRES_GRAD),  # type: ignore[attr-defined]
        *(Tensor.is_cuda.__get__, Tensor.is_sparse.__get__),  # type: ignore[attr-defined]
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__),
    )
)
"""Facts that need no values."""


class LazyValues(Tensor):
    """The values of an expression, ``[nnz]`` or ``[nnz, heads]``, computed when they are needed.

    Made by :func:`lazy_values`.
    """

    expression: Expression
    node: Any = None

    @classmethod
    def of(cls, expression: Expression) -> LazyValues:
        """The tensor of an expression, without a gradient."""
        made: LazyValues = Tensor._make_wrapper_subclass(
            cls, expression.shape, dtype=expression.dtype, device=expression.device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)  # it has no memory
        made.expression = expression
        return made

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _KNOWN and not (function == _REQUIRES_GRAD and args[0].is_asked_for()):
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        given = (*args, *kwargs.values())
        if not any(isinstance(a, LazyValues) and a.is_foreign() for a in given):
            made = _later(function, args, dict(kwargs))
            if made is not None:
                return made
        args, kwargs = tree_map_only(LazyValues, LazyValues.computed, (args, kwargs))
        return function(*args, **kwargs)

    def is_foreign(self) -> bool:
        """True if a function of autograd returned it, whose gradient the expression has not."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.grad_fn is not self.node

    def is_asked_for(self) -> bool:
        """True if the values were computed, which may have got a gradient of their own since."""
        return self.expression.is_computed and not self.is_foreign()

    def computed(self) -> Tensor:
        """The values, with the gradient of this tensor."""
        if self.is_foreign():
            out: Tensor = _Computed.apply(self)  # type: ignore[no-untyped-call]
            return out
        return self.expression.value()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Functions of torch's C++ that nobody else saw; their gradient is that of ``_Waiting``."""
        args, kwargs = tree_map_only(
            LazyValues, lambda t: t.expression.value().detach(), (args, kwargs or {})
        )
        return function(*args, **kwargs)


class _Waiting(torch.autograd.Function):
    """Ties values to what they are made of, for functions that torch shows to nobody."""

    @staticmethod
    def forward(expression: Expression, *tensors: Tensor) -> LazyValues:
        return LazyValues.of(expression)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: LazyValues) -> None:
        ctx.expression, *_ = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors = _tensors(ctx.expression)
        wanted = [t for t in tensors if t.requires_grad]
        is_again = torch.is_grad_enabled()
        found = iter(
            torch.autograd.grad(
                ctx.expression.value(),
                wanted,
                grads,
                retain_graph=True,
                create_graph=is_again,
                allow_unused=True,
            )
        )
        return (None, *(next(found) if t.requires_grad else None for t in tensors))


class _Computed(torch.autograd.Function):
    """The values, as a tensor like any other."""

    @staticmethod
    def forward(val: LazyValues) -> Tensor:
        return val.expression.value().detach().clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        return None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def _tensors(expression: Expression) -> list[Tensor]:
    return [t for made in expression.walk() if isinstance(made, Leaf) for t in made.aliases]


def lazy_values(expression: Expression) -> Tensor:
    """The values as a tensor: computed already, or when they are needed."""
    # No product gains by values of which some were asked for.
    if expression.is_begun or expression.pattern.is_sharded or not may_defer():
        return expression.value()
    if not expression.requires_grad:
        return LazyValues.of(expression)
    with torch.enable_grad():  # as values have a gradient wherever they are asked for
        # Without what torch does before it for transforms, under which nothing waits.
        apply = super(torch.autograd.Function, _Waiting).apply
        out: LazyValues = apply(expression, *_tensors(expression))  # type: ignore[no-untyped-call]
    with torch._C.DisableTorchFunctionSubclass():
        out.node = out.grad_fn
    return out


def expression_of(val: Tensor, pattern: Pattern) -> Tensor | Expression:
    """The expression of lazy values, if they belong to this pattern; all others as tensors."""
    if not isinstance(val, LazyValues):
        return val
    own = val.expression
    if val.is_foreign():
        return val.computed()
    return own if own.pattern is pattern and not own.is_computed else own.value()


def _later(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The function as an expression, if a product may have use of it."""
    if function is F.dropout:
        return _dropout(*args, **kwargs)
    if function is F.leaky_relu and not kwargs.pop("inplace", False):
        values = args[0]
        made = mapped(function, values.expression, *args[1:], **kwargs)
    elif function in OPERATORS and not kwargs:
        made = _arithmetic(OPERATORS[function], args)
    elif function in _PRODUCTS and not kwargs:
        made = _contracted(*args)
    elif function in _REVERSED:
        made = _arithmetic(_REVERSED[function], args[::-1])
    else:
        return None
    return None if made is None else lazy_values(made)


def _arithmetic(function: Callable[..., Any], args: tuple[Any, ...]) -> Expression | None:
    given = [a.expression if isinstance(a, LazyValues) else a for a in args]
    own = [a for a in given if isinstance(a, Expression)]
    if any(a.pattern is not own[0].pattern or a.dim() != own[0].dim() for a in own):
        return None
    return mapped(function, *(_of_entries(a, own[0]) for a in given))


def _of_entries(given: Any, like: Expression) -> Any:
    """A tensor of a value for each entry, or entry and head, as an expression beside others."""
    if not isinstance(given, Tensor) or given.dim() != like.dim():
        return given
    of_all_heads = (*like.shape[:1], *(1 for _ in like.shape[1:]))
    fits = given.shape in (like.shape, of_all_heads) and given.dtype == like.dtype
    if not fits or given.device != like.device or not may_defer(given):
        return given
    return Entries(like.pattern, given)


def _contracted(values: Any, vector: Any) -> Expression | None:
    """The product of the values of all heads with a vector, as scores of several channels have."""
    if not isinstance(values, LazyValues) or isinstance(vector, LazyValues):
        return None
    fits = vector.shape == values.expression.shape[1:] and vector.dtype == values.dtype
    if not fits or vector.device != values.device or not may_defer(vector):
        return None
    return Contraction(values.expression, vector)


def _dropout(
    input: LazyValues, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor | None:
    if inplace or not isinstance(p, float | int) or not 0 <= p <= 1:
        return None
    if not training or p == 0:
        return input
    if not may_defer() or not fusing.takes_dropout(input.expression):
        return None
    return lazy_values(Dropout(input.expression, float(p)))


class Index(Tensor):
    """The row, or the column, of each entry: a tensor whose matrix is known where it indexes."""

    pattern: Pattern
    is_row: bool

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is Tensor.__getitem__ and type(args[1]) is Index:
            of_nodes, index = args
            size = index.pattern.shape[0 if index.is_row else 1]
            if (
                type(of_nodes) is not Index
                and of_nodes.dim() in (1, 2)
                and of_nodes.shape[0] == size
                and of_nodes.dtype in FLOATING
                and of_nodes.device == index.pattern.device
                and is_plain(of_nodes)
                and may_defer(of_nodes)
            ):
                pattern, is_row = index.pattern, index.is_row
                if may_wait(pattern, of_nodes.shape[1:].numel(), of_nodes):
                    return lazy_values(Ends(pattern, of_nodes, is_row=is_row))
                return pattern.gather(of_nodes, is_row=is_row)
        with torch._C.DisableTorchFunctionSubclass():
            if function in _KNOWN:
                return function(*args, **kwargs)
            args, kwargs = tree_map_only(Index, plain_index, (args, kwargs))
        return function(*args, **kwargs)


def plain_index(index: Tensor) -> Tensor:
    """An index as a tensor like any other, which shares its memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return index.as_subclass(Tensor)


_MOST_HEADS = 64
"""An index does not know of how many heads the values will be that it chooses."""


def index_of(pattern: Pattern, *, is_row: bool) -> Tensor:
    """The row or the column of each entry, ``[nnz]``; plain where nothing may wait."""
    found = pattern.row if is_row else pattern.col
    if pattern.is_sharded or not may_wait(pattern, _MOST_HEADS, found):
        return found
    index = found.as_subclass(Index)
    index.pattern, index.is_row = pattern, is_row
    return index
