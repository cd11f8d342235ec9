"""Patches that give whole tensors to functions of torch which do not look for subclasses."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import Function
from torch.jit._builtins import _find_builtin, _register_builtin
from torch.utils import dlpack
from torch.utils._device import _device_constructors
from torch.utils.data import DataLoader, TensorDataset

from fastgraph.dist.ranks.counts import COUNTS
from fastgraph.dist.ranks.gradients import WATCHED
from fastgraph.dist.tensor.sharded import is_sharded, leaves, tree_map, whole
from fastgraph.dist.tensor.table import Arguments, NoRuleError, Options, find
from fastgraph.plugins.patching import Patches

_FACTORIES = (
    "sparse_coo_tensor",
    "sparse_csr_tensor",
    "sparse_csc_tensor",
    "sparse_compressed_tensor",
    "asarray",
    "tensor",
)

Device = torch.device | str | int | None

PATCHES = Patches()


def install() -> None:
    """Replace functions of torch, once in a process."""
    if not hasattr(Function.apply, "_fastgraph_upstream"):
        # Default devices are for functions in a list that torch makes when it is asked for first.
        _device_constructors()
        PATCHES.replace(Function, "apply", classmethod(_apply(vars(Function)["apply"].__func__)))
        for name in _FACTORIES:
            _replace_builtin(name, _on_the_whole(getattr(torch, name), name))
        _replace_builtin("as_tensor", _as_tensor(torch.as_tensor))
        PATCHES.replace(dlpack, "to_dlpack", _on_the_whole(vars(dlpack)["to_dlpack"], "to_dlpack"))
        for loaded in (DataLoader, TensorDataset):  # workers are forks, which take part in nothing
            PATCHES.replace(loaded, "__init__", _on_the_whole(loaded.__init__, loaded.__name__))
        PATCHES.replace(torch, "compile", _uncompiled(torch.compile))
        PATCHES.replace(Tensor, "register_hook", _noted(Tensor.register_hook))


def _replace_builtin(name: str, value: Callable[..., object]) -> None:
    """Replace ``torch.<name>``, which TorchScript knows by its identity and compiles as before."""
    operator = _find_builtin(getattr(torch, name))
    PATCHES.replace(torch, name, value)
    _register_builtin(value, operator)


def _gathered(name: str, args: Arguments, kwargs: Options) -> tuple[Arguments, Options]:
    if any(is_sharded(x) for x in leaves(args, kwargs)):
        COUNTS.gathers[name] += 1
        return tree_map(whole, args), tree_map(whole, kwargs)
    return args, kwargs


def _apply(upstream: Callable[..., object]) -> Callable[..., object]:
    """``Function.apply``, whose backward pass would not reach the rows of a sharded tensor.

    Functions of other libraries may have rules, under their own name.
    """

    @functools.wraps(upstream)
    def apply(cls: type[Function], *args: object, **kwargs: object) -> object:
        by_rule = find(f"{cls.__module__}.{cls.__name__}")
        if by_rule is not None:
            try:
                return by_rule(cls, args, kwargs)
            except NoRuleError:
                pass
        args, kwargs = _gathered(f"{cls.__name__}.apply", args, kwargs)
        return upstream(cls, *args, **kwargs)

    apply._fastgraph_upstream = upstream  # type: ignore[attr-defined]
    return apply


def _on_the_whole(upstream: Callable[..., object], name: str) -> Callable[..., object]:
    @functools.wraps(upstream)
    def factory(*args: object, **kwargs: object) -> object:
        args, kwargs = _gathered(name, args, kwargs)
        return upstream(*args, **kwargs)

    return factory


def _as_tensor(upstream: Callable[..., object]) -> Callable[..., object]:
    """``torch.as_tensor``, which leaves tensors as they are."""

    @functools.wraps(upstream)
    def as_tensor(data: object, dtype: torch.dtype | None = None, device: Device = None) -> object:
        if not is_sharded(data):
            args, _ = _gathered("as_tensor", (data,), {})
            return upstream(*args, dtype=dtype, device=device)
        return data.to(device=device or data.device, dtype=dtype or data.dtype)

    return as_tensor


def _noted(upstream: Callable[..., object]) -> Callable[..., object]:
    """``Tensor.register_hook``, of which torch tells nobody who has the node alone."""

    @functools.wraps(upstream)
    def register_hook(x: Tensor, hook: Callable[[Tensor], Tensor | None]) -> object:
        if not is_sharded(x) and x.grad_fn is not None:
            metadata: dict[str, object] = x.grad_fn.metadata  # type: ignore[assignment]
            metadata[WATCHED] = True
        return upstream(x, hook)

    return register_hook


def _uncompiled(upstream: Callable[..., object]) -> Callable[..., object]:
    """``torch.compile``: compilers cannot see what ranks exchange, so code runs as it is."""

    @functools.wraps(upstream)
    def compile_(model: object = None, **options: object) -> object:
        COUNTS.gathers["torch.compile (not compiled)"] += 1
        return model if model is not None else lambda function: function

    return compile_
