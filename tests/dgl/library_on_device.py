"""DGL as if its C++ library had been built for the stand-in device, as it can be for CUDA.

The library computes on the memory of the host, which is that of the device. What it returns is on
the device if one of its arguments was, graphs and arrays alike, and DGL's Python takes it to be
there. The matrices of types of nodes and edges, for which the library has kernels on GPUs alone,
torch multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import dlpack

from fastgraph.dist.graphs.dgl import index
from tests import standin
from tests.dgl import on_device

from dgl import backend, utils  # isort: skip
from dgl._ffi.function import Function  # isort: skip
from dgl._ffi.object import ObjectBase  # isort: skip
from dgl._ffi.runtime_ctypes import DGLContext  # isort: skip
from dgl.backend.pytorch import sparse  # isort: skip
from dgl.heterograph_index import HeteroGraphIndex  # isort: skip
from dgl.ndarray import NDArray  # isort: skip

_MARK = "is_on_stand_in"

CALLED: set[str] = set()
"""Functions of the library that were called with what is on the device."""


def install() -> None:
    """Have DGL's Python and its library know the device."""
    on_device.install()
    index.KINDS_OF_LIBRARY = (*index.KINDS_OF_LIBRARY, standin.DEVICE)
    exists, of_library = DGLContext.exist.fget, Function.__call__
    DGLContext.exist = property(lambda self: _is_ours(self) or exists(self))

    def called(self: Any, *args: Any) -> Any:
        is_there = any(map(_is_there, (self, *_leaves(args))))  # such as the arrays of a result
        if is_there:
            CALLED.add(getattr(self, "__name__", ""))
        found = of_library(self, *args)
        if is_there:
            for value in _leaves([found]):
                if isinstance(value, (NDArray, ObjectBase, Function)):
                    setattr(value, _MARK, True)
        return found

    Function.__call__ = called
    _arrays()
    _graphs()
    sparse._segment_mm, sparse._segment_mm_backward_B = _segment_mm, _gradient_of_segments
    sparse._gather_mm, sparse._gather_mm_scatter = _gather_mm, _gather_mm_scatter


def _is_ours(context: Any) -> bool:
    return bool(context.device_type == utils.to_dgl_context(standin.DEVICE).device_type)


def _is_there(value: Any) -> bool:
    if isinstance(value, index.ShardedIndex):  # of which the library gets the whole graph
        return value.device.type == standin.DEVICE
    return getattr(value, _MARK, False) is True


def _leaves(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _leaves(value)
        else:
            yield value


def _arrays() -> None:
    """Tensors of the device are arrays of the library, and the other way."""

    to_dlpack = dlpack.to_dlpack

    def lent(x: Tensor) -> Any:
        return standin.lent_to_host(to_dlpack(x))

    dlpack.to_dlpack = lent

    def given(upstream: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def array(x: Tensor) -> Any:
            found = upstream(x)
            if x.device.type == standin.DEVICE:
                setattr(found, _MARK, True)
            return found

        return array

    for name in ("zerocopy_to_dgl_ndarray", "zerocopy_to_dgl_ndarray_for_write"):
        setattr(backend, name, given(getattr(backend, name)))
    where, taken = NDArray.ctx.fget, backend.zerocopy_from_dgl_ndarray
    NDArray.ctx = NDArray.context = property(
        lambda self: utils.to_dgl_context(standin.DEVICE) if _is_there(self) else where(self)
    )

    def tensor(array: Any) -> Tensor:
        found: Tensor = taken(array)
        return standin.on_device(found) if _is_there(array) else found

    backend.zerocopy_from_dgl_ndarray = tensor


def _graphs() -> None:
    """Graphs go there and back, and say where they are."""
    where, copy_to = HeteroGraphIndex.ctx.fget, HeteroGraphIndex.copy_to

    def ctx(self: Any) -> Any:
        return utils.to_dgl_context(standin.DEVICE if _is_there(self) else "cpu")

    def moved(self: Any, context: Any) -> Any:
        found = copy_to(self, where(self))
        setattr(found, _MARK, _is_ours(context))
        return found

    HeteroGraphIndex.ctx, HeteroGraphIndex.copy_to = property(ctx), moved


def _of_lengths(lengths: Tensor) -> list[int]:
    assert lengths.device.type == "cpu", "DGL's library reads them on the host"
    return lengths.tolist()  # type: ignore[no-any-return]


def _segment_mm(
    a: Tensor, b: Tensor, out: Tensor, lengths: Tensor, b_trans: bool = False
) -> Tensor:
    CALLED.add("matrices of types in order")
    parts = zip(a.split(_of_lengths(lengths)), b.mT if b_trans else b, strict=True)
    return out.copy_(torch.cat([rows @ matrix for rows, matrix in parts]))


def _gradient_of_segments(a: Tensor, grad: Tensor, out: Tensor, lengths: Tensor) -> Tensor:
    sizes = _of_lengths(lengths)
    parts = zip(a.split(sizes), grad.split(sizes), strict=True)
    return out.copy_(torch.stack([rows.mT @ of_rows for rows, of_rows in parts]))


def _gather_mm(
    a: Tensor, b: Tensor, out: Tensor, idx_a: Tensor | None = None, idx_b: Tensor | None = None
) -> Tensor:
    CALLED.add("matrices of types")
    rows, matrices = (x if i is None else x[i.long()] for x, i in ((a, idx_a), (b, idx_b)))
    return out.copy_((rows.unsqueeze(1) @ matrices).squeeze(1))


def _gather_mm_scatter(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    idx_a: Tensor | None = None,
    idx_b: Tensor | None = None,
    idx_c: Tensor | None = None,
) -> Tensor:
    rows, others = (x if i is None else x[i.long()] for x, i in ((a, idx_a), (b, idx_b)))
    if out.dim() == 3:  # the gradient of matrices, each by all of its rows
        assert idx_c is not None
        return out.index_add_(0, idx_c.long(), rows.unsqueeze(2) * others.unsqueeze(1))
    assert idx_c is None, "no layer gathers rows and types at once"
    return out.copy_((rows.unsqueeze(1) @ others).squeeze(1))
