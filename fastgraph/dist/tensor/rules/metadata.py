"""Rules for a tensor's metadata, such as its shape, and for the operations of autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastgraph.dist.tensor.collectives import gather, split
from fastgraph.dist.tensor.memo import watch_edits
from fastgraph.dist.tensor.originals import leaf_of
from fastgraph.dist.tensor.sharded import (
    ShardedTensor,
    is_sharded,
    on_the_whole,
    taken,
    tree_map,
    whole,
)
from fastgraph.dist.tensor.table import OF_WRAPPER, Arguments, NoRuleError, Options, name_of, rule

_OF_AUTOGRAD = {
    "requires_grad", "grad_fn", "is_leaf", "_version", "output_nr", "retains_grad", "name",
}  # fmt: skip
_SHARDED = {"grad", "data", "real", "imag"}
_PERMUTED = {"T", "mT", "H", "mH"}
# They are the same for the local rows, which have the memory that the whole has not.
_OF_MEMORY = {"is_cuda", "is_cpu", "is_sparse", "is_nested", "is_quantized", "is_meta", "is_mkldnn"}


_OF_THE_WHOLE = """size dim ndimension numel nelement __len__ is_floating_point is_complex is_signed
    element_size get_device __hash__ is_tensor is_same_size has_names is_sparse is_inference
    is_conj is_neg is_shared is_pinned dim_order"""
_ATTRIBUTES = ("shape", "dtype", "device", "layout", "ndim", *_OF_MEMORY)

# Methods and attributes are answered at once; the same as functions or operators by their rule.
OF_WRAPPER.update(getattr(Tensor, name) for name in _OF_THE_WHOLE.split() if hasattr(Tensor, name))
OF_WRAPPER.update(getattr(Tensor, name).__get__ for name in _ATTRIBUTES)


@rule(_OF_THE_WHOLE, of_values=False)
def of_the_whole(func: Any, args: Arguments, kwargs: Options) -> Any:
    """Shape, dtype and the like, which the tensor itself has."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


@rule("stride is_contiguous storage_offset", of_values=False)
def of_memory(func: Any, args: Arguments, kwargs: Options) -> Any:
    """The result of ``func`` for a contiguous tensor of this shape."""
    return func(torch.empty(args[0].shape, device="meta"), *args[1:], **kwargs)


@rule("data_ptr untyped_storage storage _typed_storage resize_ set_ share_memory_ __dlpack__")
def memory(func: Any, args: Arguments, kwargs: Options) -> Any:
    """Refuse access to memory: no rank holds that of the whole tensor."""
    raise NotImplementedError(
        f"a sharded tensor has no {name_of(func)}: its rows are in the memory of several "
        "processes; use fastgraph.dist.whole(tensor)"
    )


@rule("__get__", of_values=False)
def get(func: Any, args: Arguments, kwargs: Options) -> Any:
    """Get an attribute."""
    x, name = args[0], func.__self__.__name__
    leaf = leaf_of(x.local) if name in ("grad", "is_leaf") else None
    if leaf is not None:
        if name == "is_leaf":
            return True
        return None if leaf.grad is None else taken(leaf.grad, x.rows, x.axis, is_tied=True)
    if name in _OF_AUTOGRAD:
        return getattr(x.local, name)
    if name == "data" and not (x.is_floating_point() or x.is_complex()):
        return x  # of what has no gradient, edits of the data count as edits
    if name in _SHARDED:
        if name == "data":
            watch_edits(x.local)  # its alias has a version of its own
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
    """Set an attribute."""
    x, value = args
    name = func.__self__.__name__
    if not is_sharded(x):  # a replicated tensor is given sharded data or gradients
        raise NoRuleError
    leaf = leaf_of(x.local) if name == "grad" else None
    if leaf is not None:
        leaf.grad = value if value is None else whole(value)
        return
    if is_sharded(value):
        value = value.aligned(x.rows) if value.shape == x.shape else None
    elif isinstance(value, Tensor):
        value = value.index_select(x.axis, x.rows.position) if value.shape == x.shape else None
    if value is None and args[1] is not None:
        raise NotImplementedError(f"{name} of a sharded tensor must have its shape")
    setattr(x.local, name, value)


@rule("__delete__")
def delete(func: Any, args: Arguments, kwargs: Options) -> None:
    """Delete an attribute."""
    delattr(args[0].local, func.__self__.__name__)


