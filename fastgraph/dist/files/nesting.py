"""Nested Python values as JSON and tensors, so that files of them are data and nothing to execute.

Numbers, texts, ``None`` and lists are JSON's own. What JSON has not is a dictionary with the name
of its kind: ``{"tuple": [...]}``, ``{"dict": [[key, value], ...]}``, and ``{"tensor": name, ...}``
for a tensor, which is kept elsewhere under that name.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from fastgraph.dist.tensor.sharded import ShardedTensor, is_sharded
from fastgraph.manifest import Json

Value = Any  # what a JSON stands for, which may be nested: its reader says which type it has


@dataclass(frozen=True)
class Spec:
    """A tensor that is kept elsewhere.

    Attributes:
        name: under which it is kept.
        shape: of the whole tensor.
        dtype: its type.
        axis: along which it was sharded; ``None`` if it was replicated.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    axis: int | None


def check_can_be_kept(x: Tensor, name: str) -> None:
    """A tensor can be in a file of safetensors.

    Raises:
        TypeError: it cannot, or has no shape yet.
    """
    if is_lazy(x):
        raise TypeError(f"{name} must have a shape to be kept in a file: call the model before")
    if x.layout != torch.strided or x.dtype == torch.complex128 or x.is_quantized:
        raise TypeError(
            f"{name} must be a dense tensor of a type that safetensors has, got {x.dtype} of "
            f"layout {x.layout}"
        )


class NamedTensors:
    """Tensors by the names under which they are kept, each once.

    Attributes:
        tensors: detached.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[Hashable, str] = {}
        self._starts: set[int] = set()

    def add(self, x: Tensor, name: str) -> str:
        """The name of a tensor: one that is known for what tied parameters share, or a new one.

        Raises:
            TypeError: safetensors has no such tensors, or it has no shape yet.
        """
        check_can_be_kept(x, name)
        x = x.detach()
        if not is_sharded(x) and x.numel():
            key = (x.data_ptr(), x.shape, x.stride(), x.dtype)
            if key in self._names:
                return self._names[key]
            if x.data_ptr() in self._starts:  # another view of the same memory
                x = x.clone()
            self._starts.add(x.data_ptr())
            self._names[key] = name
        if name in self.tensors:
            raise TypeError(f"{name} stands for two different tensors: give one another key")
        self.tensors[name] = x
        return name


_DEPTH = 64
"""Of values within values. Python's own limit of calls, which is json's, depends on the caller."""


def encoded(value: object, name: str, kept: NamedTensors, depth: int = 0) -> Json:
    """A value as JSON.

    Args:
        value: numbers, texts, booleans, ``None`` and tensors in lists, tuples and dictionaries.
        name: what it is called in errors, and how the names of its tensors begin.
        kept: where its tensors are put.
        depth: of the value in others.

    Raises:
        TypeError: it holds something else, or is nested too deeply.
    """
    if depth > _DEPTH:
        raise TypeError(
            f"{name.partition('.')[0]} must be nested at most {_DEPTH} deep to be kept in a file"
        )
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        axis = value.axis if isinstance(value, ShardedTensor) else None
        return described(value, kept.add(value, name), axis)
    if isinstance(value, (list, tuple)):
        items = [encoded(item, f"{name}.{i}", kept, depth + 1) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, Mapping):
        pairs = [
            [
                encoded(key, f"a key of {name}", kept, depth + 1),
                encoded(item, f"{name}.{key}", kept, depth + 1),
            ]
            for key, item in value.items()
        ]
        return {"dict": pairs}
    raise TypeError(
        f"{name} must be of numbers, texts, booleans, None and tensors in lists, tuples and "
        f"dictionaries to be kept in a file, got {type(value).__name__}"
    )


def described(x: Tensor, name: str, axis: int | None) -> dict[str, Json]:
    """The JSON entry for a tensor that is kept under a name; ``axis`` as in :class:`Spec`."""
    dtype = str(x.dtype).removeprefix("torch.")
    return {"tensor": name, "shape": list(x.shape), "dtype": dtype, "axis": axis}


def decoded(value: Json, tensor: Callable[[Spec], object]) -> Value:
    """The value of a JSON, with what a function gives for each tensor.

    Raises:
        ValueError: it is none that :func:`encoded` makes.
    """
    if isinstance(value, list):
        return [decoded(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        dtype = getattr(torch, value["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"expected a dtype of torch, got {value['dtype']!r}")
        return tensor(Spec(value["tensor"], torch.Size(value["shape"]), dtype, value["axis"]))
    if "tuple" in value:
        return tuple(decoded(item, tensor) for item in value["tuple"])
    if "dict" in value:
        return {decoded(key, tensor): decoded(item, tensor) for key, item in value["dict"]}
    raise ValueError(f"expected a tensor, tuple or dict, got {sorted(value)}")
