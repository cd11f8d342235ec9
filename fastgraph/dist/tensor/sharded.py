"""The sharded tensor: the shape of the whole, the data of this rank's rows.

Every operation returns what it would return on one process. A rule of the table does it on the rows
that each rank holds, with the collectives that it needs; what no rule covers is done on the whole,
which is gathered and counted, and goes on replicated. Where rows are never changes a result.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.agreement import on_first_rank
from fastgraph.dist.ranks.counts import COUNTS
from fastgraph.dist.ranks.mesh import GRID
from fastgraph.dist.tensor import collectives, originals, transforms
from fastgraph.dist.tensor.digests import DIGESTS
from fastgraph.dist.tensor.exchange import take
from fastgraph.dist.tensor.layout import Layout
from fastgraph.dist.tensor.memo import Value, cached, cached_with_all, count_edit, edits_of
from fastgraph.dist.tensor.table import (
    KNOWN,
    OF_WRAPPER,
    Arguments,
    Dispatch,
    NoRuleError,
    Options,
    TorchFunction,
    counts_edits,
    dispatch_of,
    is_in_place,
)
from fastgraph.graphs.memo import REMEMBERING, tensor_key
from fastgraph.graphs.ranks import BY_TYPE, OfRanks

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Types = Collection[type]
Index = Any  # what torch takes between brackets: numbers, slices, tensors, lists and arrays, tuples

# In-place by name, but not of values.
_LEAVES_VALUES = frozenset({"requires_grad_", "retain_grad", "__set__", "rename_"})

NUMBERS = itertools.count()
"""Of sharded tensors. Ranks do the same, so that one of a number is the same one on all of them."""


class ShardedTensor(Tensor):
    """A tensor of which each rank holds some rows along one dimension.

    Attributes:
        local: the rows that this rank holds, an ordinary tensor; autograd records what is done with
            it.
        rows: which rows these are.
        axis: the dimension of which they are.
        source: where upstream would have a view of another tensor's rows, but this is a copy.
        number: how many were made before.
    """

    local: Tensor
    rows: Layout
    axis: int
    source: Source | None
    number: int

    @staticmethod
    def __new__(  # noqa: D102
        cls, local: Tensor, rows: Layout, axis: int, source: Source | None = None
    ) -> ShardedTensor:
        shape = list(local.shape)
        shape[axis] = rows.n
        tensor: ShardedTensor = Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device
        )
        tensor.local, tensor.rows, tensor.axis, tensor.source = local, rows, axis, source
        tensor.number = next(NUMBERS)
        return tensor

    def __init__(self, *_: object) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(
        cls, func: TorchFunction, types: Types, args: Arguments = (), kwargs: Options | None = None
    ) -> object:
        """Do an operation by its rule, or on the whole."""
        if func in OF_WRAPPER:  # as most calls of a layer are, and no edit changes the answer
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = _usual_names(args, kwargs) if kwargs else (args, {})
        if transforms.innermost() is not None:
            raise transforms.refusal()
        if (out := kwargs.pop("out", None)) is not None:
            return _copied_into(out, func(*args, **kwargs))
        dispatch = KNOWN.get(func) or dispatch_of(func)
        values = leaves(args, kwargs)
        if originals.PAIRS:
            originals.follow()
            if dispatch.reads_values:
                originals.confirm(x.local for x in values if is_sharded(x))
        check_sources(values)
        before = version(args[0]) if args else None
        result = _by_rule(func, dispatch, args, kwargs)
        if before is not None and version(args[0]) != before:
            _edited(args[0])
            _write_through(args[0])
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without a class
        cls, func: TorchFunction, types: Types, args: Arguments = (), kwargs: Options | None = None
    ) -> object:
        """Refuse what bypasses Python, and would work on no data at all."""
        raise NotImplementedError(
            f"{func} got a sharded tensor from code that does not look for tensor subclasses; "
            "give it fastgraph.dist.whole(tensor)"
        )

    @property
    def reduces_on_ranks(self) -> bool:
        """See :func:`fastgraph.ops.library.reduces_on_ranks`: on a grid they do."""
        return self.rows.mode == GRID

    def cached(self, key: tuple[Hashable, ...], make: Callable[[], Value]) -> Value:
        """The result of ``make``, cached until this is edited or freed, which must not keep it."""
        return cached(self.local, (*key, self.rows, self.axis), make, is_part=True)

    def aligned(self, rows: Layout) -> Tensor:
        """The local rows under another layout of the same global length.

        Raises:
            NoRuleError: the length is another one.
        """
        if self.rows is rows or self.rows.same(rows):
            return self.local
        if self.rows.n != rows.n:
            raise NoRuleError
        return take(self.local, self.axis, rows.position, self.rows)


@dataclass
class Source:
    """The tensor and key of which a copy would be a view.

    Attributes:
        parent: the tensor whose rows were copied.
        key: by which ``parent[key]`` gives them; ``None`` if there is no such key.
        version: of the parent, when they were copied.
    """

    parent: ShardedTensor
    key: Index
    version: int | None


_OF_PLAIN = (Tensor.__format__, Tensor.__reduce_ex__, Tensor.__deepcopy__)
"""Functions that do something else for subclasses of tensors."""


class CopiedView(Tensor):
    """An ordinary tensor with a copy of rows of a sharded one, where upstream has a view.

    What is written to it is written to the sharded tensor, too.
    """

    source: Source | None = None

    @classmethod
    def __torch_function__(
        cls, func: TorchFunction, types: Types, args: Arguments = (), kwargs: Options | None = None
    ) -> object:
        """Do the operation on an ordinary tensor."""
        kwargs = kwargs or {}
        check_sources(leaves(args, kwargs))
        if any(issubclass(t, ShardedTensor) for t in types):
            with torch._C.DisableTorchFunctionSubclass():
                args, kwargs = tree_map(_plain, args), tree_map(_plain, kwargs)
            return func(*args, **kwargs)
        if func in _OF_PLAIN:
            args = (_plain(args[0]), *args[1:])
        touched = [x for x in leaves(args, kwargs) if type(x) is CopiedView]
        versions = [version(x) for x in touched]
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        for view, before in zip(touched, versions, strict=True):
            if version(view) != before:
                _write_through(view)
        return result


def _plain(x: object) -> object:
    """An ordinary tensor for a copied view; anything else as it is."""
    return x.as_subclass(Tensor) if isinstance(x, CopiedView) else x


def is_sharded(x: object) -> TypeIs[ShardedTensor]:
    """True if a value is a sharded tensor.

    Args:
        x: any value.
    """
    return type(x) is ShardedTensor


def as_sharded(x: Tensor) -> ShardedTensor:
    """The same tensor: the result of an operation on a sharded one whose rule keeps it sharded."""
    assert is_sharded(x)
    return x


@overload
def whole(x: Tensor) -> Tensor: ...
@overload
def whole(x: object) -> object: ...
def whole(x: object) -> object:
    """A sharded tensor as an ordinary one with all rows, which every rank gets.

    All ranks must call it.

    Args:
        x: a sharded tensor; anything else is returned as it is.
    """
    if not is_sharded(x):
        return x
    check_sources([x])
    originals.follow()
    originals.confirm([x.local])
    return collectives.gather(x.local, x.rows, x.axis)


@overload
def tree_map(function: Callable[[object], object], value: Arguments) -> Arguments: ...
@overload
def tree_map(function: Callable[[object], object], value: Options) -> Options: ...
@overload
def tree_map(function: Callable[[object], object], value: object) -> object: ...
def tree_map(function: Callable[[object], object], value: object) -> object:
    """Replace what lists, tuples, named tuples and dictionaries hold."""
    if isinstance(value, (list, tuple)):
        items = [tree_map(function, item) for item in value]
        # The results of torch's operators take one sequence, named tuples an argument for each.
        return type(value)(*items) if hasattr(value, "_make") else type(value)(items)
    if type(value) is dict:
        return {key: tree_map(function, item) for key, item in value.items()}
    return function(value)


def leaves(*values: object) -> list[object]:
    """The elements of lists, tuples and dictionaries, in their order."""
    found: list[object] = []
    for value in values:
        if isinstance(value, (list, tuple)):
            found += leaves(*value)
        elif type(value) is dict:
            found += leaves(*value.values())
        else:
            found.append(value)
    return found


def version(x: object) -> int | None:
    """A number that grows with each edit of a tensor; ``None`` for what does not count them."""
    uncounted = 0
    if is_sharded(x):
        x = x.local
        uncounted = edits_of(x)
    if not isinstance(x, Tensor):
        return None
    if type(x) is Tensor:
        return None if x.is_inference() else x._version + uncounted
    with torch._C.DisableTorchFunctionSubclass():
        return None if x.is_inference() else x._version + uncounted


def _edited(x: object) -> None:
    """All that shares the memory of a sharded tensor knows of an edit."""
    if is_sharded(x):
        count_edit(x.local)
        if originals.PAIRS:
            originals.write_back(x.local)


def _cached(name: str, compute: Callable[..., Value], *given: Hashable) -> Value:
    """:func:`fastgraph.graphs.memo.remembered` with sharded tensors among those that are given."""
    key: list[Hashable] = [name]
    tensors: list[tuple[Tensor, bool]] = []
    for value in given:
        if is_sharded(value):
            key += [value.rows, value.axis]
            tensors.append((value.local, True))
        elif isinstance(value, Tensor):
            tensors.append((value, False))
        else:
            key.append(value)
    return cached_with_all(tensors, tuple(key), lambda: compute(*given))


REMEMBERING[ShardedTensor] = _cached

_ERRORS = (IndexError, ModuleNotFoundError, RuntimeError, TypeError, ValueError)


def _decided(make: Callable[[], Value]) -> Value:
    return on_first_rank(make, _ERRORS)


BY_TYPE[ShardedTensor] = OfRanks(whole, _decided)


_entered = WeakTensorKeyDictionary()


@overload
def enter(x: Tensor) -> Tensor: ...
@overload
def enter(x: Tensor | Value) -> Tensor | Value: ...
def enter(x: object) -> object:
    """A replicated operand of an operation on rows, so that its gradient will be whole.

    Uses of a parameter share one sum of gradients for each backward pass.
    """
    if DIGESTS.steps:
        DIGESTS.compare(x)
    if not collectives.records_gradient(x):
        return x
    if not x.is_leaf:
        return collectives.enter(x)
    entered, key = _entered.get(x, (None, None))
    now = tensor_key(x)  # its memory, too, which ``.data`` may replace; what is entered keeps it
    if entered is None or key != now:
        entered = collectives.enter(x)
        _entered[x] = entered, now
        leaf = weakref.ref(x)
        _register_hook(entered, lambda grad: _forget(leaf()))
    return entered


_register_hook: Callable[[Tensor, Callable[[Tensor], None]], object] = Tensor.register_hook
"""Upstream's, before :mod:`fastgraph.dist.tensor.hooks` notes hooks of users."""


