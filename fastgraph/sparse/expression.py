"""Values of entries as expressions, which are computed when somebody asks.

A leaf is a tensor of entries, rows or columns, or two whose rows' products are sampled. Leaves keep
the caller's tensors, and an edit of one in place before it is used is an error.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

from fastgraph.backends.dropout import dropout_factors
from fastgraph.ops.heads import dropout_seed, seed_number
from fastgraph.ops.library import is_defined_by
from fastgraph.plugins.backend import FLOATING
from fastgraph.routing.conditions import execution_mode, is_plain
from fastgraph.sparse import products
from fastgraph.sparse.pattern import Pattern

_saving_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def may_defer(*tensors: Tensor) -> bool:
    """True if an operation on these may wait, and give the same when it is done later.

    Compilers, transforms, autocast, and modes and hooks that see each operation, or what it saves,
    would see it elsewhere; and of edits in inference mode nobody counts.
    """
    if (
        execution_mode() is not None
        or torch.compiler.is_compiling()
        or torch.is_inference_mode_enabled()
        or _saving_hooks(True) is not None
    ):
        return False
    for tensor in tensors:
        if tensor.is_inference() or tensor.layout is not torch.strided:
            return False
        if not is_plain(tensor) and not is_defined_by(tensor):
            return False
    return not tensors or not torch.is_autocast_enabled(tensors[0].device.type)


FEWEST_VALUES = 2**15
"""Entries times heads from which on values wait on a CPU: with fewer, one operator gains less than
expressions cost."""

FEWEST_SCORES = 2**13
"""The same of scores whose softmax, and a product with it, are one operator."""

SCORES = frozenset({"dots", "leaky", "channels"})
"""Such scores: dot products, a LeakyReLU of sums of rows and columns, and one of channels that a
vector contracts, which separate operators store for each entry."""


SCALING = (operator.mul, operator.truediv, operator.neg)
"""Functions that, of dot products and numbers, give such scores again."""


def may_wait(pattern: Pattern, heads: int, *tensors: Tensor, form: str | None = None) -> bool:
    """True if values of this pattern, of these tensors, are to wait; see :func:`may_defer`.

    On ranks always, as one operator sends rows once that several would send again. A few scores
    wait until some of their pattern have waited in vain.

    Args:
        pattern: of the values.
        heads: how many they are of.
        tensors: of which they are made.
        form: one of :data:`SCORES` if they are such.
    """
    if pattern.is_sharded:
        return may_defer(*tensors)
    count = pattern.nnz * heads
    is_enough = not are_few(pattern, count) or (
        form in SCORES and count >= FEWEST_SCORES and form not in pattern.in_vain
    )
    return is_enough and count > 0 and is_plain(*tensors) and may_defer(*tensors)


def are_few(pattern: Pattern, count: int) -> bool:
    """True if so many values, of entries and heads, are too few to wait, but for scores."""
    return count < FEWEST_VALUES and pattern.device.type == "cpu" and not pattern.is_sharded


def are_begun(made: Iterable[Expression]) -> bool:
    """True if some of these were computed; tensors that were given are no matter."""
    return any(m.is_computed for m in made if not isinstance(m, Entries))


def _as_made() -> AbstractContextManager[Any]:
    """As where expressions are made: what was begun since shall not see how they are computed."""
    is_observed = (
        _saving_hooks(True) is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )
    return _unobserved() if is_observed else torch.enable_grad()


@contextmanager
def _unobserved() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        if _saving_hooks(True) is not None:  # of checkpoints, which would miss it when they repeat
            stack.enter_context(saved_tensors_hooks(_same, _same))
        if torch._C._functorch.peek_interpreter_stack() is not None:
            stack.enter_context(temporarily_clear_interpreter_stack())
        if forward_ad._current_level >= 0:
            stack.enter_context(forward_ad._set_fwd_grad_enabled(False))
        yield


def _same(tensor: Tensor) -> Tensor:
    return tensor


class Expression:
    """A value for each entry of a pattern, ``[nnz]``, ``[nnz, heads]`` or ``[nnz, 1]``.

    Or several channels, ``[nnz, channels, heads]``, which a vector contracts.

    Attributes:
        pattern: whose entries.
        shape: of the values.
        dtype: of the values.
        tensors: what a leaf is made of.
        arguments: what others are made of.
        requires_grad: true if the values have a gradient.
        is_cut: true if it was made where no gradients were recorded, of what has them.
        num_products: how many products took the values.
    """

    tensors: tuple[Tensor, ...] = ()
    arguments: tuple[Expression, ...] = ()
    requires_grad: bool

    def __init__(self, pattern: Pattern, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.pattern = pattern
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.num_products = 0
        records = False
        for made in self.tensors or self.arguments:
            records = records or made.requires_grad
        self.requires_grad = records and torch.is_grad_enabled()
        self.is_cut = records and not self.requires_grad
        self._value: Tensor | None = None
        self._version = 0

    @property
    def device(self) -> torch.device:
        """Where the values are."""
        return self.pattern.device

    def dim(self) -> int:
        """The number of dimensions of the values."""
        return len(self.shape)

    @property
    def is_computed(self) -> bool:
        """True if somebody asked for the values."""
        return self._value is not None

    def leaves(self, dtype: torch.dtype) -> bool:
        """True if a product with these values leaves others of this dtype as they are."""
        return False

    def walk(self) -> list[Expression]:
        """The expressions of which it is made, after itself; each once."""
        found: dict[int, Expression] = {id(self): self}
        left: list[Expression] = [*self.arguments]
        while left:
            made = left.pop()
            if id(made) not in found:
                found[id(made)] = made
                left += made.arguments
        return [*found.values()]

    def check_unedited(self) -> None:
        """All tensors are what they were.

        Raises:
            RuntimeError: one was edited in place.
        """
        self.pattern.check_unedited()
        for made in self.walk():
            if isinstance(made, Leaf):
                made.check_versions()

    def value(self) -> Tensor:
        """The values, by separate operators; computed once.

        Raises:
            RuntimeError: a tensor was edited in place.
        """
        if self._value is not None:
            return self._value
        self.check_unedited()
        with _as_made():
            value = self.compute()
        if not self.requires_grad and value.requires_grad:  # cut, or of what was asked for later
            value = value.detach()
        # Others are of no use elsewhere: below autograd nothing is recorded, whatever is enabled.
        if may_defer(value) and value.requires_grad == self.requires_grad:
            self._version, self._value = value._version, value  # for threads, in this order
        return value

    def operand(self) -> Tensor:
        """The values as another expression takes them, which was made of them before.

        Raises:
            RuntimeError: a tensor was edited in place, or the values since they were computed.
        """
        value = self.value()
        if self._value is not None and value._version != self._version:
            raise RuntimeError(
                "the values of a sparse matrix were edited in place, of which others are made that "
                "were not computed yet; ask for their .val before, or edit a copy"
            )
        return value

    @property
    def is_begun(self) -> bool:
        """True if somebody asked for some of the values of which it is made, or for all.

        They may have been edited since, or have hooks.
        """
        return are_begun(self.walk())

    def settled(self) -> Expression:
        """As others take it from now on: values that were computed are a tensor like any other."""
        return self if self._value is None else Entries(self.pattern, self._value)

    def compute(self) -> Tensor:
        """The values, of those of the arguments."""
        raise NotImplementedError

    @property
    def structure(self) -> str:
        """Its functions, in brackets; equal for expressions that differ in tensors alone."""
        return f"{self.name}({','.join(a.structure for a in self.arguments)})"

    @property
    def name(self) -> str:
        """The function, as it is printed."""
        return type(self).__name__.lower()

    def __str__(self) -> str:
        return self.structure


class Leaf(Expression):
    """An expression of tensors alone."""

    def __init__(
        self, pattern: Pattern, shape: Sequence[int], dtype: torch.dtype, *tensors: Tensor
    ) -> None:
        # Without a gradient now, there is none later, though its owner may ask for one meanwhile.
        if torch.is_grad_enabled():
            self.tensors = tuple([t if t.requires_grad else t.detach() for t in tensors])
        else:
            self.tensors = tuple([t.detach() for t in tensors])
        self._versions = [None if t.is_inference() else t._version for t in tensors]
        self._aliases: tuple[Tensor, ...] | None = None
        super().__init__(pattern, shape, dtype)

    @property
    def aliases(self) -> tuple[Tensor, ...]:
        """The tensors as values are computed of them, and nothing else is.

        So the gradients of values with respect to these are apart, though one tensor be made of
        another, or be there twice.
        """
        if self._aliases is not None:
            return self._aliases
        with torch.enable_grad():
            found = tuple([t.view_as(t) if t.requires_grad else t for t in self.tensors])
        # In inference mode and below autograd a view has no gradient.
        if all(a.grad_fn is not None or a is t for a, t in zip(found, self.tensors, strict=True)):
            self._aliases = found
        return found

    def check_versions(self) -> None:
        """No tensor was edited in place.

        Raises:
            RuntimeError: one was.
        """
        for tensor, version in zip(self.tensors, self._versions, strict=True):
            if version is not None and tensor._version != version:
                raise RuntimeError(
                    "an operand of the values of a sparse matrix, of shape "
                    f"{list(tensor.shape)}, was edited in place before the values were computed; "
                    "compute with the values before, or edit a copy"
                )

    @property
    def structure(self) -> str:
        """The name."""
        return self.name


class Entries(Leaf):
    """A tensor of values, ``[nnz]`` or ``[nnz, heads]``.

    Args:
        pattern: whose entries.
        val: the tensor.
        is_ones: all of them are 1.
    """

    def __init__(self, pattern: Pattern, val: Tensor, *, is_ones: bool = False) -> None:
        super().__init__(pattern, val.shape, val.dtype, val)
        self.is_ones = is_ones

    def leaves(self, dtype: torch.dtype) -> bool:
        """True for ones of a dtype that is not wider."""
        return self.is_ones and leaves(self.dtype, dtype)

    def settled(self) -> Expression:
        """See :meth:`Expression.settled`; a tensor that was given is one already."""
        return self

    def compute(self) -> Tensor:
        """See :meth:`Expression.compute`."""
        return self.aliases[0]

    @property
    def name(self) -> str:
        """As it is printed."""
        return "ones" if self.is_ones else "values"


def leaves(ones: torch.dtype, others: torch.dtype) -> bool:
    """True if a product with ones of a dtype leaves others as they are."""
    return ones == others or torch.promote_types(ones, others) == others


class Ends(Leaf):
    """The value of its row, or of its column, for each entry.

    Args:
        pattern: whose entries.
        of_nodes: ``[n]``, ``[n, heads]`` or ``[n, channels, heads]``, of rows, or of columns.
        is_row: of which.
    """

    def __init__(self, pattern: Pattern, of_nodes: Tensor, *, is_row: bool) -> None:
        super().__init__(pattern, (pattern.nnz, *of_nodes.shape[1:]), of_nodes.dtype, of_nodes)
        self.is_row = is_row

    def compute(self) -> Tensor:
        """See :meth:`Expression.compute`."""
        self.pattern.in_vain.add("leaky")
        return self.pattern.gather(self.aliases[0], is_row=self.is_row)

    @property
    def name(self) -> str:
        """As it is printed."""
        return "rows" if self.is_row else "cols"


class Parameter(Leaf):
    """A tensor that all entries share, ``[channels]`` or ``[channels, heads]``."""

    def __init__(self, pattern: Pattern, vector: Tensor) -> None:
        super().__init__(pattern, (pattern.nnz, *vector.shape), vector.dtype, vector)

    def compute(self) -> Tensor:
        """See :meth:`Expression.compute`."""
        return spread(self.pattern, self.aliases[0])


class Dot(Leaf):
    """The product of two dense matrices, ``[n, k]`` and ``[k, m]``, or of such with heads last."""

    def __init__(self, pattern: Pattern, x1: Tensor, x2: Tensor) -> None:
        super().__init__(pattern, (pattern.nnz, *x1.shape[2:]), x1.dtype, x1, x2)

    def compute(self) -> Tensor:
        """See :meth:`Expression.compute`."""
        self.pattern.in_vain.add("dots")
        return products.dots(self.pattern, *self.aliases)


class Map(Expression):
    """A function of values, entry by entry, as torch has it.

    Args:
        function: torch's.
        args: its arguments: expressions, numbers, and tensors without dimensions.
        kwargs: others.
    """

    def __init__(self, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.arguments = tuple([a for a in args if isinstance(a, Expression)])
        wide = self.arguments[0]
        for other in self.arguments[1:]:
            if len(other.shape) == 2 and (len(wide.shape) == 1 or other.shape[1] != 1):
                wide = other
        shape = (*wide.shape, 1) if function is _UNSQUEEZE else wide.shape
        super().__init__(wide.pattern, shape, wide.dtype)

    def compute(self) -> Tensor:
        """See :meth:`Expression.compute`."""
        args = [a.operand() if isinstance(a, Expression) else a for a in self.args]
        return self.function(*args, **self.kwargs)

    @property
    def name(self) -> str:
        """As it is printed."""
        return getattr(self.function, "__name__", "function").strip("_")


_UNSQUEEZE = torch.unsqueeze


class Softmax(Expression):
    """The softmax of the values of each row."""

    def __init__(self, score: Expression) -> None:
        score = score.settled()
        self.arguments = (score,)
        super().__init__(score.pattern, score.shape, score.dtype)

    def compute(self) -> Tensor:
        """See :meth:`Expression.compute`."""
        return products.softmax(self.pattern, self.arguments[0].operand(), 1)


class Dropout(Expression):
    """Values of which some are set to 0, chosen by a seed, and the others scaled up.

    Args:
        values: of what.
        rate: the probability with which one is set to 0.
    """

    def __init__(self, values: Expression, rate: float) -> None:
        values = values.settled()
        self.arguments = (values,)
        self.rate = rate
        self.seed = dropout_seed(rate, None)
        super().__init__(values.pattern, values.shape, values.dtype)

    def compute(self) -> Tensor:
        """See :meth:`Expression.compute`."""
        values = self.arguments[0].operand()
        with torch.no_grad():
            like = values if values.dim() == 2 else values.unsqueeze(1)
            factors = dropout_factors(like, self.rate, seed_number(self.seed))
        return values * factors.reshape(values.shape)


class Contraction(Expression):
    """The products of channels, ``[nnz, channels, *heads]``, with a vector, ``[nnz, *heads]``."""

    def __init__(self, channels: Expression, vector: Tensor) -> None:
        channels = channels.settled()
        self.arguments = (channels, Parameter(channels.pattern, vector))
        super().__init__(channels.pattern, (channels.shape[0], *channels.shape[2:]), channels.dtype)

    @property
    def vector(self) -> Tensor:
        """``[channels, *heads]``."""
        return self.arguments[1].tensors[0]

    def compute(self) -> Tensor:
        """See :meth:`Expression.compute`."""
        channels, vectors = (a.operand() for a in self.arguments)
        return (channels * vectors).sum(1)


def spread(pattern: Pattern, vector: Tensor) -> Tensor:
    """A tensor that all entries share, for each of them; its gradient is added in one order."""
    return pattern.all_entries.gather(vector.unsqueeze(0))


def mapped(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Expression | None:
    """:class:`Map`, or ``None`` where torch may promote dtypes or nothing gains by waiting.

    Values of one head are put beside those of several as columns.
    """
    values = [a for a in args if isinstance(a, Expression)]
    few = are_few(values[0].pattern, max(v.shape.numel() for v in values))
    if (few and not _are_scaled(values, function)) or not may_defer():
        return None
    return mapped_later(function, *args, **kwargs)


def _are_scaled(values: Sequence[Expression], function: Callable[..., Tensor]) -> bool:
    """True for dot products times numbers: a few scores, which wait for their softmax."""
    (made, *others) = values
    while isinstance(made, Map) and made.function in SCALING and len(made.arguments) == 1:
        (made,) = made.arguments
    return isinstance(made, Dot) and not others and function in SCALING


def mapped_later(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Expression | None:
    """:func:`mapped` where it is known that values are to wait."""
    taken: list[Any] = []
    given: list[Expression] = []
    for argument in args:
        if isinstance(argument, Expression):
            given.append(argument.settled())
            taken.append(given[-1])
        elif isinstance(argument, Tensor):
            number = _number(argument, next(a for a in args if isinstance(a, Expression)))
            if number is None:
                return None
            taken.append(number)
        elif type(argument) in (int, float):
            taken.append(argument)
        else:
            return None
    dtype = given[0].dtype
    if dtype not in FLOATING:
        return None
    if len(given) == 1:
        if isinstance(given[0], Entries):
            return None
    else:
        if any(a.dtype != dtype for a in given) or all(isinstance(a, Entries) for a in given):
            return None
        dims = [len(a.shape) for a in given]
        if min(dims) < max(dims):
            taken = [
                Map(_UNSQUEEZE, a, 1) if isinstance(a, Expression) and a.dim() == 1 else a
                for a in taken
            ]
    return Map(function, *taken, **kwargs)


def _number(given: Tensor, like: Expression) -> float | None:
    """A tensor without dimensions as a number, if it is one that has no gradient."""
    if (
        given.dim() > 0
        or given.dtype != like.dtype
        or given.device.type != "cpu"
        or given.requires_grad
        or not may_defer(given)
    ):
        return None
    return float(given.item())
