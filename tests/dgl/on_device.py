"""Graphs of DGL on the stand-in device, of which DGL knows nothing: it names the CPU and CUDA."""

from __future__ import annotations

from typing import Any

import torch

from tests import standin
from tests.dgl.graphs import dgl

from dgl import backend  # isort: skip
from dgl._ffi.runtime_ctypes import DGLContext  # isort: skip

_NUMBER = 12
"""Of a kind of device that DGL's library has a name for, and nothing else."""


def install() -> None:
    """Have DGL's Python call the stand-in what it calls a GPU; its library refuses it."""
    standin.install()
    DGLContext.STR2MASK[standin.DEVICE] = _NUMBER
    device_id, to_backend_ctx, copy_to = (
        getattr(backend, name) for name in ("device_id", "to_backend_ctx", "copy_to")
    )

    def number(ctx: Any) -> int:
        is_ours = torch.device(ctx).type == standin.DEVICE
        return 0 if is_ours else device_id(ctx)

    def device_of(ctx: Any) -> torch.device:
        is_ours = ctx.device_type == _NUMBER
        return torch.device(standin.DEVICE, 0) if is_ours else to_backend_ctx(ctx)

    def copied(x: Any, ctx: Any, **kwargs: Any) -> Any:
        is_ours = torch.device(ctx).type == standin.DEVICE
        return x.to(ctx, **kwargs) if is_ours else copy_to(x, ctx, **kwargs)

    backend.device_id, backend.to_backend_ctx, backend.copy_to = number, device_of, copied
    assert dgl.backend is backend
