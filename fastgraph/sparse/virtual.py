"""Matrices of rows times columns that are never made: a sparse one samples them.

``A * F.leaky_relu(rows(u) + cols(v))`` is computed where ``A`` has entries alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastgraph.plugins.backend import FLOATING
from fastgraph.sparse import products
from fastgraph.sparse.expression import (
    SCALING,
    Contraction,
    Dot,
    Ends,
    Entries,
    Expression,
    mapped,
    mapped_later,
    may_wait,
    spread,
)
from fastgraph.sparse.pattern import Pattern, check_tensor

Size = int | None

OPERATORS: dict[Any, Callable[..., Any]] = {
    torch.add: operator.add,
    torch.sub: operator.sub,
    torch.subtract: operator.sub,
    torch.mul: operator.mul,
    torch.multiply: operator.mul,
    torch.div: operator.truediv,
    torch.divide: operator.truediv,
    torch.true_divide: operator.truediv,
    torch.pow: operator.pow,
    torch.neg: operator.neg,
    torch.negative: operator.neg,
    Tensor.add: operator.add,
    Tensor.sub: operator.sub,
    Tensor.mul: operator.mul,
    Tensor.div: operator.truediv,
    Tensor.__add__: operator.add,
    Tensor.__mul__: operator.mul,
    Tensor.__sub__: operator.sub,
    Tensor.__truediv__: operator.truediv,
    Tensor.__pow__: operator.pow,
    Tensor.__neg__: operator.neg,
    Tensor.neg: operator.neg,
}
"""torch's functions that are operators of Python, if nothing else is given."""

_PRODUCTS = (torch.matmul, torch.mv)

_ELEMENTWISE = frozenset(
    getattr(module, name)
    for module, names in (
        (
            torch,
            "exp exp2 expm1 log log1p log2 log10 sqrt rsqrt square abs sign sin cos tan atan sinh"
            " cosh tanh sigmoid erf erfc relu reciprocal"
            " clamp clamp_min clamp_max floor ceil round",
        ),
        (
            F,
            "leaky_relu relu relu6 elu selu celu gelu silu mish softplus softsign logsigmoid tanh"
            " sigmoid hardtanh hardsigmoid hardswish tanhshrink",
        ),
    )
    for name in names.split()
)
"""Functions of one value at a time."""


