"""Rules for pointwise operations: each rank computes them on its own rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.layout import Layout
from fastgraph.dist.tensor.sharded import (
    ShardedTensor,
    aligned,
    alike,
    is_sharded,
    leaves,
    tree_map,
    wrapped,
)
from fastgraph.dist.tensor.table import (
    Arguments,
    NoRuleError,
    Options,
    TorchFunction,
    is_in_place,
    name_of,
    rule,
    unpacked,
)

# Tagged as such by torch, but with variants that are not: they have rules of their own.
_NOT_ONLY = {"equal", "max", "min", "where", "dropout", "rrelu", "rrelu_", "bernoulli"}

_OTHERS = """
    relu elu leaky_relu gelu silu selu celu hardtanh relu6 mish softplus softsign log_sigmoid
    tanhshrink softshrink hardshrink threshold hardswish hardsigmoid tanh sigmoid
    masked_fill masked_fill_ clip clamp float double half bfloat16 long int short char byte bool
    _to_copy clone detach detach_ requires_grad_ zero_ fill_ copy_ zero fill zeros_like
    ones_like full_like empty_like isclose isreal alias square rsub true_divide absolute negative
    multiply subtract divide floor_divide floor_divide_ greater less greater_equal less_equal
    not_equal arccos arcsin arctan logical_xor fix multiply_ subtract_ divide_ true_divide_ eq_ ne_
    lt_ le_ gt_ ge_ isposinf isneginf special_expit special_log1p special_expm1 special_xlogy
"""

_OPERATORS = """
    add radd sub rsub mul rmul div rdiv truediv rtruediv floordiv rfloordiv mod rmod pow rpow and
    rand or ror xor rxor invert neg pos abs eq ne lt le gt ge lshift rshift rlshift rrshift
    iadd isub imul idiv itruediv ifloordiv imod ipow iand ior ixor ilshift irshift
"""


def _tagged() -> set[str]:
    """All operators of torch that are tagged as pointwise."""
    names = set()
    for schema in torch._C._jit_get_all_schemas():
        space, _, name = schema.name.partition("::")
        if space == "aten" and not name.startswith("_"):
            operator = getattr(torch.ops.aten, name)
            overloads = (getattr(operator, overload) for overload in operator.overloads())
            if any(torch.Tag.pointwise in overload.tags for overload in overloads):
                names.add(name)
    return names


def names() -> str:
    """The operations that are done element by element."""
    operators = (f"__{name}__" for name in _OPERATORS.split())
    return " ".join(sorted({*_tagged(), *_OTHERS.split(), *operators} - _NOT_ONLY))


@rule(names())
def pointwise(func: TorchFunction, args: Arguments, kwargs: Options) -> object:
    """Compute the local rows; other operands are broadcast, or split like them."""
    _check_devices(args, kwargs)
    edited = args[0] if is_in_place(name_of(func)) else None
    if edited is not None and not is_sharded(edited):
        raise NoRuleError
    lead = leading(args, kwargs) if edited is None else edited
    rows, axis = lead.rows, lead.axis - lead.local.dim()
    if edited is None and rows.n == 1:
        _check_single(args, kwargs, axis)
    local = local_operands(rows, axis)
    out = func(*tree_map(local, args), **tree_map(local, kwargs))
    return wrapped(out, rows, axis) if edited is None else edited


@rule("contiguous")
@unpacked
def contiguous(
    func: TorchFunction, x: ShardedTensor, *rest: object, **options: object
) -> ShardedTensor:
    """The tensor itself, or a copy: the same on all ranks."""
    local = alike(x, func(x.local, *rest, **options))
    return x if local is x.local else ShardedTensor(local, x.rows, x.axis)


_to: TorchFunction = Tensor.to  # in any of its forms


@rule("to type type_as cpu cuda")
@unpacked
def converted(func: TorchFunction, x: ShardedTensor, *rest: object, **options: object) -> object:
    """Convert to another dtype or device, or to those of another tensor of any shape."""
    other = rest[0] if rest else options.get("other")
    if isinstance(other, Tensor):
        further = {key: value for key, value in options.items() if key != "other"}
        return _to(x, other.device, other.dtype, *rest[1:], **further)
    name = name_of(func)
    if name == "cpu" and x.local.device.type == "cpu":
        return x
    if name == "type" and other is None and not options:
        return func(x.local)
    if name == "cuda" and other is None:
        options.setdefault("device", name)
    if isinstance(other, (str, int)) and name in ("to", "cuda"):
        rest = (torch.device(other), *rest[1:])
    return pointwise(func, (x, *rest), options)


def _check_devices(args: Arguments, kwargs: Options) -> None:
    """Rows go to the CPU, or to the device of their rank.

    Raises:
        ValueError: a call would have them elsewhere.
    """
    own, named = WORLD.device, kwargs.get("device")
    if isinstance(named, (str, int)):
        named = torch.device(named)
    for x in (*leaves(args), named):
        if not isinstance(x, torch.device) or x.type == "cpu":
            continue
        if x.type != own.type or x.index not in (None, own.index):
            allowed = "the CPU" if own.type == "cpu" else f"the CPU or {own}"
            hint = "" if x.type != own.type else f"; say {own.type!r}, and each rank takes its own"
            raise ValueError(
                f"a sharded tensor of rank {WORLD.rank} must be on {allowed}, got {x}{hint}"
            )


def leading(*values: object) -> ShardedTensor:
    """The sharded operand with most dimensions, whose layout is that of the result."""
    tensors = [x for x in leaves(*values) if is_sharded(x)]
    return max(tensors, key=lambda x: x.local.dim())


def local_operands(rows: Layout, axis: int) -> Callable[[object], object]:
    """A function that returns the local operand for a value."""
    return lambda x: aligned(x, rows, axis)


def _check_single(args: Arguments, kwargs: Options, axis: int) -> None:
    """A dimension of size 1 is broadcast to a larger one of another operand by nobody but all."""
    for x in leaves(args, kwargs):
        if isinstance(x, Tensor) and x.dim() + axis >= 0 and x.shape[axis] != 1:
            raise NoRuleError


@rule("where")
def where(func: TorchFunction, args: Arguments, kwargs: Options) -> object:
    """A choice between operands; the indices of a single one are another operation."""
    if len(args) + len(kwargs) != 3:
        raise NoRuleError
    return pointwise(func, args, kwargs)


@rule("equal")
@unpacked
def equal(func: TorchFunction, x: Tensor, other: Tensor) -> bool:
    """True if all elements are equal; all ranks get the same answer."""
    if x.shape != other.shape:
        raise NoRuleError
    return bool((x == other).all())


@rule("allclose")
def allclose(func: TorchFunction, args: Arguments, kwargs: Options) -> bool:
    """True if all elements are close; all ranks get the same answer."""
    close: TorchFunction = torch.isclose  # which takes the same arguments
    return bool(close(*args, **kwargs).all())
