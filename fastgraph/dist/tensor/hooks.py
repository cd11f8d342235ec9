"""Patches that give whole tensors to functions of torch which do not look for subclasses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function
from torch.utils import dlpack
from torch.utils.data import DataLoader, TensorDataset

from fastgraph.dist.ranks.counts import COUNTS
from fastgraph.dist.tensor.sharded import is_sharded, leaves, tree_map, whole
from fastgraph.dist.tensor.table import NoRuleError, find
from fastgraph.plugins.patching import Patches

_FACTORIES = (
    "sparse_coo_tensor",
    "sparse_csr_tensor",
    "sparse_csc_tensor",
    "sparse_compressed_tensor",
    "asarray",
    "tensor",
)

PATCHES = Patches()


def install() -> None:
    """Replace functions of torch, once in a process."""
    if not hasattr(Function.apply, "_fastgraph_upstream"):
        PATCHES.replace(Function, "apply", classmethod(_apply(vars(Function)["apply"].__func__)))
        for name in _FACTORIES:
            PATCHES.replace(torch, name, _on_the_whole(getattr(torch, name), name))
        PATCHES.replace(torch, "as_tensor", _as_tensor(torch.as_tensor))
        PATCHES.replace(dlpack, "to_dlpack", _on_the_whole(vars(dlpack)["to_dlpack"], "to_dlpack"))
        for loaded in (DataLoader, TensorDataset):  # workers are forks, which take part in nothing
            PATCHES.replace(loaded, "__init__", _on_the_whole(loaded.__init__, loaded.__name__))
        PATCHES.replace(torch, "compile", _uncompiled(torch.compile))


def _gathered(name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    if any(is_sharded(x) for x in leaves(args, kwargs)):
        COUNTS.gathers[name] += 1
        return tree_map(whole, args), tree_map(whole, kwargs)
    return args, kwargs


def _apply(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """``Function.apply``, whose backward pass would not reach the rows of a sharded tensor.

    Functions of other libraries may have rules, under their own name.
    """

    @functools.wraps(upstream)
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
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


def _on_the_whole(upstream: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def factory(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _gathered(name, args, kwargs)
        return upstream(*args, **kwargs)

    return factory


def _as_tensor(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.as_tensor``, which leaves tensors as they are."""

    @functools.wraps(upstream)
    def as_tensor(data: Any, dtype: Any = None, device: Any = None) -> Any:
        if not is_sharded(data):
            args, _ = _gathered("as_tensor", (data,), {})
            return upstream(*args, dtype=dtype, device=device)
        return data.to(device=device or data.device, dtype=dtype or data.dtype)

    return as_tensor


def _uncompiled(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile``: compilers cannot see what ranks exchange, so code runs as it is."""

    @functools.wraps(upstream)
    def compile_(model: Any = None, **options: Any) -> Any:
        COUNTS.gathers["torch.compile (not compiled)"] += 1
        return model if model is not None else lambda function: function

    return compile_
