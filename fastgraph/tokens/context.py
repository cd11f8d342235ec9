r"""Context features of LargeGT: :math:`C_0 = \tilde A H` and :math:`C_1 = \tilde A C_0`.

:math:`\tilde A` is that of :func:`fastgraph.ops.gcn`, and so is each bit of the result. Here
neither the graph nor the features need fit into memory: panels of channels are computed one after
the other, for blocks of rows.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastgraph import manifest
from fastgraph.ops.spmm import spmm
from fastgraph.sampling.native_calls import check_tensors
from fastgraph.tokens.byte_counts import byte_count
from fastgraph.tokens.graph_files import NeighborLists, as_lists
from fastgraph.tokens.hop_features import DTYPES, FILE, FORMAT, HopFeatures

_EDGE_BYTES = 64
"""Bytes that a block needs for each of its edges while it is prepared and computed."""
_ROW_BYTES = 64
"""The same for each of its rows, and of their channels."""
_MOST_OF_BLOCK = 1 << 28
_BLOCK_ROWS = 1 << 16


def write_context(
    graph: Any,
    features: Tensor | Any,
    folder: Path | str,
    *,
    hops: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    memory: int | str = "4GiB",
) -> HopFeatures:
    """Compute context features into a file from which a ``TokenLoader`` gathers.

    What was begun in a folder and not finished, as it has no manifest, is begun again.

    Args:
        graph: an ``edge_index``, compressed columns ``(colptr, row)`` or a :class:`TokenGraph`, as
            for :func:`local_nodes`; int64 or int32, which may be mapped.
        features: ``[nodes, channels]``, a tensor or an array of floating-point numbers, which may
            be mapped. NaN pass, and are counted.
        folder: is made.
        hops: how many times the features are aggregated.
        dtype: bfloat16, float16 or float32, in which everything is computed and kept.
        memory: how much memory this may allocate. Pages of the files are not counted, as the system
            may drop them.

    Raises:
        FileExistsError: the folder is complete.
        OSError: there is not enough space for the file.
        TypeError: an argument has another type or dtype.
        ValueError: ``features`` have other rows than the graph, ``ptr`` falls or ends elsewhere
            than at the number of edges, or ``memory`` is too little.
        IndexError: an edge leads from no node.
    """
    folder = Path(folder)
    if (folder / manifest.NAME).exists():
        raise FileExistsError(f"{folder}: expected a new folder, got one that is complete")
    of_edges = isinstance(graph, Tensor | np.ndarray)
    (lists,) = as_lists(graph, "in", _num_rows(features) if of_edges else None)
    shape = _checked(lists, features, hops, dtype)
    bound = byte_count("memory", memory)
    plan = _Plan.within(bound, lists, shape, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / FILE
    with file.open("wb") as stream:
        # What does not fit is refused here: a mapped write would end the process.
        os.posix_fallocate(stream.fileno(), 0, shape[0] * shape[1] * shape[2] * dtype.itemsize)
    size = shape[0] * shape[1] * shape[2]
    rows = torch.from_file(str(file), shared=True, size=size, dtype=dtype).view(shape)
    num_nan = _fill(rows, lists, features, plan)
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
    content = {
        "num_nodes": shape[0],
        "hops": hops,
        "channels": shape[2],
        "dtype": str(dtype).removeprefix("torch."),
        "num_nan": num_nan,
    }
    manifest.write(folder, FORMAT, content, {FILE: manifest.seal(file)})
    return HopFeatures(folder)


class _Plan(NamedTuple):
    """How the work is cut: channels of a panel, and entries with self-loops of a block."""

    channels: int
    entries: int

    @classmethod
    def within(
        cls,
        memory: int,
        lists: NeighborLists,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
    ) -> _Plan:
        """The widest panels that the memory allows.

        Raises:
            ValueError: it does not allow one channel.
        """
        num_nodes, parts, channels = shape
        longest = max(int(ptr.diff().max()) for _, _, ptr in _ptr_blocks(lists[0])) + 1
        rows = min(num_nodes, _BLOCK_ROWS)
        panels = 2 if parts > 2 else 1
        of_channel = panels * num_nodes * dtype.itemsize + rows * _ROW_BYTES
        always = 4 * num_nodes + rows * _ROW_BYTES
        most = min(memory // 4, _MOST_OF_BLOCK) // _EDGE_BYTES
        for block in (max(longest, most), longest):  # shorter blocks may leave enough
            spare = memory - always - block * _EDGE_BYTES
            if spare >= of_channel:
                return cls(min(channels, spare // of_channel), block)
        least = always + longest * _EDGE_BYTES + of_channel
        raise ValueError(f"memory must be at least {least} bytes for this graph, got {memory}")


def _num_rows(features: Any) -> int:
    return int((tuple(getattr(features, "shape", ())) or (0,))[0])


def _checked(
    lists: NeighborLists, features: Any, hops: int, dtype: torch.dtype
) -> tuple[int, int, int]:
    """The shape of the result."""
    if dtype not in DTYPES.values():
        raise TypeError(f"dtype must be one of {sorted(DTYPES)}, got {dtype}")
    if isinstance(hops, bool) or not isinstance(hops, int) or hops < 1:
        raise ValueError(f"hops must be an int of at least 1, got {hops!r}")
    ptr, neighbors = lists
    num_nodes = ptr.numel() - 1
    if not isinstance(features, Tensor | np.ndarray):
        raise TypeError(f"features must be a tensor or an array, got {type(features).__name__}")
    if isinstance(features, np.ndarray) and not features.dtype.isnative:
        raise TypeError(f"features must have this machine's byte order, got {features.dtype}")
    if isinstance(features, Tensor):
        check_tensors(features=features)
    shape = tuple(features.shape)
    if num_nodes < 1:
        raise ValueError("graph must have at least one node, got none")
    if len(shape) != 2 or shape[0] != num_nodes or shape[1] < 1:
        raise ValueError(
            f"features must have shape [{num_nodes}, channels], a row for each node of the graph, "
            f"got {list(shape)}"
        )
    if not _block(features, 0, 1, 0, 1).is_floating_point():
        raise TypeError(f"features must be floating-point numbers, got {features.dtype}")
    if int(ptr[0]) != 0 or int(ptr[-1]) != neighbors.numel():
        raise ValueError(
            f"ptr must run from 0 to {neighbors.numel()}, the number of edges, got {int(ptr[0])} "
            f"to {int(ptr[-1])}"
        )
    return num_nodes, hops + 1, shape[1]


def _fill(out: Tensor, lists: NeighborLists, features: Any, plan: _Plan) -> int:
    """Compute all rows; returns how many values are NaN."""
    num_nodes, parts, channels = out.shape
    num_nan = 0
    with torch.no_grad():
        scale = _scales(lists, plan)
        for first in range(0, channels, plan.channels):
            last = min(first + plan.channels, channels)
            panel = torch.empty(num_nodes, last - first, dtype=out.dtype)
            for begin in range(0, num_nodes, _BLOCK_ROWS):
                end = min(begin + _BLOCK_ROWS, num_nodes)
                block = _block(features, begin, end, first, last)
                num_nan += int(block.isnan().sum())
                panel[begin:end] = block
            out[:, 0, first:last] = panel
            for part in range(1, parts):
                following = torch.empty_like(panel) if part + 1 < parts else None
                for rows in _row_blocks(lists, plan):
                    ends = scale[rows.index] * scale[rows.begin : rows.end].repeat_interleave(
                        rows.ptr.diff(), output_size=rows.index.numel()
                    )
                    sums = spmm(
                        panel,
                        rows.index,
                        ends.to(out.dtype),
                        ptr=rows.ptr,
                        num_out=rows.end - rows.begin,
                    )
                    out[rows.begin : rows.end, part, first:last] = sums
                    if following is not None:
                        following[rows.begin : rows.end] = sums
                if following is not None:
                    panel = following
    if num_nan:
        warnings.warn(f"features hold {num_nan} NaN, which spread to the context", stacklevel=3)
    return num_nan


def _scales(lists: NeighborLists, plan: _Plan) -> Tensor:
    """One over the root of each node's degree, as graph convolutions have it."""
    scale = torch.empty(lists[0].numel() - 1)
    for rows in _row_blocks(lists, plan):
        scale[rows.begin : rows.end] = rows.ptr.diff()
    return scale.pow_(-0.5)