def _forget(leaf: Tensor | None) -> None:
    if leaf is not None:
        _entered.pop(leaf, None)


@overload
def aligned(x: Tensor, rows: Layout, axis: int) -> Tensor: ...
@overload
def aligned(x: Tensor | Value, rows: Layout, axis: int) -> Tensor | Value: ...
def aligned(x: object, rows: Layout, axis: int) -> object:
    """A local operand for a result that is sharded along a dimension.

    Args:
        x: an operand, of which only tensors are changed.
        rows: the layout of the result.
        axis: its sharded dimension, counted from the right (negative) as in broadcasting, or from
            the left, for operands of as many dimensions as the result.

    Raises:
        NoRuleError: it does not fit without being gathered.
    """
    if is_sharded(x):
        if (x.axis if axis >= 0 else x.axis - x.local.dim()) != axis:
            raise NoRuleError
        return x.aligned(rows)
    if not isinstance(x, Tensor):
        return x
    if x.layout != torch.strided:
        raise NoRuleError
    at = axis if axis >= 0 else x.dim() + axis
    # A single row is broadcast to others, but it is that of one rank where there are no others.
    if 0 <= at < x.dim() and (x.shape[at] != 1 or rows.n == 1):
        if x.shape[at] != rows.n:
            raise NoRuleError
        DIGESTS.compare(x)
        return collectives.split(x, rows, at)
    if axis >= 0 and x.dim() and x.dim() <= at:
        raise NoRuleError
    return enter(x)