@rule("backward")
def backward(func: Any, args: Arguments, kwargs: Options) -> Any:
    """``backward``: it starts from the rows of each rank."""
    if func is torch.autograd.backward:
        options = dict(zip(_OF_BACKWARD, args, strict=False)) | kwargs
        options["grad_tensors"] = _gradients(options["tensors"], options.get("grad_tensors"))
        options["tensors"] = _sequence(options["tensors"])
    else:
        options = dict(zip(_OF_METHOD, args, strict=False)) | kwargs
        (options["gradient"],) = _gradients(options["self"], options.get("gradient"))
    return func(**tree_map(_local, options))


_OF_METHOD = ("self", "gradient", "retain_graph", "create_graph", "inputs")
_OF_BACKWARD = (
    *("tensors", "grad_tensors", "retain_graph", "create_graph"),
    *("grad_variables", "inputs"),
)


def _local(x: Any) -> Any:
    return x.local if is_sharded(x) else x


def _sequence(x: Any) -> list[Any]:
    return list(x) if isinstance(x, (list, tuple)) else [x]


def _gradients(outputs: Any, given: Any) -> list[Any]:
    """A gradient for each output that autograd starts from, held by the same rows.

    Raises:
        RuntimeError: one is missing, or has another shape than its output.
    """
    tensors = _sequence(outputs)
    gradients = [None] * len(tensors) if given is None else _sequence(given)
    return [_of_output(x, g) for x, g in zip(tensors, gradients, strict=True)]


def _of_output(x: Any, grad: Any) -> Any:
    if grad is None:
        if is_sharded(x) and x.requires_grad:
            if x.numel() != 1:
                raise RuntimeError("grad can be implicitly created only for scalar outputs")
            return torch.ones_like(x.local)
        return None
    if not (is_sharded(x) or is_sharded(grad)):
        return grad
    if grad.shape != x.shape:
        raise RuntimeError(
            f"Mismatch in shape: grad_output has a shape of {grad.shape} and output has a shape "
            f"of {x.shape}."
        )
    return like_rows(grad, x) if is_sharded(x) else whole(grad)


def like_rows(value: Any, x: ShardedTensor) -> Tensor:
    """The local rows of a tensor, laid out like another tensor of the same shape."""
    if is_sharded(value):
        if value.axis == x.axis:
            aligned: Tensor = value.aligned(x.rows)
            return aligned
        value = whole(value)
    return split(value, x.rows, x.axis)


@rule("retain_grad")
def retain_grad(func: Any, args: Arguments, kwargs: Options) -> None:
    """``retain_grad``: keep the gradient of a tensor that is no leaf."""
    args[0].local.retain_grad()


@rule("register_hook register_post_accumulate_grad_hook")
def register_hook(func: Any, args: Arguments, kwargs: Options) -> Any:
    """A hook sees sharded tensors."""
    x, hook = args
    if name_of(func) != "register_hook":
        return x.local.register_post_accumulate_grad_hook(lambda _: hook(x))

    def local_hook(grad: Tensor) -> Any:
        result = hook(ShardedTensor(grad, x.rows, x.axis))
        return like_rows(result, x) if isinstance(result, Tensor) else result

    return x.local.register_hook(local_hook)


@rule("grad")
def grad(func: Any, args: Arguments, kwargs: Options) -> Any:
    """``torch.autograd.grad``."""
    options = dict(zip(_OF_GRAD, args, strict=False)) | kwargs
    inputs = _sequence(options["inputs"])
    if options.get("is_grads_batched"):
        raise NotImplementedError("is_grads_batched is not for sharded tensors")
    options["grad_outputs"] = _gradients(options["outputs"], options.get("grad_outputs"))
    options.update(outputs=_sequence(options["outputs"]), inputs=inputs)
    found = func(**tree_map(_local, options))
    return tuple(
        ShardedTensor(g, x.rows, x.axis) if is_sharded(x) and g is not None else g
        for g, x in zip(found, inputs, strict=True)
    )


_OF_GRAD = (
    *("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph"),
    *("only_inputs", "allow_unused", "is_grads_batched", "materialize_grads"),
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
    """``numpy``: the whole as an array, read-only because writes would not reach the tensor."""
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
