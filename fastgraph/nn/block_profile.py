"""How large sub-blocks should be, by how long attention on them takes."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fastgraph import ops
from fastgraph.layers.arguments import check_heads, check_integers, check_kinds
from fastgraph.nn.dual_pattern import DualPattern
from fastgraph.nn.reformation import Reformation
from fastgraph.nn.sub_blocks import Reformed

BLOCKS = (2, 4, 8, 16, 32, 64)


class BlockProfile(NamedTuple):
    """The fastest size of sub-blocks.

    Attributes:
        block: rows and columns of a sub-block.
        seconds: a step of attention with each, the least of several.
    """

    block: int
    seconds: dict[int, float]


def fastest_block(
    pattern: DualPattern,
    channels: int,
    heads: int,
    *,
    clusters: int | Tensor | None = None,
    repeats: int = 3,
    seed: int = 0,
) -> BlockProfile:
    """Measure attention, forward and backward, with sub-blocks of 2 to 64 rows.

    On patterns of which :class:`Reformation` transfers pairs below the density of the graph, in
    float32 on the pattern's device. With several ranks all call it, and go on with what rank 0 has
    measured. TorchGT (section III-D) measured 16 rows at 64 channels on an RTX 3090.

    Args:
        pattern: of the graphs.
        channels: of nodes, a multiple of ``heads``.
        heads: of attention.
        clusters: as for :class:`Reformation`.
        repeats: of each step, in turns, at least 1.
        seed: of the random queries, keys and values.

    Raises:
        TypeError: ``pattern`` is none.
        ValueError: an argument is out of its range.
    """
    check_kinds(DualPattern, pattern=pattern)
    check_heads(channels, heads)
    check_integers(repeats=repeats)
    check_integers(0, seed=seed)
    draw = torch.Generator().manual_seed(seed)
    device, shape = pattern.ptr.device, (3, pattern.num_rows, heads, channels // heads)
    operands = torch.randn(shape, generator=draw).to(device).requires_grad_()
    entries = {}
    for block in BLOCKS:
        made = Reformation(clusters=clusters, block=block).entries(pattern, 4 * channels)
        assert made is not None  # but for selections by mass
        entries[block] = made
        _step(operands, made)  # sorts what backward passes need
    seconds = dict.fromkeys(BLOCKS, float("inf"))
    for _ in range(repeats):
        for block in BLOCKS:
            seconds[block] = min(seconds[block], _step(operands, entries[block]))
    found = [BlockProfile(min(BLOCKS, key=seconds.__getitem__), seconds)]
    if dist.is_available() and dist.is_initialized():
        dist.broadcast_object_list(found, 0)
    return found[0]


def _step(operands: Tensor, entries: Reformed) -> float:
    """The seconds of a forward and a backward pass."""
    is_gpu = operands.is_cuda
    if is_gpu:
        torch.cuda.synchronize(operands.device)
    start = time.perf_counter()
    with torch.enable_grad():
        query, key, value = operands.unbind()
        out, _, _ = ops.attention(query, key, value, entries.sources, ptr=entries.ptr)
    torch.autograd.grad(out.sum(), operands)
    if is_gpu:
        torch.cuda.synchronize(operands.device)
    return time.perf_counter() - start
