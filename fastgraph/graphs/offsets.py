"""Where parts of known sizes begin and end."""

from __future__ import annotations

import torch
from torch import Tensor


def offsets_of(counts: Tensor) -> Tensor:
    """The offsets of parts of these sizes, ``[parts + 1]``, from 0 on."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])