def placed(x: Tensor, rows: Layout, axis: int) -> ShardedTensor:
    """A replicated tensor as a sharded one, which keeps the rows of this rank."""
    DIGESTS.compare(x)
    if x.requires_grad:
        return ShardedTensor(collectives.split(x, rows, axis), rows, axis)

    def make() -> Tensor:
        return x.detach().index_select(axis, rows.position_on(x.device))

    local = make() if x.is_floating_point() else cached(x, ("placed", rows, axis), make)
    return ShardedTensor(local, rows, axis)


def alike(x: ShardedTensor, local: Tensor) -> Tensor:
    """Local rows that are a view of those of a tensor on all ranks, or a copy on all of them.

    A part of a row or none has strides that are those of any order of dimensions, so that torch
    gives a view of it where it has to copy those of others. All ranks must call it.

    Args:
        x: the tensor.
        local: what an operation has made of its local rows that gives a view if it can.
    """
    counts = x.rows.counts
    if min(counts) > 1:
        return local
    is_view = local.untyped_storage() is x.local.untyped_storage()
    has_copied = not is_view and (x.rows.mine > 1 or max(counts) <= 1)
    if transport.agree(not has_copied) or not is_view:
        return local
    return local.clone(memory_format=torch.contiguous_format)


def taken(x: Tensor, rows: Layout, axis: int, *, is_tied: bool, name: str = "") -> ShardedTensor:
    """A tensor of the program that a graph takes, as a sharded one; its gradient is of all rows.

    Args:
        x: a replicated tensor.
        rows: of the result.
        axis: the dimension of which they are.
        is_tied: on one process the graph would have ``x`` itself, so that edits of one of both are
            edits of the other.
        name: in the graph.
    """
    DIGESTS.compare(x, name)
    if collectives.records_gradient(x):
        local = collectives.split(x, rows, axis)
    else:
        local = x.detach().index_select(axis, rows.position_on(x.device))
    found = ShardedTensor(local, rows, axis)
    if is_tied:
        originals.tie(x, found)
    return found