class _Rows(NamedTuple):
    """Rows of the graph, with one self-loop each, which follows their other entries."""

    begin: int
    end: int
    ptr: Tensor
    index: Tensor  # type: ignore[assignment]  # shadows tuple.index


def _row_blocks(lists: NeighborLists, plan: _Plan) -> Iterator[_Rows]:
    """All rows, in blocks that are checked."""
    ptr, neighbors = lists
    num_nodes = ptr.numel() - 1
    for first, _, own in _ptr_blocks(ptr):
        cost = own.diff().add_(1).cumsum(0)
        begin = 0
        while begin < cost.numel():
            done = int(cost[begin - 1]) if begin else 0
            end = max(begin + 1, int(torch.searchsorted(cost, done + plan.entries, right=True)))
            yield _with_loops(first + begin, own[begin : end + 1], neighbors, num_nodes)
            begin = end


def _ptr_blocks(ptr: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """The first and the last row of a block, and its part of ``ptr``, int64, which ascends."""
    for begin in range(0, ptr.numel() - 1, _BLOCK_ROWS):
        end = min(begin + _BLOCK_ROWS, ptr.numel() - 1)
        own = ptr[begin : end + 1].long()
        falls = own.diff() < 0
        if bool(falls.any()):
            at = int(falls.int().argmax()) + 1
            raise ValueError(f"ptr must not fall, got {int(own[at])} at position {begin + at}")
        yield begin, end, own


def _with_loops(begin: int, ptr: Tensor, neighbors: Tensor, num_nodes: int) -> _Rows:
    first = int(ptr[0])
    own = neighbors[first : int(ptr[-1])]
    if own.numel():
        low, high = map(int, own.aminmax())
        if low < 0 or high >= num_nodes:
            wrong = (own < 0) | (own >= num_nodes)
            at = int(wrong.int().argmax())
            raise IndexError(
                f"row holds {int(own[at])} at position {first + at}, expected 0 <= node < "
                f"{num_nodes}"
            )
    num_rows = ptr.numel() - 1
    nodes = torch.arange(begin, begin + num_rows, dtype=torch.int32)
    keeps = own != nodes.repeat_interleave(ptr.diff(), output_size=own.numel())
    kept = torch.zeros(own.numel() + 1, dtype=torch.int64)
    torch.cumsum(keeps, 0, out=kept[1:])
    # Each row has its entries but for self-loops, and then one of these.
    new_ptr = kept[ptr - first] + torch.arange(num_rows + 1)
    new = torch.empty(int(new_ptr[-1]), dtype=torch.int32)
    is_loop = torch.zeros(new.numel(), dtype=torch.bool)
    is_loop[new_ptr[1:] - 1] = True
    new[is_loop] = nodes
    new[~is_loop] = own[keeps].int()
    return _Rows(begin, begin + num_rows, new_ptr, new)


def _block(features: Any, begin: int, end: int, first: int, last: int) -> Tensor:
    """Some rows and channels of a tensor or an array."""
    part = features[begin:end, first:last]
    return part if isinstance(part, Tensor) else torch.tensor(part)
