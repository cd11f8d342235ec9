r"""Context features of LargeGT: :math:`C_0 = \tilde A H` and :math:`C_1 = \tilde A C_0`.

:math:`\tilde A` is that of :func:`fastgraph.ops.gcn`, and so is each bit of the result. Here
neither the graph nor the features need fit into memory: panels of channels are computed one after
the other, for blocks of rows, of which a journal keeps account while the folder is not finished.
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
from fastgraph.layers.arguments import check_flags, check_functions, checked_path
from fastgraph.ops.spmm import spmm
from fastgraph.sampling.native_calls import check_tensors
from fastgraph.tokens.byte_counts import byte_count
from fastgraph.tokens.graph_files import NeighborLists, as_lists
from fastgraph.tokens.hop_features import DTYPES, FILE, FORMAT, HopFeatures
from fastgraph.tokens.journal import (
    JOURNAL,
    Progress,
    add_to_journal,
    begin_journal,
    check_identity,
    cut_journal,
    digest_of_graph,
    digest_of_rows,
    disk_may_be_full,
    locked,
    read_journal,
)

_EDGE_BYTES = 64
"""Bytes that a block needs for each of its edges while it is prepared and computed."""
_ROW_BYTES = 64
"""The same for each of its rows, and of their channels."""
_MOST_OF_BLOCK = 1 << 28
_BLOCK_ROWS = 1 << 16
_SYNCED_BYTES = 1 << 25
"""That many are computed before they are made permanent, as that takes the disk its time."""
_OF_BLOCK = ("channel", "part", "begin", "end", "num_nan", "sha256")
"""Of a line of the journal."""


def write_context(
    graph: Any,
    features: Tensor | Any,
    folder: Path | str,
    *,
    hops: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    memory: int | str = "4GiB",
    resume: bool = False,
    progress: Progress | None = None,
) -> HopFeatures:
    """Compute context features into a file from which a ``TokenLoader`` gathers.

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
        resume: whether what is in the folder is finished rather than refused. What is whole is
            read, for its SHA-256, and left as it is.
        progress: called after each block with the number of rows that are done, and of all; each
            part of a row counts in each panel.

    Raises:
        FileExistsError: the folder is not empty, and is not to be resumed.
        FileFormatError: it is of another graph or of other features, or is cut off.
        BlockingIOError: another process is writing it.
        OSError: there is not enough space for the file, or no more.
        TypeError: an argument has another type or dtype.
        ValueError: ``features`` have other rows than the graph, ``ptr`` falls or ends elsewhere
            than at the number of edges, or ``memory`` is too little.
        IndexError: an edge leads from no node.
    """
    folder = checked_path(folder=folder)
    check_flags(resume=resume)
    check_functions(progress=progress, or_none=True)
    if not isinstance(features, Tensor | np.ndarray):
        raise TypeError(f"features must be a tensor or an array, got {type(features).__name__}")
    of_edges = isinstance(graph, Tensor | np.ndarray)
    (lists,) = as_lists(graph, "in", _num_rows(features) if of_edges else None)
    shape = _checked(lists, features, hops, dtype)
    bound = byte_count("memory", memory)
    plan = _Plan.within(bound, lists, shape, dtype)
    identity: dict[str, Any] = {
        "num_nodes": shape[0],
        "hops": hops,
        "channels": shape[2],
        "dtype": str(dtype).removeprefix("torch."),
        "graph": digest_of_graph([lists]),
        "features": digest_of_rows(features),
    }
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, "these features"):
        if not resume and (found := sorted(path.name for path in folder.iterdir())):
            raise FileExistsError(
                f"{folder}: expected a new folder, got {found[0]} in it: resume finishes what was "
                "begun, or leaves it if it is whole"
            )
        if not _is_whole(folder, identity):
            work = _begun(folder, identity, plan, shape, dtype)
            needed = work.plan.bytes(lists, shape, dtype)
            if needed > bound:
                raise ValueError(
                    f"memory must be at least {needed} bytes to go on with what was begun, got "
                    f"{bound}"
                )
            with disk_may_be_full(folder):
                num_nan = _fill(work, lists, features, progress or (lambda done, total: None))
                content = {**identity, "num_nan": num_nan}
                manifest.write(folder, FORMAT, content, {FILE: manifest.seal(folder / FILE)})
                (folder / JOURNAL).unlink()
                manifest.sync_folder(folder)
    made = HopFeatures(folder)
    if made.num_nan:
        warnings.warn(
            f"features hold {made.num_nan} NaN, which spread to the context", stacklevel=2
        )
    return made


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
        longest = _longest(lists)
        most = min(memory // 4, _MOST_OF_BLOCK) // _EDGE_BYTES
        for entries in (max(longest, most), longest):  # shorter blocks may leave enough
            one = cls(1, entries).bytes(lists, shape, dtype)
            if memory >= one:
                of_channel = cls(2, entries).bytes(lists, shape, dtype) - one
                return cls(min(shape[2], 1 + (memory - one) // of_channel), entries)
        raise ValueError(f"memory must be at least {one} bytes for this graph, got {memory}")

    def bytes(self, lists: NeighborLists, shape: tuple[int, int, int], dtype: torch.dtype) -> int:
        """How much is allocated."""
        num_nodes, parts, _ = shape
        rows = min(num_nodes, _BLOCK_ROWS)
        panels = 2 if parts > 2 else 1
        of_channel = panels * num_nodes * dtype.itemsize + rows * _ROW_BYTES
        always = 4 * num_nodes + rows * _ROW_BYTES
        return always + self.entries * _EDGE_BYTES + self.channels * of_channel


def _longest(lists: NeighborLists) -> int:
    """The entries of the longest row, with its self-loop."""
    num_nodes = lists.ptr.numel() - 1
    return max(int(own.diff().max()) for _, _, own in _ptr_blocks(lists.ptr, 0, num_nodes)) + 1


def _num_rows(features: Any) -> int:
    return int((tuple(getattr(features, "shape", ())) or (0,))[0])


def _checked(
    lists: NeighborLists, features: Any, hops: int, dtype: torch.dtype
) -> tuple[int, int, int]:
    """The shape of the result."""
    if dtype not in DTYPES.values():
        raise TypeError(f"dtype must be one of {sorted(DTYPES)}, got {dtype}")
    if isinstance(hops, bool) or not isinstance(hops, int) or not 1 <= hops < 2**31:
        raise ValueError(f"hops must be an int of at least 1, and less than 2^31, got {hops!r}")
    num_nodes = lists.ptr.numel() - 1
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
    if not _tensor(features[:1, :1]).is_floating_point():
        raise TypeError(f"features must be floating-point numbers, got {features.dtype}")
    return num_nodes, hops + 1, shape[1]


class _Work(NamedTuple):
    """Rows that are not all computed, and the account of those that are."""

    folder: Path
    rows: Tensor
    plan: _Plan
    done: list[dict[str, Any]]


def _is_whole(folder: Path, identity: dict[str, Any]) -> bool:
    if (folder / JOURNAL).exists() or not (folder / manifest.NAME).exists():
        return False
    whole = manifest.read(folder, FORMAT)
    _check_same(folder, identity, whole.content)
    manifest.verify(whole, [FILE])
    return True


def _check_same(folder: Path, identity: dict[str, Any], found: dict[str, Any]) -> None:
    other = "these are features of another graph, of others or in another form"
    check_identity(folder, identity, identity, found, other)


def _begun(
    folder: Path,
    identity: dict[str, Any],
    plan: _Plan,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
) -> _Work:
    """The rows that are there already, or a new file."""
    file, journal = folder / FILE, folder / JOURNAL
    size = shape[0] * shape[1] * shape[2]
    lines = read_journal(journal, set(_OF_BLOCK))
    if lines:
        head = lines[0]["identity"]
        _check_same(folder, identity, head)
        plan = _Plan(*head["plan"])
        if not file.is_file() or file.stat().st_size != size * dtype.itemsize:
            raise manifest.FileFormatError(
                f"{file}: expected {size * dtype.itemsize} bytes, got others: it is cut off"
            )
        cut_journal(journal, lines)
    else:
        if foreign := sorted({path.name for path in folder.iterdir()} - {FILE, JOURNAL}):
            raise manifest.FileFormatError(f"{folder}: expected features, got {foreign[0]}")
        with file.open("wb") as stream:
            # What does not fit is refused here: a mapped write would end the process.
            try:
                os.posix_fallocate(stream.fileno(), 0, size * dtype.itemsize)
            except OSError as error:
                file.unlink()  # so that others have the space
                text = f"{os.strerror(error.errno or 0)}: expected {size * dtype.itemsize} bytes"
                raise OSError(error.errno, text, str(file)) from error
            os.fsync(stream.fileno())
        begin_journal(journal, {**identity, "plan": plan})
    rows = torch.from_file(str(file), shared=True, size=size, dtype=dtype).view(shape)
    return _Work(folder, rows, plan, lines[1:])


def _fill(work: _Work, lists: NeighborLists, features: Any, progress: Progress) -> int:
    """Compute all rows; returns how many values are NaN."""
    out, plan = work.rows, work.plan
    num_nodes, parts, channels = out.shape
    num_nan = number = rows = 0
    total = num_nodes * parts * -(-channels // plan.channels)
    scale = _scales(lists, plan)
    with (
        torch.no_grad(),
        (work.folder / FILE).open("rb") as file,
        (work.folder / JOURNAL).open("ab") as log,
    ):
        for first in range(0, channels, plan.channels):
            last = min(first + plan.channels, channels)
            row_bytes = (last - first) * out.element_size()
            step = max(_SYNCED_BYTES // row_bytes // _BLOCK_ROWS, 1) * _BLOCK_ROWS
            panel = out.new_empty(0)
            for part in range(parts):
                following = out.new_empty(num_nodes if part + 1 < parts else 0, last - first)
                for begin in range(0, num_nodes, step):
                    end = min(begin + step, num_nodes)
                    place = out[begin:end, part, first:last]
                    if number < len(work.done):
                        found = _as_noted(work, number, place, (first, part, begin, end))
                    else:
                        found = 0
                        if part:
                            for own in _row_ranges(lists[0], plan, begin, end):
                                at = own.begin - begin
                                place[at : at + own.num_rows] = _sums(panel, own, lists, scale)
                        else:
                            found = _copy(features[begin:end, first:last], place)
                        os.fdatasync(file.fileno())
                        line = (first, part, begin, end, found, digest_of_rows(place))
                        add_to_journal(log, dict(zip(_OF_BLOCK, line, strict=True)))
                    if len(following):
                        following[begin:end] = place
                    num_nan, number, rows = num_nan + found, number + 1, rows + end - begin
                    progress(rows, total)
                panel = following
    return num_nan


def _as_noted(work: _Work, number: int, place: Tensor, expected: tuple[int, ...]) -> int:
    """How many NaN a block has, which the journal has account of."""
    line = work.done[number]
    found = tuple(line[name] for name in _OF_BLOCK[:4])
    if found != expected or digest_of_rows(place) != line["sha256"]:
        raise manifest.FileFormatError(
            f"{work.folder / FILE}: expected rows {line['begin']} to {line['end']} as the journal "
            "has them, got others: it is corrupt"
        )
    return int(line["num_nan"])


def _copy(features: Any, out: Tensor) -> int:
    """Copy rows, a tensor or an array; returns how many values are NaN."""
    num_nan = 0
    for begin in range(0, len(out), _BLOCK_ROWS):
        block = _tensor(features[begin : begin + _BLOCK_ROWS])
        num_nan += int(block.isnan().sum())
        out[begin : begin + _BLOCK_ROWS] = block
    return num_nan


def _sums(panel: Tensor, own: _Range, lists: NeighborLists, scale: Tensor) -> Tensor:
    rows = _with_loops(own, lists)
    ends = scale[rows.index] * scale[rows.begin : rows.end].repeat_interleave(
        rows.ptr.diff(), output_size=rows.index.numel()
    )
    size = rows.end - rows.begin
    return spmm(panel, rows.index, ends.to(panel.dtype), ptr=rows.ptr, num_out=size)


def _scales(lists: NeighborLists, plan: _Plan) -> Tensor:
    """One over the root of each node's degree, as graph convolutions have it."""
    scale = torch.empty(lists[0].numel() - 1)
    for own in _row_ranges(lists[0], plan, 0, len(scale)):
        rows = _with_loops(own, lists)
        scale[rows.begin : rows.end] = rows.ptr.diff()
    return scale.pow_(-0.5)