class Virtual:
    """A matrix ``[n, m]``, or one for each head, that is computed where it is sampled.

    Made by :func:`dense`, :func:`rows` and :func:`cols`; arithmetic with numbers and other virtual
    matrices and torch's functions of one value at a time make others of it. A sparse matrix
    samples it: ``A * virtual`` and ``A / virtual`` have entries where ``A`` has them. Tensors are
    kept, not copied, and edits of them in place before the values are computed are an error.

    Attributes:
        shape: numbers of rows and columns; ``None`` for those that are not said.
        heads: number of heads; ``None`` for a single matrix.
        channels: number of matrices for each head, which a product with a vector contracts;
            ``None`` where heads themselves are contracted.
        form: ``"ends"`` of rows or columns, ``"sum"`` of both, ``"leaky"``, the LeakyReLU of one,
            ``"channels"``, such channels contracted as in GATv2, or ``"dots"``, dot products times
            numbers; else ``None``.
    """

    def __init__(
        self,
        shape: tuple[Size, Size],
        heads: Size,
        tensors: Sequence[Tensor],
        sample: Callable[[Pattern, bool], Expression | Tensor],
        channels: Size = None,
        form: str | None = None,
        of: Sequence[Virtual] = (),
    ) -> None:
        self.form = form
        self.shape = shape
        self.heads = heads
        self.channels = channels
        self._kept: list[tuple[Tensor, int | None]] = [p for virtual in of for p in virtual._kept]
        self._kept += [(t, None if t.is_inference() else t._version) for t in tensors]
        self._sample = sample

    def sampled(self, pattern: Pattern) -> Expression | Tensor:
        """The values where a pattern has entries: an expression, or a tensor if none may wait.

        Raises:
            RuntimeError: the shapes differ, a device does, a tensor was edited in place, or there
                are channels.
        """
        if self.channels is not None:
            raise RuntimeError(
                f"a virtual matrix of {self.channels} channels must be contracted by a vector, "
                "virtual @ vector, to be sampled"
            )
        tensors = [tensor for tensor, _ in self._kept]
        waits = may_wait(pattern, self.heads or 1, *tensors, form=self.form)
        self._check(pattern)
        return self._sample(pattern, waits)

    def _check(self, pattern: Pattern) -> None:
        """The pattern fits, and nothing was edited; so it is of all of which this one is made."""
        for name, own, other in zip(("rows", "columns"), self.shape, pattern.shape, strict=True):
            if own not in (None, other):
                raise RuntimeError(
                    f"a virtual matrix must have {other} {name} to be sampled by a sparse one of "
                    f"shape {list(pattern.shape)}, got {own}"
                )
        for tensor, version in self._kept:
            if version is not None and tensor._version != version:
                raise RuntimeError(
                    f"a tensor of shape {list(tensor.shape)}, of which a virtual matrix was made, "
                    "was edited in place before it was sampled"
                )
            if tensor.device != pattern.device:
                raise RuntimeError(
                    f"a virtual matrix must be on the device of the sparse one, {pattern.device}, "
                    f"got {tensor.device}"
                )

    def __matmul__(self, other: object) -> Virtual:
        own = tuple(s for s in (self.channels, self.heads) if s is not None)
        if not isinstance(other, Tensor) or not own or other.dim() != len(own):
            raise TypeError(
                "only dense(X) has a product with a matrix; another virtual matrix has one with a "
                f"vector for its channels, of shape {list(own)}, got {_described(other)}"
            )
        like = self._kept[0][0]
        if other.shape != own or other.dtype != like.dtype:
            raise RuntimeError(
                f"a vector must have shape {list(own)} and dtype {like.dtype} to contract a "
                f"virtual matrix, got {_described(other)}"
            )
        vector = other

        def sample(pattern: Pattern, waits: bool) -> Expression | Tensor:
            inner = self._sample(pattern, waits)
            if waits and isinstance(inner, Expression):
                return Contraction(inner, vector)
            values = inner.value() if isinstance(inner, Expression) else inner
            return (values * spread(pattern, vector)).sum(1)

        heads = None if self.channels is None else self.heads
        form = "channels" if self.form == "leaky" else None
        return Virtual(self.shape, heads, (vector,), sample, form=form, of=(self,))

    def __add__(self, other: Any) -> Any:
        return _of(operator.add, self, other)

    def __radd__(self, other: Any) -> Any:
        return _of(operator.add, other, self)

    def __sub__(self, other: Any) -> Any:
        return _of(operator.sub, self, other)

    def __rsub__(self, other: Any) -> Any:
        return _of(operator.sub, other, self)

    def __mul__(self, other: Any) -> Any:
        return _of(operator.mul, self, other)

    def __rmul__(self, other: Any) -> Any:
        return _of(operator.mul, other, self)

    def __truediv__(self, other: Any) -> Any:
        return _of(operator.truediv, self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return _of(operator.truediv, other, self)

    def __pow__(self, other: Any) -> Any:
        return _of(operator.pow, self, other)

    def __neg__(self) -> Any:
        return _of(operator.neg, self)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _PRODUCTS and not kwargs and isinstance(args[0], Virtual):
            return args[0] @ args[1]
        if function in OPERATORS and not kwargs:
            return _of(OPERATORS[function], *args)
        is_taken = function in _ELEMENTWISE and args and isinstance(args[0], Virtual)
        numbers = [*args[1:], *kwargs.values()]
        if not is_taken or any(isinstance(a, Virtual | Tensor) for a in numbers):
            return NotImplemented
        if kwargs.pop("inplace", False):
            raise TypeError("a virtual matrix cannot be changed in place: inplace must be False")
        virtual = args[0]
        if isinstance(virtual, Dense):
            return NotImplemented
        return _made(function, args, kwargs)

    def __repr__(self) -> str:
        heads = "" if self.heads is None else f", heads={self.heads}"
        return f"Virtual(shape={self.shape}{heads})"


class Dense(Virtual):
    """A dense matrix, whose product with another is virtual; see :func:`dense`."""

    def __init__(self, x: Tensor) -> None:
        self._x = x

        def refuse(pattern: Pattern, waits: bool) -> Expression:
            raise TypeError("dense(X) must be multiplied by a matrix, dense(X) @ Y, to be sampled")

        super().__init__((x.shape[0], None), None, (x,), refuse)

    def __matmul__(self, other: object) -> Virtual:
        if not isinstance(other, Tensor):
            return NotImplemented
        x1, x2 = self._x, other
        fits = x1.dim() == x2.dim() and x1.shape[1] == x2.shape[0] and x1.shape[2:] == x2.shape[2:]
        if not fits:
            raise RuntimeError(
                "Y must be [k, m] for dense(X) @ Y with X [n, k], or [k, m, heads] for "
                f"[n, k, heads], got shape {list(x2.shape)} for X of shape {list(x1.shape)}"
            )
        if x1.dtype != x2.dtype or x1.dtype not in FLOATING:
            raise RuntimeError(
                f"X and Y must have one floating dtype in dense(X) @ Y, got {x1.dtype} and "
                f"{x2.dtype}"
            )
        heads = x1.shape[2] if x1.dim() == 3 else None

        def sample(pattern: Pattern, waits: bool) -> Expression | Tensor:
            return Dot(pattern, x1, x2) if waits else products.dots(pattern, x1, x2)

        return Virtual((x1.shape[0], x2.shape[1]), heads, (x1, x2), sample, form="dots")


def dense(x: Tensor) -> Dense:
    """A dense matrix whose product ``dense(x) @ y`` is virtual: it is computed where it is sampled.

    Args:
        x: ``[n, k]``, or ``[n, k, heads]`` for one matrix for each head; ``y`` is ``[k, m]`` or
            ``[k, m, heads]`` then.

    Raises:
        TypeError: ``x`` is not a tensor.
        RuntimeError: it has another number of dimensions; ``y`` does not fit.
    """
    check_tensor("x", x)
    if x.dim() not in (2, 3):
        raise RuntimeError(f"x must be [n, k] or [n, k, heads], got shape {list(x.shape)}")
    return Dense(x)


def rows(u: Tensor) -> Virtual:
    """The virtual matrix with the same number in all columns, ``u[i]`` in row ``i``.

    Args:
        u: ``[n]``, or ``[n, heads]`` for one matrix for each head. ``rows(u) @ a`` with ``a`` of
            ``[heads]`` is their sum, weighed; of ``[n, channels, heads]`` it is one for each head,
            with ``a`` of ``[channels, heads]``.

    Raises:
        TypeError: ``u`` is not a tensor.
        RuntimeError: it has another number of dimensions or is not of floating-point numbers.
    """
    return _ends("u", u, is_row=True)


def cols(v: Tensor) -> Virtual:
    """The virtual matrix with the same number in all rows, ``v[j]`` in column ``j``.

    Args:
        v: ``[m]``, ``[m, heads]`` or ``[m, channels, heads]``, as in :func:`rows`.

    Raises:
        TypeError: ``v`` is not a tensor.
        RuntimeError: it has another number of dimensions or is not of floating-point numbers.
    """
    return _ends("v", v, is_row=False)


def _ends(name: str, of_nodes: Tensor, *, is_row: bool) -> Virtual:
    check_tensor(name, of_nodes)
    if of_nodes.dim() not in (1, 2, 3) or of_nodes.dtype not in FLOATING:
        raise RuntimeError(
            f"{name} must be [n], [n, heads] or [n, channels, heads] of floating-point numbers, "
            f"got shape {list(of_nodes.shape)}, {of_nodes.dtype}"
        )
    size = of_nodes.shape[0]
    heads = of_nodes.shape[-1] if of_nodes.dim() > 1 else None
    channels = of_nodes.shape[1] if of_nodes.dim() == 3 else None

    def sample(pattern: Pattern, waits: bool) -> Expression | Tensor:
        if waits:
            return Ends(pattern, of_nodes, is_row=is_row)
        return pattern.gather(of_nodes, is_row=is_row)

    shape = (size, None) if is_row else (None, size)
    return Virtual(shape, heads, (of_nodes,), sample, channels, "ends")


def _of(function: Callable[..., Any], *args: Any) -> Any:
    for other in args:
        is_number = isinstance(other, Real) or (isinstance(other, Tensor) and other.dim() == 0)
        if isinstance(other, Dense) or not (is_number or isinstance(other, Virtual)):
            return NotImplemented
    return _made(function, args, {})


def _made(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Virtual:
    virtual = [a for a in args if isinstance(a, Virtual)]
    shape = _common([v.shape[0] for v in virtual]), _common([v.shape[1] for v in virtual])
    heads = _common([v.heads for v in virtual])
    channels = virtual[0].channels
    if any(v.channels != channels or (channels and v.heads != heads) for v in virtual):
        raise RuntimeError(
            "virtual matrices must all have as many channels, got "
            f"{[(v.channels, v.heads) for v in virtual]} channels and heads"
        )
    tensors = [a for a in args if isinstance(a, Tensor)]

    def sample(pattern: Pattern, waits: bool) -> Expression | Tensor:
        given = [a._sample(pattern, waits) if isinstance(a, Virtual) else a for a in args]
        made = mapped_later(function, *given, **kwargs) if waits else None
        if made is not None:
            return made
        computed = applied(function, *given, **kwargs)
        return Entries(pattern, computed) if waits and isinstance(computed, Tensor) else computed

    return Virtual(shape, heads, tensors, sample, channels, _form(function, virtual), virtual)


def _form(function: Callable[..., Any], virtual: Sequence[Virtual]) -> str | None:
    forms = [v.form for v in virtual]
    if function is F.leaky_relu and forms == ["sum"]:
        return "leaky"
    if function in SCALING and forms == ["dots"]:
        return "dots"
    are_both = forms == ["ends", "ends"] and {v.shape[0] is None for v in virtual} == {True, False}
    return "sum" if function is operator.add and are_both else None


def _described(given: object) -> str:
    if isinstance(given, Tensor):
        return f"shape {list(given.shape)}, {given.dtype}"
    return type(given).__name__


def applied(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Expression | Tensor:
    """The function of values, later if that is the same, or now.

    Args:
        function: torch's.
        args: values, all of them expressions or none, and numbers.
        kwargs: others.
    """
    is_known = any(isinstance(a, Expression) for a in args)
    made = mapped(function, *args, **kwargs) if is_known else None
    if made is not None:
        return made
    given = [a.value() if isinstance(a, Expression) else a for a in args] if is_known else args
    dims = {v.dim() for v in given if isinstance(v, Tensor)} - {0}
    if len(dims) > 1:
        wide = max(dims)
        given = [
            v.unsqueeze(1) if isinstance(v, Tensor) and 0 < v.dim() < wide else v for v in given
        ]
    out: Tensor = function(*given, **kwargs)
    return out


def _common(sizes: list[Size]) -> Size:
    known = {s for s in sizes if s is not None}
    if len(known) > 1:
        raise RuntimeError(f"virtual matrices must have one shape, got sizes {sorted(known)}")
    return known.pop() if known else None