@overload
def wrapped(out: Tensor, rows: Layout, axis: int) -> ShardedTensor: ...
@overload
def wrapped(out: object, rows: Layout, axis: int) -> object: ...
def wrapped(out: object, rows: Layout, axis: int) -> object:
    """Results with local rows as sharded tensors; a negative axis counts from the right."""

    def wrap(x: object) -> object:
        if not isinstance(x, Tensor):
            return x
        return ShardedTensor(x, rows, axis if axis >= 0 else x.dim() + axis)

    return tree_map(wrap, out)


def _usual_names(args: Arguments, kwargs: Options) -> tuple[Arguments, Options]:
    """Arguments under the names that torch has first, of those that it takes."""
    kwargs = dict(kwargs)
    for first in ("input", "self"):  # torch takes either by name
        if not args and first in kwargs:
            args = (kwargs.pop(first),)
    for numpys, torchs in (("axis", "dim"), ("keepdims", "keepdim")):
        if numpys in kwargs and torchs not in kwargs:
            kwargs[torchs] = kwargs.pop(numpys)
    return args, kwargs


def _by_rule(func: TorchFunction, dispatch: Dispatch, args: Arguments, kwargs: Options) -> object:
    if dispatch.rule is not None:
        try:
            return dispatch.rule(func, args, kwargs)
        except NoRuleError:
            pass
    return on_the_whole(func, dispatch.name, args, kwargs)


