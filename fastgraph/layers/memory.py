"""New tensors of the size of all nodes, in huge pages.

The system hands out the memory of a large tensor in small pages: that takes 25,000 page faults for
100 MB, often longer than filling it, and gathering rows from small pages is slower.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastgraph.machine import native

LARGE = 1 << 23
"""Bytes. Smaller results the C library keeps by itself, so that their pages are there already."""


def new_rows(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor on the device of another, and with its dtype unless there is one."""
    out = like.new_empty(tuple(shape), dtype=dtype)
    if out.nbytes >= LARGE and out.device.type == "cpu" and native.is_available():
        native.library().prefer_huge_pages(out)
    return out
