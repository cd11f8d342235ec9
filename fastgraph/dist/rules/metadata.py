"""What is known of a tensor without looking at its rows, and what autograd keeps with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastgraph.dist.collectives import gather
from fastgraph.dist.sharded import ShardedTensor, is_sharded, on_the_whole, tree_map
from fastgraph.dist.table import Arguments, NoRuleError, Options, name_of, rule

_OF_AUTOGRAD = {
    "requires_grad", "grad_fn", "is_leaf", "_version", "output_nr", "retains_grad", "name",
}  # fmt: skip
_SHARDED = {"grad", "data", "real", "imag"}
_PERMUTED = {"T", "mT", "H", "mH"}
# They are the same for the local rows, which have the memory that the whole has not.
_OF_MEMORY = {"is_cuda", "is_cpu", "is_sparse", "is_nested", "is_quantized", "is_meta", "is_mkldnn"}


@rule(
    """size dim ndimension numel nelement __len__ is_floating_point is_complex is_signed
    element_size get_device __hash__ is_tensor is_same_size has_names is_sparse is_inference
    is_conj is_neg is_shared is_pinned dim_order"""
)
def of_the_whole(func: Any, args: Arguments, kwargs: Options) -> Any:
    """Shapes and types, which the tensor itself has."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


@rule("stride is_contiguous storage_offset")
def of_memory(func: Any, args: Arguments, kwargs: Options) -> Any:
    """What a contiguous tensor of this shape would answer."""
    return func(torch.empty(args[0].shape, device="meta"), *args[1:], **kwargs)


@rule("data_ptr untyped_storage storage _typed_storage resize_ set_ share_memory_ __dlpack__")
def memory(func: Any, args: Arguments, kwargs: Options) -> Any:
    """No memory holds the whole."""
    raise NotImplementedError(
        f"a sharded tensor has no {name_of(func)}: its rows are in the memory of several "
        "processes; use fastgraph.dist.whole(tensor)"
    )


@rule("__get__")
def get(func: Any, args: Arguments, kwargs: Options) -> Any:
    """Attributes."""
    x, name = args[0], func.__self__.__name__
    if name in _OF_AUTOGRAD:
        return getattr(x.local, name)
    if name == "data" and not (x.is_floating_point() or x.is_complex()):
        return x  # of what has no gradient, edits of the data count as edits
    if name in _SHARDED:
        value = getattr(x.local, name)
        return None if value is None else ShardedTensor(value, x.rows, x.axis)
    if name in _PERMUTED:
        return permuted(lambda tensor: getattr(tensor, name), x)
    if name == "_base":
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return func(x)


@rule("__set__")
def assign(func: Any, args: Arguments, kwargs: Options) -> None:
    """Attributes that programs set."""
    x, value = args
    name = func.__self__.__name__
    if not is_sharded(x):  # a replicated tensor is given sharded data or gradients
        raise NoRuleError
    if is_sharded(value):
        value = value.aligned(x.rows) if value.shape == x.shape else None
    elif isinstance(value, Tensor):
        value = value.index_select(x.axis, x.rows.position) if value.shape == x.shape else None
    if value is None and args[1] is not None:
        raise NotImplementedError(f"{name} of a sharded tensor must have its shape")
    setattr(x.local, name, value)


@rule("__delete__")
def delete(func: Any, args: Arguments, kwargs: Options) -> None:
    """Attributes that programs delete."""
    delattr(args[0].local, func.__self__.__name__)


@rule("backward")
def backward(func: Any, args: Arguments, kwargs: Options) -> Any:
    """The backward pass, which starts at the rows of each rank."""
    x = args[0]
    rest = (args[1:], dict(kwargs))

    def local(value: Any) -> Any:
        if not is_sharded(value):
            return value
        if is_sharded(x) and value.shape == x.shape and value.axis == x.axis:
            return value.aligned(x.rows)
        return value.local

    if is_sharded(x) and x.dim() and x.numel() > 1 and not args[1:] and "gradient" not in kwargs:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    gradients = tree_map(local, rest[0]), tree_map(local, rest[1])
    return func(local(x), *gradients[0], **gradients[1])


