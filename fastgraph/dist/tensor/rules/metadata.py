"""Rules for a tensor's metadata, such as its shape, and for the operations of autograd."""

from __future__ import annotations

from collections.abc import Callable
from types import GetSetDescriptorType, MethodWrapperType

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
from fastgraph.dist.tensor.table import (
    OF_WRAPPER,
    Arguments,
    NoRuleError,
    Options,
    TorchFunction,
    name_of,
    rule,
    unpacked,
)

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


def _attribute(func: TorchFunction) -> str:
    """The name of the attribute of a tensor that a function gets, sets or deletes."""
    descriptor = func.__self__ if isinstance(func, MethodWrapperType) else None
    assert isinstance(descriptor, GetSetDescriptorType)
    return descriptor.__name__


@rule(_OF_THE_WHOLE, of_values=False)
def of_the_whole(func: TorchFunction, args: Arguments, kwargs: Options) -> object:
    """Shape, dtype and the like, which the tensor itself has."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


@rule("stride is_contiguous storage_offset", of_values=False)
@unpacked
def of_memory(func: TorchFunction, x: Tensor, *rest: object, **options: object) -> object:
    """The result of ``func`` for a contiguous tensor of this shape."""
    return func(torch.empty(x.shape, device="meta"), *rest, **options)


@rule("data_ptr untyped_storage storage _typed_storage resize_ set_ share_memory_ __dlpack__")
def memory(func: TorchFunction, args: Arguments, kwargs: Options) -> object:
    """Refuse access to memory: no rank holds that of the whole tensor."""
    raise NotImplementedError(
        f"a sharded tensor has no {name_of(func)}: its rows are in the memory of several "
        "processes; use fastgraph.dist.whole(tensor)"
    )


@rule("__get__", of_values=False)
@unpacked
def get(func: TorchFunction, x: ShardedTensor, *rest: object, **options: object) -> object:
    """Get an attribute."""
    name = _attribute(func)
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
@unpacked
def assign(func: TorchFunction, x: Tensor, given: Tensor | None) -> None:
    """Set an attribute."""
    value, name = given, _attribute(func)
    if not is_sharded(x):  # a replicated tensor is given sharded data or gradients
        raise NoRuleError
    leaf = leaf_of(x.local) if name == "grad" else None
    if leaf is not None:
        leaf.grad = value if value is None else whole(value)
        return
    if is_sharded(value):
        value = value.aligned(x.rows) if value.shape == x.shape else None
    elif isinstance(value, Tensor):
        rows = x.rows.position_on(value.device)
        value = value.index_select(x.axis, rows) if value.shape == x.shape else None
    if value is None and given is not None:
        raise NotImplementedError(f"{name} of a sharded tensor must have its shape")
    if isinstance(value, Tensor) and value.device != x.local.device:
        raise NotImplementedError(
            f"{name} of a sharded tensor on {x.local.device} must be on that device, got "
            f"{value.device}: make a parameter of nodes from what is on the device already"
        )
    setattr(x.local, name, value)


@rule("__delete__")
@unpacked
def delete(func: TorchFunction, x: ShardedTensor) -> None:
    """Delete an attribute."""
    delattr(x.local, _attribute(func))


@rule("backward")
def backward(func: TorchFunction, args: Arguments, kwargs: Options) -> object:
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


def _local(x: object) -> object:
    return x.local if is_sharded(x) else x


def _sequence(x: object) -> list[object]:
    return list(x) if isinstance(x, (list, tuple)) else [x]


def _gradients(outputs: object, given: object) -> list[object]:
    """A gradient for each output that autograd starts from, held by the same rows.

    Raises:
        RuntimeError: one is missing, or has another shape than its output.
    """
    tensors = _sequence(outputs)
    gradients = [None] * len(tensors) if given is None else _sequence(given)
    return [_of_output(x, g) for x, g in zip(tensors, gradients, strict=True)]


def _of_output(x: object, grad: object) -> object:
    if grad is None:
        if is_sharded(x) and x.requires_grad:
            if x.numel() != 1:
                raise RuntimeError("grad can be implicitly created only for scalar outputs")
            return torch.ones_like(x.local)
        return None
    if not (is_sharded(x) or is_sharded(grad)):
        return grad
    assert isinstance(x, Tensor) and isinstance(grad, Tensor)
    if grad.shape != x.shape:
        raise RuntimeError(
            f"Mismatch in shape: grad_output has a shape of {grad.shape} and output has a shape "
            f"of {x.shape}."
        )
    return like_rows(grad, x) if is_sharded(x) else whole(grad)


def like_rows(value: Tensor, x: ShardedTensor) -> Tensor:
    """The local rows of a tensor, laid out like another tensor of the same shape."""
    if is_sharded(value):
        if value.axis == x.axis:
            aligned: Tensor = value.aligned(x.rows)
            return aligned
        value = whole(value)
    return split(value, x.rows, x.axis)


@rule("retain_grad")
@unpacked
def retain_grad(func: TorchFunction, x: ShardedTensor) -> None:
    """``retain_grad``: keep the gradient of a tensor that is no leaf."""
    x.local.retain_grad()


@rule("register_hook register_post_accumulate_grad_hook")
@unpacked
def register_hook(
    func: TorchFunction, x: ShardedTensor, hook: Callable[[Tensor], Tensor | None]
) -> object:
    """A hook sees sharded tensors."""
    if name_of(func) != "register_hook":
        return x.local.register_post_accumulate_grad_hook(lambda _: hook(x))

    def local_hook(grad: Tensor) -> Tensor | None:
        result = hook(ShardedTensor(grad, x.rows, x.axis))
        return like_rows(result, x) if isinstance(result, Tensor) else result

    return x.local.register_hook(local_hook)


@rule("grad")
def grad(func: TorchFunction, args: Arguments, kwargs: Options) -> object:
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
@unpacked
def show(func: TorchFunction, x: ShardedTensor, *rest: object, **options: object) -> str:
    """The text of the whole tensor, which all ranks must ask for."""
    text = str(on_the_whole(_text, "repr", (x,), {}))
    if x.local.requires_grad:
        node = x.local.grad_fn
        kind = "requires_grad=True" if node is None else f"grad_fn=<{node.name()}>"
        text = f"{text.removesuffix(')')}, {kind})"
    return text


def _text(x: Tensor) -> str:
    return repr(x.detach())


@rule("__deepcopy__")
@unpacked
def deepcopy(func: TorchFunction, x: ShardedTensor, *memo: dict[int, object]) -> ShardedTensor:
    """A copy with its own rows."""
    local = x.local.detach().clone().requires_grad_(x.local.requires_grad)
    copy = ShardedTensor(local, x.rows, x.axis)
    if memo:
        memo[0][id(x)] = copy
    return copy


@rule("numpy __array__")
@unpacked
def as_array(func: TorchFunction, x: ShardedTensor, *rest: object, **options: object) -> object:
    """``numpy``: the whole as an array, read-only because writes would not reach the tensor."""

    def read_only(y: Tensor) -> object:
        array = func(y, *rest, **options)
        array.flags.writeable = False
        return array

    return on_the_whole(read_only, name_of(func), (x,), {})


@rule("tolist item __bool__ __int__ __float__ __index__ __complex__ __contains__")
def value(func: TorchFunction, args: Arguments, kwargs: Options) -> object:
    """Values for Python: those of a tensor with a single row come from its owner."""
    return on_the_whole(func, name_of(func), args, kwargs)


@rule("__reduce_ex__ __reduce__")
@unpacked
def pickle(func: TorchFunction, x: ShardedTensor, *protocol: int) -> object:
    """Files hold whole tensors, which any number of ranks can read."""
    whole = gather(x.local.detach(), x.rows, x.axis).requires_grad_(x.local.requires_grad)
    return whole.__reduce_ex__(*protocol)


def permuted(func: Callable[[Tensor], Tensor], x: ShardedTensor) -> ShardedTensor:
    """The result of a function that reorders dimensions."""
    sizes = [2 + dim for dim in range(x.local.dim())]
    axis = list(func(torch.empty(sizes, device="meta")).shape).index(2 + x.axis)
    return ShardedTensor(func(x.local), x.rows, axis)


@rule("permute transpose t movedim moveaxis swapaxes swapdims adjoint")
@unpacked
def permute(
    func: TorchFunction, x: ShardedTensor, *rest: object, **options: object
) -> ShardedTensor:
    """Other orders of the dimensions."""
    return permuted(lambda tensor: func(tensor, *rest, **options), x)