def on_the_whole(func: TorchFunction, name: str, args: Arguments, kwargs: Options) -> object:
    """Do an operation on gathered tensors; what it writes to them goes back to the rows."""
    COUNTS.gathers[name] += 1
    found: dict[int, tuple[ShardedTensor, Tensor]] = {}

    def gathered(x: object) -> object:
        if not is_sharded(x):
            return x
        if id(x) not in found:
            found[id(x)] = x, collectives.gather(x.local, x.rows, x.axis)
        return found[id(x)][1]

    whole_args, whole_kwargs = tree_map(gathered, args), tree_map(gathered, kwargs)
    is_counted = counts_edits(func)
    before = [_state(copy, is_counted=is_counted) for _, copy in found.values()]
    result = func(*whole_args, **whole_kwargs)
    written = set()
    for (tensor, copy), state in zip(found.values(), before, strict=True):
        if _is_edited(copy, state):
            if copy.shape != tensor.shape:
                raise NotImplementedError(f"{name} would give a sharded tensor another shape")
            tensor.local.copy_(collectives.split(copy, tensor.rows, tensor.axis))
            if not args or tensor is not args[0]:  # of which the caller takes care
                _edited(tensor)
            written.add(id(copy))

    def returned(x: object) -> object:
        if type(x) is not Tensor:
            return x
        for tensor, copy in found.values():
            if x is copy and id(copy) in written:
                return tensor
            if x.layout == torch.strided and _shares_memory(x, copy):
                return copied_view(x, Source(tensor, None, version(tensor)))
        return x

    return tree_map(returned, result)


def _state(copy: Tensor, *, is_counted: bool) -> int | Tensor:
    return copy._version if is_counted and not copy.is_inference() else copy.detach().clone()


def _is_edited(copy: Tensor, state: int | Tensor) -> bool:
    if isinstance(state, Tensor):
        return copy.shape != state.shape or not torch.equal(copy, state)
    return bool(copy._version != state)


def _shares_memory(x: Tensor, y: Tensor) -> bool:
    return bool(x.numel()) and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def copied_view(x: Tensor, source: Source) -> CopiedView:
    """An ordinary tensor as a copy of what upstream would have a view of."""
    view = x.as_subclass(CopiedView)
    view.source = source
    return view


def check_sources(values: Iterable[object]) -> None:
    """Copies of rows are still what a view would be.

    Args:
        values: all that an operation is given.

    Raises:
        RuntimeError: a tensor was edited after some of its rows were copied.
    """
    for x in values:
        source = x.source if isinstance(x, (ShardedTensor, CopiedView)) else None
        if source is not None and version(source.parent) != source.version:
            raise RuntimeError(
                "a tensor with rows of a sharded tensor is used after the sharded tensor was "
                "changed: upstream it would be a view and change, too, here it is a copy; "
                "take the rows again"
            )


def _write_through(x: object) -> None:
    """Have the tensor that a copy was taken from changed like the copy."""
    if not isinstance(x, (ShardedTensor, CopiedView)) or x.source is None:
        return
    source = x.source
    if source.key is None:
        raise NotImplementedError(
            "an in-place change of rows of a sharded tensor that were gathered would be lost; "
            "assign to the sharded tensor by an index instead"
        )
    x.source = None
    source.parent[source.key] = x if is_sharded(x) else x.as_subclass(Tensor)
    source.version = version(source.parent)
    x.source = source


def _copied_into(out: object, result: object) -> object:
    """Results as those of ``out=``."""
    if isinstance(out, (list, tuple)) and isinstance(result, (list, tuple)):
        for target, value in zip(out, result, strict=True):
            _copied_into(target, value)
        return out
    assert isinstance(out, Tensor) and isinstance(result, Tensor)
    if out.shape != result.shape:
        if is_sharded(out):
            raise NotImplementedError("out= would give a sharded tensor another shape")
        out.resize_(result.shape)
    return out.copy_(result)


def changes_values(name: str) -> bool:
    """True if an operation of this name changes the values of its first argument."""
    return is_in_place(name) and name not in _LEAVES_VALUES