class _Range(NamedTuple):
    """Rows of the graph, and where each begins and the last ends."""

    begin: int
    num_rows: int
    ptr: Tensor


class _Rows(NamedTuple):
    """Rows of the graph, with one self-loop each, which follows their other entries."""

    begin: int
    end: int
    ptr: Tensor
    index: Tensor  # type: ignore[assignment]  # shadows tuple.index


def _row_ranges(ptr: Tensor, plan: _Plan, first: int, last: int) -> Iterator[_Range]:
    """Some rows, in blocks of so many entries with self-loops."""
    for start, _, own in _ptr_blocks(ptr, first, last):
        cost = own.diff().add_(1).cumsum(0)
        begin = 0
        while begin < cost.numel():
            done = int(cost[begin - 1]) if begin else 0
            end = max(begin + 1, int(torch.searchsorted(cost, done + plan.entries, right=True)))
            yield _Range(start + begin, end - begin, own[begin : end + 1])
            begin = end


def _ptr_blocks(ptr: Tensor, first: int, last: int) -> Iterator[tuple[int, int, Tensor]]:
    """The first and the last row of a block, and its part of ``ptr``, int64, which ascends."""
    for begin in range(first, last, _BLOCK_ROWS):
        end = min(begin + _BLOCK_ROWS, last)
        own = ptr[begin : end + 1].long()
        falls = own.diff() < 0
        if bool(falls.any()):
            at = int(falls.int().argmax()) + 1
            raise ValueError(f"ptr must not fall, got {int(own[at])} at position {begin + at}")
        yield begin, end, own


def _with_loops(rows: _Range, lists: NeighborLists) -> _Rows:
    """Rows with their entries, which are checked."""
    begin, num_rows, ptr = rows
    neighbors, num_nodes = lists.neighbors, lists.ptr.numel() - 1
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


def _tensor(features: Any) -> Tensor:
    """A tensor of one, or of an array."""
    return features if isinstance(features, Tensor) else torch.tensor(features)
