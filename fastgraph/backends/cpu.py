"""The C++ kernels for the CPU."""

from __future__ import annotations

import torch

from fastgraph.backends.block_attention import block_attention_kernels
from fastgraph.backends.building import NativeBuilder
from fastgraph.backends.coo import coo_kernels
from fastgraph.backends.edge_programs import edge_program_kernel
from fastgraph.backends.kernels import dense_attention_kernels, native_kernels
from fastgraph.machine import native
from fastgraph.plugins.backend import FLOATING, Kernel
from fastgraph.registry.operators import BIASED_ATTENTION, EDGE_ATTENTION
from fastgraph.tune.row_order import RowOrder

_BUILDER = NativeBuilder(native.library)
_ROWS = RowOrder(native.library)
_KERNELS = native_kernels(
    native.library,
    _ROWS,
    at_once={"gat"},
    leaves_out=True,
    by_destination={"segment_reduce"},
    writes_edges={"gatv2", "edge_attention"},
    more=(EDGE_ATTENTION, BIASED_ATTENTION),
)
_KERNELS |= coo_kernels(native.library)
_KERNELS |= dense_attention_kernels(native.library)
_KERNELS |= block_attention_kernels(native.library, _KERNELS)
_ROUNDED = {"edge_attention", "edge_attention_backward"}
"""Kernels that keep what they fold in the dtype of the features: half types would score by it."""
_KERNELS["edge_program"] = edge_program_kernel(native.library, _ROWS, by_terms=True, repeats=True)


class CpuBackend:
    """Vectorised, multi-threaded kernels; see ``fastgraph/csrc/cpu``."""

    name = "cpu"
    priority = 100

    def unavailable(self) -> str | None:
        return native.why_unavailable()

    def kernel(self, operator: str, device_type: str, dtype: torch.dtype) -> Kernel | None:
        if device_type != "cpu" or dtype not in FLOATING:
            return None
        if operator in _ROUNDED and dtype.itemsize < 4:
            return None
        return _KERNELS.get(operator)

    def builder(self, device_type: str) -> NativeBuilder | None:
        return _BUILDER if device_type == "cpu" else None
