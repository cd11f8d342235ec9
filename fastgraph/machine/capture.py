"""CUDA graphs: the calls that are refused while one is captured.

A captured graph replays kernels with the addresses and numbers that they had. So what these belong
to must exist before and stay, and nothing may be drawn or decided on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_capturing(*tensors: Tensor | None) -> bool:
    """True if what is done with these tensors is captured in a CUDA graph."""
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            return torch.cuda.is_current_stream_capturing()
    return False


def refuse_to_capture(what: str, *tensors: Tensor | None) -> None:
    """Refuse what would have to be found out while a CUDA graph is captured.

    Args:
        what: what would be found out.
        tensors: what it is found out from.

    Raises:
        RuntimeError: operations on these tensors are being captured.
    """
    if is_capturing(*tensors):
        raise RuntimeError(
            f"{what} cannot be found out while a CUDA graph is captured: run the same step, "
            "forward and backward, on the same edge_index before"
        )