@rule("retain_grad")
def retain_grad(func: Any, args: Arguments, kwargs: Options) -> None:
    """Keep the gradient of what is no leaf."""
    args[0].local.retain_grad()


@rule("register_hook register_post_accumulate_grad_hook")
def register_hook(func: Any, args: Arguments, kwargs: Options) -> Any:
    """A hook sees sharded tensors."""
    x, hook = args
    if name_of(func) != "register_hook":
        return x.local.register_post_accumulate_grad_hook(lambda _: hook(x))

    def local_hook(grad: Tensor) -> Any:
        result = hook(ShardedTensor(grad, x.rows, x.axis))
        return result.aligned(x.rows) if is_sharded(result) else result

    return x.local.register_hook(local_hook)


@rule("grad")
def grad(func: Any, args: Arguments, kwargs: Options) -> Any:
    """``torch.autograd.grad``."""
    if len(args) < 2:
        args = (args[0], kwargs.pop("inputs"))
    single = isinstance(args[1], Tensor)
    inputs = [args[1]] if single else list(args[1])
    outputs = args[0]

    def local(x: Any) -> Any:
        return x.local if is_sharded(x) else x

    rest, options = args[2:], kwargs
    found = func(
        tree_map(local, outputs),
        [local(x) for x in inputs],
        *tree_map(local, rest),
        **tree_map(local, options),
    )
    return tuple(
        ShardedTensor(g, x.rows, x.axis) if is_sharded(x) and g is not None else g
        for g, x in zip(found, inputs, strict=True)
    )


@rule("__repr__ __str__")
def show(func: Any, args: Arguments, kwargs: Options) -> str:
    """The text of the whole tensor, which all ranks must ask for."""
    x = args[0]
    text = str(on_the_whole(_text, "repr", (x,), {}))
    if x.local.requires_grad:
        kind = "requires_grad=True" if x.local.is_leaf else f"grad_fn=<{x.local.grad_fn.name()}>"
        text = f"{text.removesuffix(')')}, {kind})"
    return text


def _text(x: Tensor) -> str:
    return repr(x.detach())


@rule("__deepcopy__")
def deepcopy(func: Any, args: Arguments, kwargs: Options) -> ShardedTensor:
    """A copy with its own rows."""
    x = args[0]
    local = x.local.detach().clone().requires_grad_(x.local.requires_grad)
    copy = ShardedTensor(local, x.rows, x.axis)
    if len(args) > 1:
        args[1][id(x)] = copy
    return copy


@rule("numpy __array__")
def as_array(func: Any, args: Arguments, kwargs: Options) -> Any:
    """The whole as an array, which cannot be written to: the tensor would not change with it."""
    x = args[0]
    array = on_the_whole(lambda y: func(y, *args[1:], **kwargs), name_of(func), (x,), {})
    array.flags.writeable = False
    return array


@rule("tolist item __bool__ __int__ __float__ __index__ __complex__ __contains__")
def value(func: Any, args: Arguments, kwargs: Options) -> Any:
    """Values for Python: those of a tensor with a single row come from its owner."""
    return on_the_whole(func, name_of(func), args, kwargs)


@rule("__reduce_ex__ __reduce__")
def pickle(func: Any, args: Arguments, kwargs: Options) -> Any:
    """Files hold whole tensors, which any number of ranks can read."""
    x = args[0]
    whole = gather(x.local.detach(), x.rows, x.axis).requires_grad_(x.local.requires_grad)
    return whole.__reduce_ex__(*args[1:])


def permuted(func: Any, x: ShardedTensor) -> ShardedTensor:
    """The result of a function that reorders dimensions."""
    sizes = [2 + dim for dim in range(x.local.dim())]
    axis = list(func(torch.empty(sizes, device="meta")).shape).index(2 + x.axis)
    return ShardedTensor(func(x.local), x.rows, axis)


@rule("permute transpose t movedim moveaxis swapaxes swapdims adjoint")
def permute(func: Any, args: Arguments, kwargs: Options) -> ShardedTensor:
    """Other orders of the dimensions."""
    return permuted(lambda x: func(x, *args[1:], **kwargs), args[0])
